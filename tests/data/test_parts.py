"""Work in parts: the same files for any number of workers, whatever is killed."""

import errno
import gzip
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.data.parts import do_parts, plan_parts, read_texts, sizes_of


SETTINGS = {"column": "text"}


@pytest.fixture
def corpus(tmp_path) -> list[str]:
    """Parquet with groups of rows that no part fits, and JSON lines."""
    first = pa.table({"text": [f"row {number}" for number in range(50)]})
    pq.write_table(first, tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(23)))
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]


def upper(part):
    texts = [text.upper() for text in read_texts(part, "text")]
    return pa.table({"text": texts}), {"rows": len(texts)}


def upper_or_die(part):
    """Kills its own process when it comes to the third part, once."""
    died = Path(part.file).with_name("died")
    if part.number == 2 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return upper(part)


def texts_in(folder) -> list[str]:
    return [text for file in sorted(Path(folder).glob("*.parquet")) for text in pq.read_table(file)["text"].to_pylist()]


EXPECTED = [f"ROW {number}" for number in range(50)] + [f"LINE {number}" for number in range(23)]


def test_what_has_a_record_is_not_done_again(corpus, tmp_path):
    plan, folder = plan_parts(corpus, 6), tmp_path / "out"
    records = do_parts(plan, upper, str(folder), SETTINGS)
    assert texts_in(folder) == EXPECTED and sum(record["rows"] for record in records) == 73
    (folder / "part-00003.json").unlink()
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    do_parts(plan, upper, str(folder), SETTINGS)
    after = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    assert {name for name in after if after[name] != before[name]} == {"part-00003.parquet"}
    # Parts of other settings, or with other rows, are no results of this run.
    for rows, settings, named in ((6, {"column": "other"}, "column"), (9, SETTINGS, "rows")):
        with pytest.raises(SettingsMismatch, match=named):
            do_parts(plan_parts(corpus, rows), upper, str(folder), settings)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("b.jsonl", b'{"body": "x"}\n{"text": "y"}\n', "b.jsonl, row 1 has no column 'body'"),
        ("b.jsonl", b'{"body": "x"}\n\n{', "b.jsonl, row 1: "),
        ("b.jsonl.gz", gzip.compress(b'{"body": "x"}\n' * 100, mtime=0)[:-9], "b.jsonl.gz, row 100: "),
        ("b.parquet", b"no parquet", "b.parquet: "),
        ("b.jsonl", b"\n", "b.jsonl is empty"),
    ],
)
def test_faults_are_named_by_file_and_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        for part in plan_parts([str(tmp_path / name)], 1):
            read_texts(part, "body")


def test_any_kind_of_source_is_cut(corpus, tmp_path):
    """Also tables and documents that are read as one, of which a part may be several files."""
    rows = [text.lower() for text in EXPECTED[:50]]
    for kind in ("csv", "txt"):
        (tmp_path / kind).mkdir()
    for number in range(50):
        (tmp_path / "txt" / f"{number:02}.txt").write_text(rows[number])
    for number in range(5):
        (tmp_path / "csv" / f"{number}.csv").write_text("\n".join(["text", *rows[10 * number :][:10]]))
    (tmp_path / "array.json").write_text(json.dumps([{"text": row} for row in rows]))
    for source in ("txt", "csv", "csv/*.csv", "array.json", "a.parquet"):
        plan = plan_parts([str(tmp_path / source)], 20)
        assert [part.rows for part in plan] == [20, 20, 10]
        assert [text for part in plan for text in read_texts(part, "text")] == rows, source
        assert sum(sizes_of(plan)) > 0


@pytest.mark.parametrize("skip, most", [(0, 20), (5, None), (20, 40), (60, 5), (80, 3)])
def test_rows_may_be_skipped_and_counted(corpus, skip, most):
    texts = [text for part in plan_parts(corpus, 9, skip, most) for text in read_texts(part, "text")]
    assert [text.upper() for text in texts] == EXPECTED[skip:][:most]


def test_a_full_disk_is_said_with_the_file(corpus, tmp_path, monkeypatch):
    def full(table, file, compression):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="part-00000.parquet could not be written: the disk is full"):
        do_parts(plan_parts(corpus, 10), upper, str(tmp_path / "out"), SETTINGS)


def note_process(part):
    Path(part.file).with_name(f"process-{os.getpid()}").touch()
    time.sleep(60)


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(corpus, tmp_path):
    arguments = (plan_parts(corpus, 10), note_process, str(tmp_path / "out"), SETTINGS, 2)
    parent = multiprocessing.get_context("spawn").Process(target=do_parts, args=arguments)
    parent.start()
    while len(workers := list(tmp_path.glob("process-*"))) < 2:
        time.sleep(0.05)
    parent.kill()
    parent.join()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{worker.name.split('-')[1]}").exists() for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_after_a_worker_that_died_the_same_call_does_the_rest(corpus, tmp_path):
    plan, folder = plan_parts(corpus, 10), str(tmp_path / "out")
    with pytest.raises(RuntimeError, match="A worker died"):
        do_parts(plan, upper_or_die, folder, SETTINGS, workers=2)
    do_parts(plan, upper_or_die, folder, SETTINGS, workers=2)
    assert texts_in(folder) == EXPECTED

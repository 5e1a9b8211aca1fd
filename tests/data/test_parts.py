"""Work in parts: the same files for any number of workers, whatever is killed."""

import gzip
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.data.parts import do_parts, join, plan_parts, read_part, read_texts


SETTINGS = {"column": "text"}


@pytest.fixture
def corpus(tmp_path) -> list[str]:
    """Parquet with groups of rows that no part fits, and JSON lines."""
    first = pa.table({"text": [f"row {number}" for number in range(50)]})
    pq.write_table(first, tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(23)))
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]


def upper(part):
    texts = read_part(part, ["text"])["text"].to_pylist()
    return pa.table({"text": [text.upper() for text in texts]}), {"rows": len(texts)}


def upper_or_die(part, mark: str, times: int, number: int = 2):
    """Kills its own process for one part, some times."""
    if part.number == number:
        deaths = len(list(Path(mark).parent.glob(f"{Path(mark).name}*")))
        if deaths < times:
            Path(f"{mark}{deaths}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return upper(part)


def texts_in(folder) -> list[str]:
    return [text for file in sorted(Path(folder).glob("*.parquet")) for text in pq.read_table(file)["text"].to_pylist()]


EXPECTED = [f"ROW {number}" for number in range(50)] + [f"LINE {number}" for number in range(23)]


@pytest.mark.parametrize("workers, rows", [(1, 100), (1, 6), pytest.param(2, 10, marks=pytest.mark.slow)])
def test_any_workers_and_any_size_of_parts_give_the_same_rows(corpus, tmp_path, workers, rows):
    records = do_parts(plan_parts(corpus, rows), upper, str(tmp_path / "out"), SETTINGS, workers=workers)
    assert texts_in(tmp_path / "out") == EXPECTED
    assert sum(record["rows"] for record in records) == 73


def test_what_has_a_record_is_not_done_again(corpus, tmp_path):
    plan, folder = plan_parts(corpus, 10), tmp_path / "out"
    do_parts(plan, upper, str(folder), SETTINGS)
    (folder / "part-00003.json").unlink()
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    with pytest.raises(ValueError, match="number=3"):
        join(plan, str(folder), SETTINGS)
    do_parts(plan, upper, str(folder), SETTINGS)
    after = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
    assert {name for name in after if after[name] != before[name]} == {"part-00003.parquet"}


@pytest.mark.parametrize("rows, settings, named", [(10, {"column": "other"}, "column"), (9, SETTINGS, "rows")])
def test_parts_of_something_else_are_refused(corpus, tmp_path, rows, settings, named):
    do_parts(plan_parts(corpus, 10), upper, str(tmp_path / "out"), SETTINGS)
    with pytest.raises(SettingsMismatch, match=named):
        do_parts(plan_parts(corpus, rows), upper, str(tmp_path / "out"), settings)


def test_sources_and_output_may_be_urls(corpus, tmp_path):
    with fsspec.open("memory://corpus/a.parquet", "wb") as file:
        file.write(Path(corpus[0]).read_bytes())
    do_parts(plan_parts(["memory://corpus/*.parquet"], 20), upper, "memory://out", SETTINGS)
    files = fsspec.filesystem("memory").glob("/out/*")
    assert [file.split("/")[-1] for file in files[:2]] == ["part-00000.json", "part-00000.parquet"] and len(files) == 6
    with fsspec.open("memory://out/part-00002.parquet") as file:
        assert pq.read_table(file)["text"].to_pylist() == EXPECTED[40:50]


def test_a_missing_column_and_a_missing_file_are_named(corpus, tmp_path):
    plan = plan_parts(corpus, 10)
    with pytest.raises(ValueError, match="a.parquet.*'body'"):
        read_part(plan[0], ["body"])
    with pytest.raises(ValueError, match="b.jsonl.*'body'"):
        read_part(plan[-1], ["body"])
    (tmp_path / "none").mkdir()
    for name in ("none*.parquet", "none.parquet", "none"):
        with pytest.raises(FileNotFoundError, match="none"):
            plan_parts([str(tmp_path / name)], 10)


@pytest.mark.parametrize(
    "line, named", [(b"{", "row 1 is not valid"), (b'{"text": "\xff"}', "row 1 is not"), (b"[1]", "row 1 is .1.")]
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, named):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    (part,) = plan_parts([str(tmp_path / "a.jsonl")], 10)
    for read in (read_texts, lambda part, column: read_part(part, [column])):
        with pytest.raises(ValueError, match=f"a.jsonl, {named}"):
            read(part, "text")


def test_texts_are_texts_or_the_row_is_named(corpus, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": null}\n{"text": []}\n{"body": "a"}\n')
    plan = plan_parts([str(tmp_path / "a.jsonl")], 1)
    assert [read_texts(part, "text") for part in plan[:2]] == [["1"], [""]]
    for part, named in zip(plan[2:], ("row 2: 'text' holds list", "row 3 has no column 'text'")):
        with pytest.raises(ValueError, match=named):
            read_texts(part, "text")
    texts = [text for part in plan_parts(corpus, 6) for text in read_texts(part, "text")]
    assert [text.upper() for text in texts] == EXPECTED


def test_a_broken_file_is_named(tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 100)
    for name, content in (("a.jsonl.gz", whole[:-9]), ("b.jsonl.gz", b"no gzip"), ("a.parquet", b"no parquet")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            plan_parts([str(tmp_path / name)], 10)


@pytest.mark.parametrize("skip, most", [(0, 20), (5, None), (20, 40), (60, 5), (80, 3)])
def test_rows_may_be_skipped_and_counted(corpus, skip, most):
    texts = [text for part in plan_parts(corpus, 9, skip, most) for text in read_texts(part, "text")]
    assert [text.upper() for text in texts] == EXPECTED[skip:][:most]


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
def test_a_process_that_dies_twice_is_tried_again_and_one_that_dies_always_is_named(corpus, tmp_path):
    plan = plan_parts(corpus, 10)
    work = partial(upper_or_die, mark=str(tmp_path / "death"), times=2)
    do_parts(plan, work, str(tmp_path / "out"), SETTINGS, workers=2)
    assert texts_in(tmp_path / "out") == EXPECTED
    work = partial(upper_or_die, mark=str(tmp_path / "always"), times=99)
    with pytest.raises(RuntimeError, match="number=2"):
        do_parts(plan, work, str(tmp_path / "dies"), SETTINGS, workers=2)

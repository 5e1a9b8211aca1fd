"""Files and folders are replaced whole, one run writes a folder, and nothing that others wrote is touched."""

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from neobert_hf.common.files import FolderInUse, atomic_folder, atomic_write, folder_lock, replace_folder, write_text
from neobert_hf.common.run import MARKER, output_folder
from neobert_hf_cli import load
from tests.helpers.models import ROOT


def write_folder(folder, text):
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(text)


def test_a_folder_that_is_there_after_a_kill_is_whole(tmp_path, monkeypatch):
    """Killed before any of the changes of the disk: a move, or the removal of a file or folder."""

    def only(most: int, done: list, change):
        def counted(*arguments, **options):
            done.append(change)
            if len(done) > most:
                raise KeyboardInterrupt
            return change(*arguments, **options)

        return counted

    for most in range(100):
        place, done = tmp_path / str(most), []
        place.mkdir()
        write_folder(place / "model", "old")
        write_folder(place / "new", "new")
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("rename", "unlink", "rmdir"):
                patch.setattr(os, name, only(most, done, getattr(os, name)))
            replace_folder(place / "new", place / "model")
        if (place / "model").exists():
            assert len({(place / "model" / f"{number}.txt").read_text() for number in range(3)}) == 1
        if len(done) <= most:
            break
    assert most > 4 and [path.name for path in place.iterdir()] == ["model"]
    assert (place / "model" / "0.txt").read_text() == "new"


def test_links_are_not_followed_and_an_error_leaves_the_old_one(tmp_path):
    write_folder(tmp_path / "elsewhere", "mine")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "linked") as new:
        (new / "0.txt").write_text("new")
    assert (tmp_path / "linked" / "0.txt").read_text() == "new"
    assert {file.read_text() for file in (tmp_path / "elsewhere").iterdir()} == {"mine"}
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "linked") as new:
        raise RuntimeError
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "a.json") as new:
        new.write_text("new")
        raise RuntimeError
    assert (tmp_path / "a.json").read_text() == "old" and (tmp_path / "linked" / "0.txt").exists()
    assert not list(tmp_path.glob("*.partial"))


def output(folder, inputs=None, sources=None, recipe="r"):
    return output_folder(folder, recipe, ("model", "checkpoint-*"), inputs or {}, sources)


def test_only_what_the_recipe_wrote_is_replaced(tmp_path):
    for name in ("model", "checkpoint-6-backup"):
        (tmp_path / "run" / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"{name} was not written by r"), output(tmp_path / "run"):
            pytest.fail("the user's own folder")
        (tmp_path / "run" / name).rmdir()
    # What has another name is nobody's business.
    write_text(tmp_path / "run" / "notes.md", "mine")
    with output(tmp_path / "run"):
        (tmp_path / "run" / "model").mkdir()
    with output(tmp_path / "run"):
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model", MARKER, "notes.md"]
    with pytest.raises(ValueError, match="run is the output of r"), output(tmp_path / "run", recipe="other"):
        pytest.fail("another recipe's folder")
    # A run that refuses its input leaves nothing behind.
    with pytest.raises(RuntimeError), output(tmp_path / "new"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_no_input_is_an_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run/model", "run/checkpoint-3/part", "run/other"):
        Path(name).mkdir(parents=True)
    Path("link").symlink_to("run/model")
    for given in ("run", "run/model/", "run/checkpoint-3/part", "link", "run/mod*", ["elsewhere", "./run/model"]):
        with pytest.raises(ValueError, match="`miner` .* `output_dir`"), output("run", {"miner": given}):
            pytest.fail(given)
    lies_in = pytest.raises(ValueError, match="`output_dir` .* lies in `source`")
    with lies_in, output("run/new", None, {"source": "run"}):
        pytest.fail("it would be read as a source")
    for given in ("run/other", "owner/name", None, [], "run/*.txt"):
        with output("out", {"miner": given}, {"source": given}):
            pass
    with output("run/new", {"model": "run"}):
        pass


def hold(folder: Path, held) -> None:
    with folder_lock(folder):
        held.set()
        signal.pause()


def test_one_run_writes_a_folder_and_a_killed_one_holds_nothing(tmp_path, monkeypatch):
    forked = multiprocessing.get_context("fork")
    held = forked.Event()
    process = forked.Process(target=hold, args=(tmp_path / "out", held))
    process.start()
    assert held.wait(300)
    monkeypatch.chdir(tmp_path)
    # The same folder by another name.
    for name in ("out", "x/../out"):
        with pytest.raises(FolderInUse, match="out"), folder_lock(name):
            pytest.fail(name)
    with folder_lock("other"):
        pass
    process.kill()
    process.join()
    with folder_lock("out"):
        pass
    assert not list(tmp_path.iterdir())
    Path("file").write_text("")
    with pytest.raises(OSError, match="file/out"), folder_lock("file/out"):
        pytest.fail("not writable")


# Those that tests/test_killed_runs.py does not start. Their input does not exist: the lock comes before all work.
COMMANDS = {
    "train_tokenizer": "--source /nowhere --output_dir OUT",
    "pseudo_perplexity": "--models m=/nowhere --source /nowhere --output_dir OUT",
    "index": "--index OUT --model /nowhere --source /nowhere",
    "convert": "/nowhere OUT",
    "publish": "/nowhere me/model --dry_run --output_dir OUT",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_writes_a_folder_locks_it_before_all_work(command, tmp_path):
    folder = tmp_path / "out"
    with folder_lock(folder), pytest.raises(FolderInUse, match="is being written by"):
        load(command).main(COMMANDS[command].replace("OUT", str(folder)).split())


# Commands in a folder with the user's own files, and the setting whose input they would have replaced.
TRAINING = "--use_cpu --max_steps 9 --bf16 false"
LOSSES = {
    "make_pairs --source mine.parquet --output mine.parquet": "`output`",
    f"pretrain --train_data data --output_dir out --max_length 64 --warmup_steps 1 {TRAINING}": "`output_dir`",
    f"classify --model base --data rows.csv --output_dir base {TRAINING}": "`model`",
    f"finetune_embeddings --model m --datasets d --miner out/model --output_dir out {TRAINING}": "`miner`",
    f"train_contextual --model m --datasets {ROOT}/configs/embeddings/small_datasets.yaml --first_model out "
    f"--output_dir out --context_size 8 {TRAINING}": "`first_model`",
    "distil --teacher out/model --texts text --output_dir out": "`teacher`",
    f"run_glue --config {ROOT}/configs/glue/paper.yaml --task rte --model out/model --name model --output_dir out "
    f"{TRAINING}": "`model`",
    "pseudo_perplexity --models model=out/model --source text --output_dir out": "`models`",
    "prepare_data --source text --tokenizer t --output_dir text": "`source`",
    "deduplicate --source texts/part-*.parquet --output_dir .": "`source`",
    "embed --model out/model --source text --output_dir texts": "part-00000.parquet was not written by embed",
    "index --index text/index --model m --source text": "`source`",
}


@pytest.mark.parametrize("command", LOSSES, ids=lambda command: command.split()[0])
def test_no_command_replaces_what_the_user_has(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = "mine.parquet rows.csv text/a.md out/model/config.json texts/part-00000.parquet base/weights"
    before = {Path(name): "mine" for name in files.split()}
    for path in before:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    name, *flags = command.split()
    with pytest.raises(ValueError, match=LOSSES[command]):
        load(name).main(flags)
    assert before == {path: path.read_text() for path in Path().rglob("*") if path.is_file()}

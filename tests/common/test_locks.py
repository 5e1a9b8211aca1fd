"""Two processes and one folder."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from neobert_hf.checkpoints import convert, publish
from neobert_hf.common.locks import FolderInUse, check_free, folder_lock
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


forked = multiprocessing.get_context("fork")


class Holder:
    """A process that holds the lock of a folder, and a child of its own that outlives it."""

    def __init__(self, folder: Path):
        self.lasting = forked.Event()
        held = forked.Event()
        self.process = forked.Process(target=self._hold, args=(folder, held))
        self.process.start()
        assert held.wait(300)

    def _hold(self, folder: Path, held) -> None:
        with folder_lock(folder):
            child = os.fork()
            if not child:
                self.lasting.wait(300)
                os._exit(0)
            held.set()
            signal.pause()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def holder(tmp_path):
    holder = Holder(tmp_path / "out")
    yield holder
    holder.kill()
    holder.lasting.set()


def test_the_second_process_is_told_that_another_writes_the_folder(holder, tmp_path, monkeypatch):
    with (
        pytest.raises(FolderInUse, match=f"{tmp_path}/out is being written by another run"),
        folder_lock(tmp_path / "out"),
    ):
        pytest.fail("two at a time")
    # The same folder by other names.
    (tmp_path / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    for name in ("link", "out/", "x/../out"):
        with pytest.raises(FolderInUse), folder_lock(Path(name)):
            pytest.fail(name)
    with folder_lock(tmp_path / "other"):
        pass


def test_a_killed_process_holds_nothing_even_if_a_child_of_it_lives(holder, tmp_path):
    holder.kill()
    assert (tmp_path / ".out.lock").exists()
    with folder_lock(tmp_path / "out"):
        pass
    # Nothing is left beside the folder or in it.
    assert not list(tmp_path.iterdir())


def test_folders_that_were_made_for_the_lock_alone_are_removed(tmp_path):
    with folder_lock(tmp_path / "a" / "b" / "out"):
        check_free([tmp_path / "a" / "b" / "other"])
        with pytest.raises(FolderInUse):
            check_free([tmp_path / "a" / "b" / "other", tmp_path / "a" / "b" / "out"])
    assert not list(tmp_path.iterdir())
    with folder_lock(tmp_path / "a" / "b" / "out"):
        (tmp_path / "a" / "b" / "result").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "result"]


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file is not writable"), folder_lock(tmp_path / "file" / "out"):
        pytest.fail("not writable")


OUT, NOWHERE = "OUT", "/nowhere/model"
EMBEDDINGS = ["--model", NOWHERE, "--datasets", NOWHERE, "--output_dir", OUT, "--max_steps", "1", "--use_cpu"]
GLUE = [f"--config {ROOT}/configs/glue/paper.yaml --task rte --name m --use_cpu --model", NOWHERE, "--output_dir", OUT]
# None of their inputs exists: the lock comes before all work. MTEB and the export take long to import; their tests are
# in their rooms.
COMMANDS = {
    "pretrain": [
        "--train_data",
        NOWHERE,
        "--max_length",
        "64",
        *"--max_steps 9 --warmup_steps 1 --use_cpu --output_dir".split(),
        OUT,
    ],
    "prepare_data": ["--source", NOWHERE, "--tokenizer", NOWHERE, "--output_dir", OUT],
    "train_tokenizer": ["--source", NOWHERE, "--output_dir", OUT],
    "finetune_embeddings": EMBEDDINGS,
    "train_sparse_encoder": EMBEDDINGS,
    "train_multi_vector_encoder": EMBEDDINGS,
    "train_reranker": EMBEDDINGS,
    "run_glue": GLUE,
    "pseudo_perplexity": ["--models", f"m={NOWHERE}", "--source", NOWHERE, "--output_dir", OUT],
    "semantic_search": ["index", "--index", OUT, "--model", NOWHERE, "--source", str(ROOT / "README.md")],
    "demo": ["--config", f"{ROOT}/configs/demo.yaml", "--output_dir", OUT],
    "push_to_hub": [NOWHERE, "me/model", "--dry_run", "--output_dir", OUT],
    "convert": [NOWHERE, OUT],
    "publish": [NOWHERE, "me/model", "--dry_run", "--output_dir", OUT],
}
# What is written there by one command at a time; others of the same `output_dir` may run beside it.
PARTS = {"run_glue": "m/rte/bs32_lr5e-06_wd1e-05_seed0"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_writes_a_folder_locks_it_before_all_work(command, tmp_path):
    folder = tmp_path / "out"
    arguments = [word for part in COMMANDS[command] for word in part.replace(OUT, str(folder)).split()]
    modules = {"convert": convert, "publish": publish}
    main = modules[command].main if command in modules else load_example(command).main
    with folder_lock(folder / PARTS.get(command, "")), pytest.raises(FolderInUse, match="is being written by"):
        main(arguments)

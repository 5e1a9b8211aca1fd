"""Files and folders are replaced whole, and nothing else is touched."""

import os
import signal
import sys

import pytest

from neobert_hf.common.atomic_writes import atomic_folder, atomic_write, replace_folder, write_text


def write_folder(folder, text):
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(text)


def killed_before(operation: int, work) -> bool:
    """Do the work in a process that kills itself before its n-th change of the disk; whether it came to that."""
    process = os.fork()
    if process == 0:
        left = operation

        def count(event, arguments):
            nonlocal left
            # `shutil.rmtree` removes its files one by one.
            if event in ("os.rename", "os.remove", "os.rmdir"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_folder_that_is_there_after_a_kill_is_whole(tmp_path):
    for operation in range(100):
        place = tmp_path / str(operation)
        place.mkdir()
        write_folder(place / "model", "old")
        write_folder(place / "new", "new")
        killed = killed_before(operation, lambda place=place: replace_folder(place / "new", place / "model"))
        if (place / "model").exists():
            assert len({(place / "model" / f"{number}.txt").read_text() for number in range(3)}) == 1
        if not killed:
            break
    assert operation > 4 and [path.name for path in place.iterdir()] == ["model"]
    assert (place / "model" / "0.txt").read_text() == "new"


def test_what_others_wrote_stays(tmp_path):
    for name in ("model.1.partial", "a.json.999999999.partial", "film.partial"):
        (tmp_path / name).write_text("mine")
    with atomic_folder(tmp_path / "model") as new:
        (new / "0.txt").write_text("new")
    write_text(tmp_path / "a.json", "new")
    assert [path.read_text() for path in tmp_path.glob("*.partial")] == ["mine"] * 3


def test_links_are_not_followed(tmp_path):
    write_folder(tmp_path / "elsewhere", "mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / f"a.json.{os.getpid()}.partial").symlink_to(tmp_path / "file")
    write_text(tmp_path / "a.json", "new")
    # A folder that is a link itself, to a larger disk, say.
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "linked") as new:
        (new / "0.txt").write_text("new")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "linked" / "0.txt").read_text() == "new"
    assert {file.read_text() for file in (tmp_path / "elsewhere").iterdir()} == {"mine"}
    assert (tmp_path / "file").read_text() == "mine" and len(list((tmp_path / "elsewhere").iterdir())) == 3


def test_an_error_leaves_the_old_one(tmp_path):
    write_folder(tmp_path / "model", "old")
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as new:
        (new / "0.txt").write_text("new")
        raise RuntimeError
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "a.json") as new:
        new.write_text("new")
        raise RuntimeError
    assert (tmp_path / "model" / "0.txt").read_text() == (tmp_path / "a.json").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2

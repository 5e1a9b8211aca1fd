"""Folders that are replaced under kill -9, leftovers of killed processes, and symbolic links in their place."""

import os
import signal
import sys
from functools import partial

import pytest

from neobert_hf.common import atomic_writes
from neobert_hf.common.atomic_writes import atomic_folder, atomic_write, replace_folder, tidy_folder, write_text
from neobert_hf.common.locks import folder_lock


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
            if event in ("os.rename", "os.remove", "os.rmdir", "own.exchange"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_or_the_new_folder_is_there_after_a_kill(tmp_path, monkeypatch, exchange):
    if exchange:
        real = atomic_writes._exchange
        # Calls of C are no audit events.
        monkeypatch.setattr(atomic_writes, "_exchange", lambda *two: sys.audit("own.exchange") or real(*two))
        write_folder(tmp_path / "one", "1")
        write_folder(tmp_path / "two", "2")
        if not real(tmp_path / "one", tmp_path / "two"):
            pytest.skip("this file system exchanges no folders")
    else:
        monkeypatch.setattr(atomic_writes, "_exchange", lambda *two: False)
    found = []
    for operation in range(100):
        place = tmp_path / f"{exchange}{operation}"
        place.mkdir()
        write_folder(place / "model", "old")
        new = place / "model.999999999.partial"
        write_folder(new, "new")
        killed = killed_before(operation, partial(replace_folder, new, place / "model"))
        # With an exchange at once, else from the next start on.
        if not exchange:
            tidy_folder(place)
        texts = {(place / "model" / f"{number}.txt").read_text() for number in range(3)}
        assert len(texts) == 1
        found.append(texts.pop())
        tidy_folder(place)
        assert [path.name for path in place.iterdir()] == ["model"]
        if not killed:
            break
    # Both were seen, in this order, and the last one was not killed.
    assert found == sorted(found, reverse=True) and found[0] == "old" and found[-1] == "new" and len(found) > 4


def test_leftovers_of_dead_processes_are_removed(tmp_path):
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / f"result.json.{process}.partial").write_text("{")
    (tmp_path / f"model.{process}.partial").mkdir()
    living = tmp_path / f"result.json.{os.getpid()}.partial"
    living.write_text("{")
    (tmp_path / "film.partial").write_text("of a browser")
    (tmp_path / "deep" / "album.partial").mkdir()
    with folder_lock(tmp_path):
        left = sorted(path.name for path in tmp_path.rglob("*"))
    assert left == ["album.partial", "deep", "film.partial", living.name]


def test_links_are_not_followed(tmp_path):
    write_folder(tmp_path / "elsewhere", "mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / f"model.{os.getpid()}.partial").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "model") as new:
        (new / "0.txt").write_text("new")
    (tmp_path / f"a.json.{os.getpid()}.partial").symlink_to(tmp_path / "file")
    write_text(tmp_path / "a.json", "new")
    (tmp_path / "model.replaced.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "more.999999999.partial").symlink_to(tmp_path / "elsewhere")
    tidy_folder(tmp_path)
    # A folder that is a link itself, to a larger disk, say.
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    with atomic_folder(tmp_path / "linked") as new:
        (new / "0.txt").write_text("new")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "model" / "0.txt").read_text() == "new"
    assert (tmp_path / "linked" / "0.txt").read_text() == "new"
    assert {file.read_text() for file in (tmp_path / "elsewhere").iterdir()} == {"mine"}
    assert (tmp_path / "file").read_text() == "mine" and len(list((tmp_path / "elsewhere").iterdir())) == 3
    assert not list(tmp_path.glob("*.partial"))


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

"""The data of the guides."""

import runpy
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.models import ROOT


def test_sample_data_replaces_nothing_of_the_users(tmp_path, monkeypatch):
    for package in ("asyncio", "email"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, tmp_path / "library" / package)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "examples" / "sample_data.py"))["main"]
    main()
    assert len([path for path in tmp_path.glob("[cd]*/**/*") if path.is_file()]) == 7
    main()
    mine = tmp_path / "data" / "returned.jsonl"
    mine.write_text("mine")
    (tmp_path / "corpus" / "docstrings.jsonl").unlink()
    with pytest.raises(SystemExit, match="data/returned.jsonl is there and holds something else"):
        main()
    assert mine.read_text() == "mine" and not (tmp_path / "corpus" / "docstrings.jsonl").exists()

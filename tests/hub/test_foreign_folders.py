"""Folders that somebody else made: no path leads out of them."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from neobert_hf.common.files import write_json
from tests.helpers.examples import status_of


SECRET = "a private key"
COMMANDS = ("doctor", "publish", "convert", "export")


def linked_card(folder):
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("../outside/README.md")


def module_outside(folder):
    entries = json.loads((folder / "modules.json").read_text())
    entries[1]["path"] = "../outside/1_Pooling"
    write_json(folder / "modules.json", entries)


def shard_outside(folder):
    outside = folder.parent / "outside" / "model.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(load_file(outside), str(outside))}
    write_json(folder / "model.safetensors.index.json", index)
    (folder / "model.safetensors").unlink()


# What is done to the folder, and the commands that read this.
FOLDERS = {
    "linked card": (linked_card, COMMANDS),
    "module beside it": (module_outside, ("doctor", "publish", "export")),
    "absolute shard": (shard_outside, COMMANDS),
}
OPTIONS = {"publish": ["me/model", "--dry_run", "--output_dir"]}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_leads_out_of_a_folder_is_refused(case, embedder, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")
    change, commands = FOLDERS[case]
    for name in ("model", "outside"):
        shutil.copytree(embedder, tmp_path / name)
    (tmp_path / "outside" / "README.md").write_text(SECRET)
    change(tmp_path / "model")
    for command in commands:
        output = [] if command == "doctor" else [str(tmp_path / "output")]
        status = status_of([command, str(tmp_path / "model"), *OPTIONS.get(command, []), *output])
        assert status not in (None, 0), f"{command} accepts it"
        assert SECRET not in f"{status}\n{capsys.readouterr().out}"
        assert not list(tmp_path.glob("output*")), command

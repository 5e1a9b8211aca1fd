"""Folders that somebody else made: no path leads out of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from neobert_hf.cli import main
from neobert_hf.common.files import write_json


SECRET = "a private key"
COMMANDS = ("doctor", "publish", "convert", "export")


@pytest.fixture(scope="module")
def sound(embedding_folder, tmp_path_factory) -> Path:
    """An embedding model. Beside it: a folder with a secret, a pooling and weights."""
    folder = tmp_path_factory.mktemp("sound")
    shutil.copytree(embedding_folder, folder / "model")
    shutil.copytree(folder / "model" / "1_Pooling", folder / "outside" / "1_Pooling")
    (folder / "outside" / "secret").write_text(SECRET)
    shutil.copy(folder / "model" / "model.safetensors", folder / "outside")
    return folder


def linked(name, target):
    def change(folder):
        path = folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return change


def module_outside(folder):
    entries = json.loads((folder / "modules.json").read_text())
    entries[1]["path"] = "../outside/1_Pooling"
    write_json(folder / "modules.json", entries)


def shard_outside(folder, parent=".."):
    names = dict.fromkeys(load_file(folder / "model.safetensors"), f"{parent}/outside/model.safetensors")
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": names})
    (folder / "model.safetensors").unlink()


# What is done to the folder, and the commands that read this.
FOLDERS = {
    "linked weights": (linked("model.safetensors", "../outside/model.safetensors"), COMMANDS),
    "linked card": (linked("README.md", "../outside/secret"), ("publish",)),
    "module beside it": (module_outside, ("doctor", "publish", "export")),
    "shard beside it": (shard_outside, COMMANDS),
    "absolute shard": (lambda folder: shard_outside(folder, folder.parent), ("doctor",)),
}
OPTIONS = {"publish": ["me/model", "--dry_run", "--output_dir"]}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_leads_out_of_a_folder_is_refused(case, sound, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")
    change, commands = FOLDERS[case]
    shutil.copytree(sound / "model", tmp_path / "model")
    shutil.copytree(sound / "outside", tmp_path / "outside")
    change(tmp_path / "model")
    for command in commands:
        output = [] if command == "doctor" else [str(tmp_path / "output")]
        status = main([command, str(tmp_path / "model"), *OPTIONS.get(command, []), *output])
        assert status not in (None, 0), f"{command} accepts it"
        assert SECRET not in f"{status}\n{capsys.readouterr().out}"
        assert not list(tmp_path.glob("output*")), command


def test_the_cache_of_the_hub_is_a_source(sound, tmp_path):
    """Its snapshots are links to `../../blobs`."""
    repository = tmp_path / "hub" / "models--me--model"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    for file in sorted(file for file in (sound / "model").rglob("*") if file.is_file()):
        path = snapshot / file.relative_to(sound / "model")
        path.parent.mkdir(parents=True, exist_ok=True)
        blob = repository / "blobs" / str(path.relative_to(snapshot)).replace("/", "_")
        shutil.copy(file, blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    assert main(["doctor", str(snapshot)]) == 0

"""Folders that somebody else made: no path leads out of them, no code of theirs is run, and only a model is sent."""

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from neobert_hf import NeoBERTForMultipleChoice
from neobert_hf.cli import main
from neobert_hf.common.files import write_json
from neobert_hf.common.paths import check_file_name
from neobert_hf.hub.doctor import SERVED_FILES
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, record_outputs
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


SECRET = "a private key"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
EXPECTED = {"README.md", "config.json", GOLDEN_FILE, "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
EXPECTED |= {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """An embedding model. Beside it: a folder with a secret and a folder with a module."""
    folder = tmp_path_factory.mktemp("sound")
    model = small_model(vocab_size=200)
    model.save_pretrained(folder / "encoder")
    small_tokenizer(200).save_pretrained(folder / "encoder")
    modules = [Transformer(str(folder / "encoder")), Pooling(64, pooling_mode="mean")]
    SentenceTransformer(modules=modules).save_pretrained(str(folder / "model"))
    write_json(folder / "model" / GOLDEN_FILE, record_outputs(model, small_tokenizer(200)))
    shutil.copytree(folder / "model" / "1_Pooling", folder / "outside" / "1_Pooling")
    (folder / "outside" / "secret").write_text(SECRET)
    shutil.copy(folder / "model" / "model.safetensors", folder / "outside")
    shutil.copy(folder / "model" / "tokenizer.json", folder / "outside")
    return folder


def linked(name, target):
    def change(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)

    return change


def modules(**changes):
    """Other values in the entry of the pooling."""

    def change(folder):
        entries = json.loads((folder / "modules.json").read_text())
        entries[1] |= changes
        write_json(folder / "modules.json", entries)

    return change


def sharded(weight_map):
    """Two shards and an index that names other files."""

    def change(folder):
        values = load_file(folder / "model.safetensors")
        names = sorted(values)
        for file, part in zip(SHARDS, (names[:5], names[5:])):
            save_file({name: values[name] for name in part}, folder / file, metadata={"format": "pt"})
        write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": weight_map})
        (folder / "model.safetensors").unlink()

    return change


ALL = ("doctor", "publish", "convert", "export")
SENTENCE = ("doctor", "publish", "export")
OUT = "leads out of"
ROUTER = "sentence_transformers.base.modules.Router"
# What is done to the folder, what is said of it, and the commands that read this.
FOLDERS = {
    "linked pooling": (linked("1_Pooling/config.json", "../../outside/1_Pooling/config.json"), OUT, ALL),
    "linked folder": (linked("1_Pooling", "../outside/1_Pooling"), OUT, ALL),
    "linked weights": (linked("model.safetensors", "../outside/model.safetensors"), OUT, ALL),
    "linked card": (linked("README.md", "../outside/secret"), OUT, ALL),
    "absolute link": (linked("notes.txt", "/etc/hostname"), OUT, ALL),
    "module beside it": (modules(path="../outside/1_Pooling"), "must be a path inside", SENTENCE),
    "absolute module": (modules(path="/etc"), "must be a path inside", SENTENCE),
    "module up and down": (modules(path="1_Pooling/../../outside"), "must be a path inside", SENTENCE),
    "module that loads others": (modules(type=ROUTER), f"lists the module {ROUTER}", SENTENCE),
    "shard beside it": (sharded({"a": "../outside/model.safetensors"}), "model.safetensors", ALL),
}


def run(command: str, folder: Path, output: Path) -> int | str | None:
    arguments = {
        "doctor": [],
        "publish": ["me/model", "--dry_run", "--output_dir", str(output)],
        "convert": [str(output)],
        "export": [str(output), "--precisions", "float32"],
    }
    return main([command, str(folder), *arguments[command]])


@pytest.mark.parametrize("case", FOLDERS)
def test_what_leads_out_of_a_folder_is_refused(case, sound, tmp_path, capsys):
    change, message, commands = FOLDERS[case]
    shutil.copytree(sound / "model", tmp_path / "model")
    shutil.copytree(sound / "outside", tmp_path / "outside")
    change(tmp_path / "model")
    for command in commands:
        status = run(command, tmp_path / "model", tmp_path / "output")
        said = f"{status}\n{capsys.readouterr().out}"
        assert status not in (None, 0), f"{command} accepts it: {said}"
        assert re.search(message, said), f"{command}: {said}"
        assert SECRET not in said and len(said) < 4000, f"{command}: {said}"
        assert not list(tmp_path.glob("output*")), command


def test_only_what_is_listed_is_published(sound, tmp_path, capsys):
    """Of the source nothing else is taken; in a folder that was kept, anything else is an error."""
    shutil.copytree(sound / "model", tmp_path / "model")
    strays = (".env", "a.pth", "a.pickle", "a.pkl", "own.py", "optimizer.pt", "training_args.bin", "id_rsa", "a.json")
    for folder in (tmp_path / "model", tmp_path / "model" / "1_Pooling"):
        for name in strays:
            (folder / name).write_text(SECRET if name != "own.py" else "pass")
    # The doctor, and so publishing, refuses foreign code beside the model itself.
    (tmp_path / "model" / "own.py").unlink()
    (tmp_path / "model" / ".git").mkdir()
    (tmp_path / "model" / ".git" / "config").write_text(SECRET)
    output = tmp_path / "output"
    assert run("publish", tmp_path / "model", output) is None
    files = {file.relative_to(output).as_posix() for file in output.rglob("*") if file.is_file()}
    assert files == {*SERVED_FILES, *EXPECTED}
    for name in (*strays, ".git/config", "1_Pooling/own.py", "onnx/own.py", "1_Pooling/a/config.json", "x/README.md"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text(SECRET)
        assert f"holds {name}. Delete it" in run("publish", tmp_path / "model", output)
        (output / name).unlink()
    (output / "curve.png").touch()
    (output / "notes.md").touch()
    assert run("publish", tmp_path / "model", output) is None
    (output / "notes.md").unlink()
    (output / "notes.md").symlink_to(sound / "outside" / "secret")
    assert OUT in run("publish", tmp_path / "model", output)
    assert SECRET not in capsys.readouterr().out


def test_the_cache_of_the_hub_is_a_source(sound, tmp_path, capsys):
    """Its snapshots are links to `../../blobs`. Links to other repositories lead out of it as everywhere."""
    repository = tmp_path / "hub" / "models--me--model"
    snapshot = repository / "snapshots" / "0123"
    for file in sorted(file for file in (sound / "model").rglob("*") if file.is_file()):
        path = snapshot / file.relative_to(sound / "model")
        path.parent.mkdir(parents=True, exist_ok=True)
        (repository / "blobs").mkdir(exist_ok=True)
        blob = repository / "blobs" / str(path.relative_to(snapshot)).replace("/", "_")
        shutil.copy(file, blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    (tmp_path / "link").symlink_to(snapshot)
    for source in (snapshot, tmp_path / "link"):
        assert run("doctor", source, tmp_path / "none") == 0
        assert (
            run("convert", source, tmp_path / source.name / "converted" if source is snapshot else tmp_path / "c")
            is None
        )
    other = tmp_path / "hub" / "models--me--other" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(sound / "outside" / "secret", other / "README.md")
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to(other / "README.md")
    assert OUT in run("doctor", snapshot, tmp_path / "none")


def test_links_inside_a_folder_are_followed(sound, tmp_path):
    shutil.copytree(sound / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "weights")
    (tmp_path / "model" / "model.safetensors").symlink_to("weights")
    (tmp_path / "model" / "latest").symlink_to("latest")
    (tmp_path / "model" / "gone").symlink_to("nothing")
    assert run("convert", tmp_path / "model", tmp_path / "output") is None


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "", " ", "a\\b"])
def test_names_of_files(name):
    with pytest.raises(ValueError, match="files are named after it"):
        check_file_name(name, "It")
    assert check_file_name("Früher.1 [b]", "It") == "Früher.1 [b]"


def test_multiple_choice_has_no_onnx_and_is_told_so_first(tmp_path):
    small_model(NeoBERTForMultipleChoice, vocab_size=200).save_pretrained(tmp_path / "model")
    small_tokenizer(200).save_pretrained(tmp_path / "model")
    arguments = ["publish", str(tmp_path / "model"), "me/model", "--dry_run", "--onnx"]
    error = main([*arguments, "--output_dir", str(tmp_path / "output")])
    assert "no ONNX files for a NeoBERTForMultipleChoice" in error and "Leave out `--onnx`" in error
    assert "--task feature-extraction" in error and not list(tmp_path.glob("output*"))


@pytest.mark.parametrize("command", ["doctor", "publish", "convert", "export"])
def test_a_path_that_is_not_there_is_no_hub_id(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert run(command, Path("runs/model"), tmp_path / "out").endswith("runs/model does not exist.")
    message = run(command, Path("me/model"), tmp_path / "out")
    assert "me/model is neither a local folder nor found as a Hub id" in message and "\n" not in message
    assert "is neither a local folder" in run(command, Path("a model"), tmp_path / "out")


@pytest.mark.parametrize("command", ["publish", "convert", "convert --to state_dict"])
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_full_disk_is_an_error_and_leaves_nothing(command, size, sound, tmp_path, capsys):
    """No file may grow beyond a size, as on a disk with so much room. `capsys` prints into memory."""
    command, *flags = command.split()
    arguments = {"publish": ["me/model", "--dry_run", "--output_dir"]}.get(command, [])
    output = tmp_path / "output"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        error = main([command, str(sound / "model"), *arguments, str(output), *flags])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(f"{output} cannot be written, the disk may be full: ", error), error
    assert not list(tmp_path.glob("output*"))

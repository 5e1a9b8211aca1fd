"""Folders that somebody else made: each is refused in a sentence, nothing outside of it is read, nothing is written."""

import json
import os
import re
import resource
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForMultipleChoice, NeoBERTModel
from neobert_hf.checkpoints.doctor import SERVED_FILES
from neobert_hf.checkpoints.golden_outputs import GOLDEN_FILE, record_outputs
from neobert_hf.cli import main
from neobert_hf.common.atomic_writes import write_json
from neobert_hf.common.paths import check_file_name
from neobert_hf.common.results import folder_of_results
from neobert_hf.evaluation.glue.tasks import GlueTask
from neobert_hf.evaluation.mteb.local_tasks import LocalTask
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


SECRET = "a private key"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
EXPECTED = {"README.md", "config.json", GOLDEN_FILE, "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
EXPECTED |= {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"}
WO = "transformer_encoder.1.wo.weight"


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


def edited(name, **changes):
    return lambda folder: write_json(folder / name, json.loads((folder / name).read_text()) | changes)


def modules(**changes):
    """Other values in the entry of the pooling."""

    def change(folder):
        entries = json.loads((folder / "modules.json").read_text())
        entries[1] |= changes
        write_json(folder / "modules.json", entries)

    return change


def written(name, text):
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def tensors(change):
    def rewrite(folder):
        values = load_file(folder / "model.safetensors")
        changed = change(values)
        values = changed if isinstance(changed, dict) else values
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def sharded(index=None, again=None):
    """Two shards and an index with changes; `again` changes a tensor that is then in both of them."""

    def change(folder):
        values = load_file(folder / "model.safetensors")
        names = sorted(values)
        first, second = ({name: values[name] for name in part} for part in (names[:5], names[5:]))
        if again is not None:
            first[names[-1]] = again(values[names[-1]])
        for file, part in zip(SHARDS, (first, second)):
            save_file(part, folder / file, metadata={"format": "pt"})
        weight_map = {name: SHARDS[name not in first] for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": weight_map} | (index or {}))
        (folder / "model.safetensors").unlink()

    return change


def with_header(entries, length=None):
    """A safetensors file with this header and eight bytes of data."""
    header = json.dumps(entries).encode()
    return written("model.safetensors", struct.pack("<Q", length or len(header)) + header + bytes(8))


def fifo(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def with_adapter(folder):
    """PEFT's loading would take the weights of another model."""
    small_model(vocab_size=200, num_hidden_layers=1).save_pretrained(folder.parent / "other")
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": str(folder.parent / "other")})


def with_alias_bomb(folder):
    """A list of a billion entries in ten lines."""
    lines = [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi")]
    card = ["---", "a: &a [x, x, x, x, x, x, x, x, x, x]", *lines, "language: *i", "---", ""]
    (folder / "README.md").write_text("\n".join(card))


def of_a_run(complete):
    """The model of a run, beside a checkpoint with this `complete.json`."""

    def change(folder):
        (folder.parent / "checkpoint-9").mkdir()
        (folder.parent / "checkpoint-9" / "complete.json").write_text(complete)

    return change


def with_wide_layer(folder):
    """A dense layer of a terabyte, in 200 bytes."""
    entries = json.loads((folder / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    write_json(folder / "modules.json", [*entries, dense])
    (folder / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, folder / "2_Dense" / "model.safetensors")
    activation = "torch.nn.modules.activation.Tanh"
    sizes = {"in_features": 2**19, "out_features": 2**19, "bias": False, "activation_function": activation}
    write_json(folder / "2_Dense" / "config.json", sizes)


def with_other_weights(folder):
    """A file that Transformers would load in the place of the one that is checked."""
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
    edited("config.json", transformers_weights="other.safetensors")(folder)


DEEP = "[" * 100_000
ALL = ("doctor", "publish", "convert", "export")
SENTENCE = ("doctor", "publish", "export")
DOCTOR = ("doctor",)
OUT = "leads out of"
# What is done to the folder, what is said of it, and the commands that read this.
FOLDERS = {
    # Links
    "linked pooling": (linked("1_Pooling/config.json", "../../outside/1_Pooling/config.json"), OUT, ALL),
    "linked folder": (linked("1_Pooling", "../outside/1_Pooling"), OUT, ALL),
    "linked weights": (linked("model.safetensors", "../outside/model.safetensors"), OUT, ALL),
    "linked tokenizer": (linked("tokenizer.json", "../outside/tokenizer.json"), OUT, ALL),
    "linked template": (linked("chat_template.jinja", "../outside/secret"), OUT, ALL),
    "linked card": (linked("README.md", "../outside/secret"), OUT, ALL),
    "absolute link": (linked("notes.txt", "/etc/hostname"), OUT, ALL),
    "link of a link": (lambda f: [linked("a", "../outside/secret")(f), linked("b", "a")(f)], OUT, ALL),
    "link to nothing": (linked("gone", "../nothing"), OUT, ALL),
    # Paths
    "module beside it": (modules(path="../outside/1_Pooling"), "must be a path inside", SENTENCE),
    "absolute module": (modules(path="/etc"), "must be a path inside", SENTENCE),
    "module up and down": (modules(path="1_Pooling/../../outside"), "must be a path inside", SENTENCE),
    "module of Windows": (modules(path="..\\outside"), "must be a path inside", SENTENCE),
    "numbered module": (modules(path=5), "must be a path inside", SENTENCE),
    "module without type": (modules(type=5), "lists the module 5", SENTENCE),
    "module that loads others": (
        modules(type="sentence_transformers.base.modules.Router"),
        "lists the module sentence_transformers.base.modules.Router",
        SENTENCE,
    ),
    "module that is none": (
        modules(type="sentence_transformers.util.http_get"),
        "lists the module sentence_transformers.util.http_get",
        SENTENCE,
    ),
    "shard beside it": (
        sharded({"weight_map": {"a": "../outside/model.safetensors"}}),
        "the name of a file beside it",
        ALL,
    ),
    "absolute shard": (sharded({"weight_map": {"a": "/model.safetensors"}}), "the name of a file beside it", ALL),
    "shard without name": (sharded({"weight_map": {"a": None}}), "the name of a file beside it", ALL),
    "shard that is not there": (sharded({"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors.*not exist", ALL),
    "list of shards": (sharded({"weight_map": ["a"]}), "has no `weight_map`", ALL),
    "index without metadata": (sharded({"metadata": None}), "has no `metadata`", ALL),
    "pipe": (fifo("model.safetensors"), "model.safetensors is a pipe", ALL),
    "pipe for a tokenizer": (fifo("tokenizer.json"), "tokenizer.json is a pipe", ALL),
    # JSON
    "deep config": (written("config.json", DEEP), "config.json is not valid JSON", ALL),
    "deep index": (lambda f: [sharded()(f), written(INDEX, DEEP)(f)], "index.json is not valid JSON", ALL),
    "binary config": (written("config.json", bytes(range(128, 256))), "config.json is not valid JSON", ALL),
    "twice": (written("config.json", '{"model_type": "neobert", "model_type": "x"}'), "'model_type'.*twice", ALL),
    "list of rope parameters": (edited("config.json", rope_parameters=[1]), "config.json", ALL),
    "number of labels": (edited("config.json", id2label=5), "config.json", ALL),
    "quantized": (
        edited("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "holds `quantization_config`",
        ALL,
    ),
    "attention of the Hub": (edited("config.json", attn_implementation="a/b"), "holds `attn_implementation`", ALL),
    "length in words": (edited("tokenizer_config.json", model_max_length="x"), "`model_max_length`", ALL),
    "no modules": (written("modules.json", "[]"), "modules.json lists no modules", SENTENCE),
    "golden number for a text": (edited(GOLDEN_FILE, text=5), "not in the format of golden outputs", DOCTOR),
    "class by name": (edited("config.json", architectures={"a": 1}), "`architectures` is", SENTENCE),
    "list of classes": (edited("config.json", architectures=[["NeoBERTModel"]]), "`architectures` is", SENTENCE),
    "list for a mapping": (written("config_sentence_transformers.json", "[]"), "config_sentence", SENTENCE),
    "aliases": (with_alias_bomb, "README.md cannot be read: it holds a YAML alias", ("publish",)),
    "binary card": (written("README.md", b"---\n\xff\n---"), "README.md cannot be read", ("publish",)),
    "run cut": (of_a_run('{"settings"'), "complete.json is not valid JSON", ("publish",)),
    "run without settings": (of_a_run('{"settings": 1}'), "complete.json is damaged", ("publish",)),
    "code by number": (edited("config.json", auto_map=5), "names 5, which is not part of this package", DOCTOR),
    "list of pipelines": (edited("config.json", custom_pipelines=[1]), "FAIL  code", DOCTOR),
    "deep modules": (written("modules.json", DEEP), "modules.json is not valid JSON", SENTENCE),
    "golden words": (edited(GOLDEN_FILE, input_ids=["a"]), "not in the format of golden outputs", DOCTOR),
    "golden list": (written(GOLDEN_FILE, "[]"), "not in the format of golden outputs", DOCTOR),
    "golden of no text": (edited(GOLDEN_FILE, text_ids=None), "not in the format of golden outputs", DOCTOR),
    "many golden ids": (edited(GOLDEN_FILE, input_ids=[1] * 10**5), "not in the format of golden outputs", DOCTOR),
    "golden without values": (
        edited(GOLDEN_FILE, outputs={"last_hidden_state": {"shape": 1, "first": 1, "last": [], "mean": "", "rms": 0}}),
        "not in the format of golden outputs",
        DOCTOR,
    ),
    # Sizes
    "layers": (edited("config.json", num_hidden_layers=10**9), "num_hidden_layers", ALL),
    "more layers": (edited("config.json", num_hidden_layers=900), "num_hidden_layers", ALL),
    "labels": (edited("config.json", num_labels=10**9), "num_labels", ALL),
    "words": (edited("config.json", vocab_size=10**12), "encoder.weight|vocab_size", ALL),
    "width": (edited("config.json", intermediate_size=10**12), "ffn.w12.weight|intermediate_size", ALL),
    "wide layer": (with_wide_layer, "2_Dense/config.json asks for", ("doctor", "publish")),
    "long header": (with_header({}, 2**40), "model.safetensors is damaged", ALL),
    "large header": (
        with_header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        "model.safetensors is damaged",
        ALL,
    ),
    "overflowing header": (
        with_header({"a": {"dtype": "F32", "shape": [2**33, 2**33], "data_offsets": [0, 8]}}),
        "model.safetensors is damaged",
        ALL,
    ),
    # Tensors
    "in two shards": (sharded(again=lambda t: t + 1), "with different values", ALL),
    "in two shapes": (sharded(again=lambda t: t[:1].clone()), "with different values", ALL),
    "zeros": (tensors(lambda t: {name: torch.zeros_like(x) for name, x in t.items()}), "all zero", ALL),
    "a zero matrix": (tensors(lambda t: t[WO].zero_()), f"all zero: {WO}", ALL),
    "a zero norm": (tensors(lambda t: t["layer_norm.weight"].zero_()), "all zero: layer_norm.weight", ALL),
    "one value": (tensors(lambda t: t[WO].fill_(0.5)), f"one value only: {WO}", ALL),
    "integers": (tensors(lambda t: {name: x.int() for name, x in t.items()}), "torch.int32", ALL),
    "an integer": (tensors(lambda t: t.update({WO: t[WO].long()})), f"{WO} torch.int64", ALL),
    "truths": (tensors(lambda t: t.update({WO: t[WO] > 0})), f"{WO} torch.bool", ALL),
    "complex": (tensors(lambda t: t.update({WO: t[WO].to(torch.complex64)})), f"{WO} torch.complex64", ALL),
    "four bits": (
        with_header({WO: {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}),
        "model.safetensors is damaged|dtype|but there are only 1 tensors",
        ALL,
    ),
    "eight bits": (tensors(lambda t: t.update({WO: t[WO].to(torch.float8_e4m3fn)})), f"{WO} torch.float8", ALL),
    "nan": (tensors(lambda t: t[WO][3].fill_(torch.nan)), f"not finite: {WO}", ALL),
    # What Transformers would load in the place of what was checked
    "other weights": (with_other_weights, "holds `transformers_weights`", ALL),
    "adapter": (with_adapter, "adapter_config.json", SENTENCE),
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
def test_hostile_folders_are_refused_in_a_sentence(case, sound, tmp_path, capsys):
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


def packed(tensors, file):
    """What `torch.save` writes, compressed by somebody else."""
    torch.save(tensors, file)
    with zipfile.ZipFile(file) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)


PICKLES = {
    "stride of 0": (lambda t, file: torch.save(t | {WO: torch.ones(1).expand(2**20, 2**20)}, file), f"values of {WO}"),
    "windows": (lambda t, file: torch.save(t | {WO: torch.arange(127.0).unfold(0, 64, 1)}, file), f"values of {WO}"),
    "sparse": (lambda t, file: torch.save(t | {WO: torch.eye(64).to_sparse()}, file), f"values of {WO}"),
    "meta": (lambda t, file: torch.save(t | {WO: torch.empty(64, 64, device="meta")}, file), f"values of {WO}"),
    "compressed": (lambda t, file: packed({n: x * 0 + 1 for n, x in t.items()}, file), "is compressed"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_unpack_to_more_than_they_hold(case, sound, tmp_path):
    """Under both names: `convert` reads the one, `from_pretrained` the other."""
    write, message = PICKLES[case]
    shutil.copy(sound / "model" / "config.json", tmp_path)
    write(load_file(sound / "model" / "model.safetensors"), tmp_path / "state_dict.pt")
    assert re.search(message, main(["convert", str(tmp_path / "state_dict.pt"), str(tmp_path / "output")]))
    (tmp_path / "state_dict.pt").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        NeoBERTModel.from_pretrained(tmp_path)


LOADED = ("layers", "words", "width", "in two shards", "in two shapes", "zeros", "a zero norm", "one value", "integers")
LOADED += (
    "shard beside it",
    "shard without name",
    "shard that is not there",
    "list of shards",
    "index without metadata",
)
LOADED += ("deep index", "an integer", "truths", "nan", "eight bits", "four bits", "long header", "large header")


@pytest.mark.parametrize("case", LOADED)
def test_plain_loading_refuses_them_too(case, sound, tmp_path):
    shutil.copytree(sound / "model", tmp_path / "model")
    FOLDERS[case][0](tmp_path / "model")
    with pytest.raises(
        ValueError, match="num_hidden_layers|asks for|vocab_size|intermediate_size|values|damaged|index.json"
    ):
        NeoBERTModel.from_pretrained(tmp_path / "model")


def test_biases_and_the_row_of_padding_may_be_zero(tmp_path):
    model = small_model(NeoBERTForMaskedLM, rms_norm=False, tie_word_embeddings=True)
    with torch.no_grad():
        model.model.encoder.weight[0] = 0
        model.decoder.bias.zero_()
    assert not model.model.layer_norm.bias.any()
    model.save_pretrained(tmp_path / "model")
    small_tokenizer(100).save_pretrained(tmp_path / "model")
    assert NeoBERTForMaskedLM.from_pretrained(tmp_path / "model")
    assert main(["doctor", str(tmp_path / "model")]) == 0


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


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "", " ", "a\\b", "a\0b", "a\nb", "x" * 201, 5, None])
def test_names_of_files(name):
    with pytest.raises(ValueError, match="files are named after it"):
        check_file_name(name, "It")
    if isinstance(name, str):
        for make in (lambda: LocalTask(name, "STS", "x"), lambda: GlueTask(name, "x", ["a"], ["pearson"])):
            with pytest.raises(ValueError, match="files are named after it"):
                make()
        if "/" not in name and name.strip("."):
            with pytest.raises(ValueError, match="files are named after it"):
                folder_of_results(name, "m")
    assert check_file_name("Früher.1 [b]", "It") == "Früher.1 [b]"


def cycle():
    found = []
    found.append(found)
    return found


TWICE = {"module.a": torch.ones(2), "a": torch.zeros(2)}


@pytest.mark.parametrize("added", [TWICE, {"a": cycle()}, {5: torch.ones(2)}])
def test_state_dicts_of_strange_names_and_values(added, sound, tmp_path):
    """Two names that are one without the wrapper of DDP; a list that holds itself; a number for a name."""
    shutil.copy(sound / "model" / "config.json", tmp_path)
    torch.save(load_file(sound / "model" / "model.safetensors") | added, tmp_path / "state_dict.pt")
    error = main(["convert", str(tmp_path / "state_dict.pt"), str(tmp_path / "output")])
    assert re.search("a occurs twice|holds values that are not tensors: a|unknown: 5", error), error


@pytest.mark.parametrize("tag", ["../outside", "/etc", "7/../../x"])
def test_the_tag_of_a_deepspeed_folder_stays_in_it(tag, sound, tmp_path):
    (tmp_path / "latest").write_text(tag)
    shutil.copy(sound / "model" / "config.json", tmp_path)
    assert "must be a path inside" in main(["convert", str(tmp_path), str(tmp_path / "output")])


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

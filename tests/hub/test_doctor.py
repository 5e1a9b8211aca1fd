"""`neobert-hf doctor`: a healthy checkpoint is said to be so, and every kind of damage is found and named."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoTokenizer

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.cli import main
from neobert_hf.common.files import write_json
from neobert_hf.hub.doctor import CHECKS, diagnose
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, compare_outputs, record_outputs
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


CLASSES = [getattr(neobert_hf, name) for name in neobert_hf.__all__ if name.startswith(("NeoBERTFor", "NeoBERTModel"))]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A masked LM with everything that is checked but Sentence Transformers' files."""
    folder = tmp_path_factory.mktemp("healthy")
    model, tokenizer = small_model(NeoBERTForMaskedLM, vocab_size=200), small_tokenizer(200)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder, encoder = tmp_path_factory.mktemp("embedder"), tmp_path_factory.mktemp("encoder")
    small_model(vocab_size=200).save_pretrained(encoder)
    small_tokenizer(200).save_pretrained(encoder)
    modules = [Transformer(str(encoder)), Pooling(64, pooling_mode=("mean", "cls")), Dense(128, 32)]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))
    return folder


def edit_json(name, **changes):
    def damage(folder):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))

    return damage


def edit_tensors(change, name="model.safetensors"):
    def damage(folder):
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return damage


def statuses(folder):
    return {finding.check: finding.status for finding in diagnose(folder)}


def test_a_healthy_checkpoint(healthy, capsys):
    assert main(["doctor", str(healthy)]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    expected = [["skip" if name == "sentence_transformers" else "ok", name] for name in CHECKS]
    assert [line.split()[:2] for line in lines] == expected and verdict == "Healthy."
    assert "16 tensors" in lines[1] and "83,464" in lines[1]


def test_a_healthy_embedding_model(embedder):
    assert statuses(embedder) == {name: "skip" if name == "outputs" else "ok" for name in CHECKS}
    (text,) = [finding.text for finding in diagnose(embedder) if finding.check == "sentence_transformers"]
    assert text == "Transformer > Pooling > Dense, 32 dimensions"


def swap_layers(tensors):
    for name in [name for name in tensors if ".transformer_encoder.0." in name]:
        other = name.replace("encoder.0.", "encoder.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def other_words(folder):
    """Another vocabulary with the same number of entries and the same special ids."""
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    names = list(vocabulary)
    values["model"]["vocab"] = dict(zip(names[:5] + names[:4:-1], vocabulary.values()))
    (folder / "tokenizer.json").write_text(json.dumps(values))


def larger_vocabulary(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["neobert"])
    tokenizer.save_pretrained(folder)


def append(name, text):
    def damage(folder):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write(text)

    return damage


def remove(name):
    return lambda folder: (folder / name).unlink()


WO = "model.transformer_encoder.1.wo.weight"
# What is done to the folder: the check that fails, and the name that it says.
DAMAGES = {
    "no config": (remove("config.json"), "config", "config.json"),
    "config cut": (lambda folder: os.truncate(folder / "config.json", 40), "config", "config.json"),
    "other model": (edit_json("config.json", model_type="bert"), "config", "'bert'"),
    "type of a value": (edit_json("config.json", hidden_size="64"), "config", "hidden_size"),
    "unknown key": (edit_json("config.json", dropuot=0.1), "config", "dropuot"),
    "other class": (edit_json("config.json", architectures=["BertModel"]), "config", "BertModel"),
    "no weights": (remove("model.safetensors"), "tensors", "model.safetensors"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "tensors", ""),
    "nan": (edit_tensors(lambda t: t[WO][0, 1].fill_(torch.nan)), "tensors", WO),
    "missing": (edit_tensors(lambda t: t.pop(WO)), "tensors", WO),
    "extra": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "tensors", "extra"),
    "shape": (edit_tensors(lambda t: t.update({WO: torch.ones(64, 63)})), "tensors", WO),
    "width": (edit_json("config.json", intermediate_size=192), "tensors", "ffn.w12.weight"),
    "dtype": (
        edit_tensors(lambda t: t.update({name: x.double() for name, x in t.items()})),
        "tensors",
        "torch.float64",
    ),
    "head of another class": (
        edit_json("config.json", architectures=["NeoBERTForQuestionAnswering"]),
        "tensors",
        "qa_outputs",
    ),
    "more words": (larger_vocabulary, "tokenizer", "200"),
    "padding": (edit_json("config.json", pad_token_id=3), "tokenizer", "pad_token_id"),
    "no mask": (edit_json("tokenizer_config.json", mask_token=None), "tokenizer", "mask_token"),
    "tokenizer cut": (lambda folder: os.truncate(folder / "tokenizer.json", 99), "tokenizer", ""),
    "edited code": (append("modeling_neobert.py", "\n"), "code", "modeling_neobert.py"),
    "code missing": (remove("cpu_neobert.py"), "code", "cpu_neobert.py"),
    "foreign code": (append("model.py", "pass\n"), "code", "model.py"),
    "stale auto_map": (edit_json("config.json", auto_map={"AutoModel": "model.NeoBERT"}), "code", "model.NeoBERT"),
    "other repository": (
        edit_json("config.json", auto_map={"AutoModel": "x/y--modeling_neobert.NeoBERTModel"}),
        "code",
        "x/y--modeling_neobert.NeoBERTModel",
    ),
    "tokenizer of another repository": (
        edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": ["x/y--own.Own", None]}),
        "code",
        "x/y--own.Own",
    ),
    # Only the outputs can tell these.
    "part of a tensor": (edit_tensors(lambda t: t[WO][:8].zero_()), "outputs", "last_hidden_state"),
    "decoder": (edit_tensors(lambda t: t["decoder.weight"][100:110].zero_()), "outputs", "logits"),
    "swapped layers": (edit_tensors(swap_layers), "outputs", "last_hidden_state"),
    "rope_theta": (
        edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
        "outputs",
        "last_hidden_state",
    ),
    "epsilon": (edit_json("config.json", norm_eps=1e-2), "outputs", "last_hidden_state"),
    "other words": (other_words, "outputs", "tokenizer"),
    "golden cut": (lambda folder: os.truncate(folder / GOLDEN_FILE, 99), "outputs", GOLDEN_FILE),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage, healthy, tmp_path, capsys):
    change, check, message = DAMAGES[damage]
    shutil.copytree(healthy, tmp_path / "folder")
    change(tmp_path / "folder")
    assert main(["doctor", str(tmp_path / "folder")]) == 1
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed.split()[1] == check and message in failed


def remove_tokenizer(folder):
    for file in folder.glob("*token*"):
        file.unlink()


def edit_dense(change):
    return edit_tensors(change, "2_Dense/model.safetensors")


EMBEDDER_DAMAGES = {
    "no tokenizer": (remove_tokenizer, "no tokenizer"),
    "foreign module": (
        lambda folder: (folder / "modules.json").write_text('[{"type": "custom.Transformer", "path": ""}]'),
        "custom.Transformer",
    ),
    "no list": (lambda folder: (folder / "modules.json").write_text("{}x"), "modules.json"),
    "other class": (edit_json("config_sentence_transformers.json", model_type="Other"), "'Other'"),
    "dense": (edit_json("1_Pooling/config.json", pooling_mode="mean"), "mat1 and mat2"),
    "no pooling": (remove("1_Pooling/config.json"), ""),
    "no weights": (remove("2_Dense/model.safetensors"), "model.safetensors"),
    "shape": (edit_dense(lambda t: t.update({"linear.weight": torch.ones(5, 128)})), "linear.weight"),
    "no bias": (edit_dense(lambda t: t.pop("linear.bias")), "linear.bias"),
    "nan": (edit_dense(lambda t: t["linear.bias"].fill_(torch.nan)), "not finite"),
}


@pytest.mark.parametrize("damage", EMBEDDER_DAMAGES)
def test_damaged_sentence_transformers_files(damage, embedder, tmp_path):
    change, message = EMBEDDER_DAMAGES[damage]
    shutil.copytree(embedder, tmp_path / "folder")
    change(tmp_path / "folder")
    (failed,) = [finding for finding in diagnose(tmp_path / "folder") if finding.status == "FAIL"]
    assert failed.check == "sentence_transformers" and message in failed.text


def test_every_kind_of_sentence_transformers_model(tmp_path):
    small_model(NeoBERTForMaskedLM, vocab_size=200, num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
    small_model(NeoBERTForSequenceClassification, vocab_size=200, num_labels=1).save_pretrained(tmp_path / "scorer")
    for name, kind, expected in (
        ("encoder", SparseEncoder, "Transformer > SpladePooling, 200 dimensions"),
        ("encoder", MultiVectorEncoder, "Transformer > Dense > MultiVectorMask > Normalize, 128 dimensions"),
        ("scorer", CrossEncoder, "Transformer, 1 dimensions"),
    ):
        small_tokenizer(200).save_pretrained(tmp_path / name)
        folder = tmp_path / kind.__name__
        kind(str(tmp_path / name), device="cpu").save_pretrained(str(folder))
        (finding,) = [finding for finding in diagnose(folder) if finding.check == "sentence_transformers"]
        assert (finding.status, finding.text) == ("ok", expected)


def test_without_sentence_transformers_its_check_is_left_out(embedder, monkeypatch):
    monkeypatch.setattr("neobert_hf.hub.doctor.find_spec", lambda name: None)
    assert statuses(embedder)["sentence_transformers"] == "skip"


def test_no_code_of_the_folder_is_run(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "folder")
    for name in ("modeling_neobert.py", "configuration_neobert.py", "tokenization_own.py"):
        append(name, f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")(tmp_path / "folder")
    auto_map = {"AutoConfig": "configuration_neobert.NeoBERTConfig", "AutoTokenizer": ["tokenization_own.Own", None]}
    edit_json("config.json", auto_map=auto_map)(tmp_path / "folder")
    edit_json("tokenizer_config.json", auto_map=auto_map, tokenizer_class="Own")(tmp_path / "folder")
    found = statuses(tmp_path / "folder")
    assert found["code"] == "FAIL" and found["config"] == found["tensors"] == "ok"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("cls", CLASSES)
def test_recorded_outputs_tell_every_tensor(cls):
    model, tokenizer = small_model(cls, vocab_size=200), small_tokenizer(200)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    golden = record_outputs(model, tokenizer)
    model.set_attn_implementation("eager")
    assert compare_outputs(model, tokenizer, golden) < 1e-5
    for name, tensor in before.items():
        model.load_state_dict(before | {name: tensor * 1.01 + 0.01})
        with pytest.raises(ValueError, match="last_hidden_state|logits"):
            compare_outputs(model, tokenizer, golden)


def test_the_recorded_original_layout(shared):
    """Healthy but for its code, which is not in the folder."""
    found = statuses(shared / "reference" / "published")
    assert found["config"] == found["tensors"] == "ok" and found["code"] == "FAIL"


def test_paths_that_are_none(tmp_path):
    for path in (tmp_path / "nothing", "owner/nothing"):
        assert str(path) in main(["doctor", str(path)])

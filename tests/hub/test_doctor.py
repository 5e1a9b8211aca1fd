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
from neobert_hf import NeoBERTContextualModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
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


def edit_dense(change):
    return edit_tensors(change, "2_Dense/model.safetensors")


def remove(pattern):
    def damage(folder):
        for file in folder.glob(pattern):
            file.unlink()

    return damage


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def edit_code(folder):
    with open(folder / "modeling_neobert.py", "a", encoding="utf-8") as file:
        file.write("\n")


def other_words(folder):
    """Another vocabulary with the same number of entries and the same special ids."""
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    names = list(vocabulary)
    values["model"]["vocab"] = dict(zip(names[:5] + names[:4:-1], vocabulary.values()))
    (folder / "tokenizer.json").write_text(json.dumps(values))


def statuses(folder):
    return {finding.check: finding.status for finding in diagnose(folder)}


def test_a_healthy_checkpoint(healthy, capsys):
    assert main(["doctor", str(healthy)]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    expected = [["skip" if name == "sentence_transformers" else "ok", name] for name in CHECKS]
    assert [line.split()[:2] for line in lines] == expected
    assert "16 tensors" in lines[1] and "83,464" in lines[1]


def test_a_healthy_embedding_model(embedder):
    assert statuses(embedder) == {name: "skip" if name == "outputs" else "ok" for name in CHECKS}
    (text,) = [finding.text for finding in diagnose(embedder) if finding.check == "sentence_transformers"]
    assert "Transformer > Pooling > Dense" in text and "32" in text


WO = "model.transformer_encoder.1.wo.weight"
OTHER_HEAD = edit_json("config.json", architectures=["NeoBERTForQuestionAnswering"])
STALE_CODE = edit_json("config.json", auto_map={"AutoModel": "model.NeoBERT"})
# What is done to a masked LM: the check that fails, and the name that it says.
DAMAGES = {
    "no config": (remove("config.json"), "config", "config.json"),
    "config cut": (cut("config.json", 40), "config", "config.json"),
    "other model": (edit_json("config.json", model_type="bert"), "config", "'bert'"),
    "unknown key": (edit_json("config.json", dropuot=0.1), "config", "dropuot"),
    "other class": (edit_json("config.json", architectures=["BertModel"]), "config", "BertModel"),
    "no weights": (remove("model.safetensors"), "tensors", "model.safetensors"),
    "truncated": (cut("model.safetensors", 100_000), "tensors", ""),
    "nan": (edit_tensors(lambda t: t[WO][0, 1].fill_(torch.nan)), "tensors", WO),
    "missing": (edit_tensors(lambda t: t.pop(WO)), "tensors", WO),
    "extra": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "tensors", "extra"),
    "shape": (edit_tensors(lambda t: t.update({WO: torch.ones(64, 63)})), "tensors", WO),
    "dtype": (edit_tensors(lambda t: t.update({name: x.double() for name, x in t.items()})), "tensors", "float64"),
    "head of another class": (OTHER_HEAD, "tensors", "qa_outputs"),
    "more words": (lambda folder: small_tokenizer(250).save_pretrained(folder), "tokenizer", "200"),
    "padding": (edit_json("config.json", pad_token_id=3), "tokenizer", "pad_token_id"),
    "no mask": (edit_json("tokenizer_config.json", mask_token=None), "tokenizer", "mask_token"),
    "edited code": (edit_code, "code", "modeling_neobert.py"),
    "code missing": (remove("cpu_neobert.py"), "code", "cpu_neobert.py"),
    "code elsewhere": (STALE_CODE, "code", "model.NeoBERT"),
    # Only the outputs can tell these.
    "part of a tensor": (edit_tensors(lambda t: t[WO][:8].zero_()), "outputs", "last_hidden_state"),
    "decoder": (edit_tensors(lambda t: t["decoder.weight"][100:110].zero_()), "outputs", "logits"),
    "epsilon": (edit_json("config.json", norm_eps=1e-2), "outputs", "last_hidden_state"),
    "other words": (other_words, "outputs", "tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage, healthy, tmp_path, capsys):
    change, check, name = DAMAGES[damage]
    shutil.copytree(healthy, tmp_path / "folder")
    change(tmp_path / "folder")
    assert main(["doctor", str(tmp_path / "folder")]) == 1
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed.split()[1] == check and name in failed


@pytest.fixture(scope="module")
def contextual(contextual_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor") / "contextual"
    shutil.copytree(contextual_model, folder)
    model, tokenizer = NeoBERTContextualModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
    return folder


CONTEXTUAL_DAMAGES = {
    "second stage": (edit_tensors(lambda t: t["second_stage.layer_norm.weight"].mul_(1.5)), "outputs", "second_stage"),
    "position": (edit_json("config.json", text_position=4), "outputs", "second_stage"),
    "class": (edit_json("config.json", architectures=["NeoBERTModel"]), "config", "NeoBERTContextualModel"),
    "code": (remove("contextual_neobert.py"), "code", "contextual_neobert.py"),
}


@pytest.mark.parametrize("damage", CONTEXTUAL_DAMAGES)
def test_a_damaged_contextual_model(damage, contextual, tmp_path):
    assert set(statuses(contextual).values()) == {"ok"}
    change, check, name = CONTEXTUAL_DAMAGES[damage]
    shutil.copytree(contextual, tmp_path / "folder")
    change(tmp_path / "folder")
    (failed,) = [finding for finding in diagnose(tmp_path / "folder") if finding.status == "FAIL"]
    assert failed.check == check and name in failed.text


FOREIGN = '[{"idx": 0, "name": "0", "type": "custom.Transformer", "path": ""}]'
EMBEDDER_DAMAGES = {
    "no tokenizer": (remove("*token*"), "no tokenizer"),
    "foreign module": (lambda folder: (folder / "modules.json").write_text(FOREIGN), "custom.Transformer"),
    "other class": (edit_json("config_sentence_transformers.json", model_type="Other"), "'Other'"),
    "pooling": (edit_json("1_Pooling/config.json", pooling_mode="mean"), "mat1 and mat2"),
    "no bias": (edit_dense(lambda t: t.pop("linear.bias")), "linear.bias"),
    "nan": (edit_dense(lambda t: t["linear.bias"].fill_(torch.nan)), "not finite"),
}


@pytest.mark.parametrize("damage", EMBEDDER_DAMAGES)
def test_damaged_sentence_transformers_files(damage, embedder, tmp_path):
    change, name = EMBEDDER_DAMAGES[damage]
    shutil.copytree(embedder, tmp_path / "folder")
    change(tmp_path / "folder")
    (failed,) = [finding for finding in diagnose(tmp_path / "folder") if finding.status == "FAIL"]
    assert failed.check == "sentence_transformers" and name in failed.text


def test_every_kind_of_sentence_transformers_model(tmp_path):
    small_model(NeoBERTForMaskedLM, vocab_size=200, num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
    small_model(NeoBERTForSequenceClassification, vocab_size=200, num_labels=1).save_pretrained(tmp_path / "scorer")
    for name, kind, width in (
        ("encoder", SparseEncoder, "200 dim"),
        ("encoder", MultiVectorEncoder, "128 dim"),
        ("scorer", CrossEncoder, "1 dim"),
    ):
        small_tokenizer(200).save_pretrained(tmp_path / name)
        folder = tmp_path / kind.__name__
        kind(str(tmp_path / name), device="cpu").save_pretrained(str(folder))
        (finding,) = [finding for finding in diagnose(folder) if finding.check == "sentence_transformers"]
        assert finding.status == "ok" and width in finding.text, finding


def test_without_sentence_transformers_its_check_is_left_out(embedder, monkeypatch):
    monkeypatch.setattr("neobert_hf.hub.doctor.find_spec", lambda name: None)
    assert statuses(embedder)["sentence_transformers"] == "skip"


def test_no_code_of_the_folder_is_run(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "folder")
    for name in ("modeling_neobert.py", "configuration_neobert.py", "tokenization_own.py"):
        with open(tmp_path / "folder" / name, "a", encoding="utf-8") as file:
            file.write(f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
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


def test_paths_that_are_none(tmp_path):
    for path in (tmp_path / "nothing", "owner/nothing"):
        assert str(path) in main(["doctor", str(path)])

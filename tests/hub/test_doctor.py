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
def masked_lm(tmp_path_factory):
    """A masked LM with everything that is checked but Sentence Transformers' files."""
    folder = tmp_path_factory.mktemp("healthy")
    model, tokenizer = small_model(NeoBERTForMaskedLM, vocab_size=200), small_tokenizer(200)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
    return folder


@pytest.fixture(scope="module")
def embedder(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    modules = [Transformer(str(encoder)), Pooling(64, pooling_mode=("mean", "cls")), Dense(128, 32)]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def contextual(contextual_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor") / "contextual"
    shutil.copytree(contextual_folder, folder)
    model, tokenizer = NeoBERTContextualModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    write_json(folder / GOLDEN_FILE, record_outputs(model, tokenizer))
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


def remove(pattern):
    def damage(folder):
        for file in folder.glob(pattern):
            file.unlink()

    return damage


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


# What has nothing to check: a masked LM is no model of Sentence Transformers, and of the embedder nothing is recorded.
@pytest.mark.parametrize(
    "kind, skipped", [("masked_lm", "sentence_transformers"), ("embedder", "outputs"), ("contextual", "")]
)
def test_a_healthy_checkpoint(kind, skipped, request, capsys):
    assert main(["doctor", str(request.getfixturevalue(kind))]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["skip" if name == skipped else "ok", name] for name in CHECKS]
    if kind == "masked_lm":
        assert "16 tensors" in lines[1] and "83,464" in lines[1]


WO = "model.transformer_encoder.1.wo.weight"
OTHER_HEAD = edit_json("config.json", architectures=["NeoBERTForQuestionAnswering"])
FOREIGN = '[{"idx": 0, "name": "0", "type": "custom.Transformer", "path": ""}]'
DENSE = "2_Dense/model.safetensors"
STALE_CODE = edit_json("config.json", auto_map={"AutoModel": "model.NeoBERT"})
# What is done to a model: the check that fails, and the name that it says.
MASKED_LM = {
    "no config": (remove("config.json"), "config", "config.json"),
    "unknown key": (edit_json("config.json", dropuot=0.1), "config", "dropuot"),
    "other class": (edit_json("config.json", architectures=["BertModel"]), "config", "BertModel"),
    "no weights": (remove("model.safetensors"), "tensors", "model.safetensors"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "tensors", ""),
    "nan": (edit_tensors(lambda t: t[WO][0, 1].fill_(torch.nan)), "tensors", WO),
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
MODULES = "sentence_transformers"
EMBEDDER = {
    "no tokenizer": (remove("*token*"), MODULES, "no tokenizer"),
    "foreign module": (lambda folder: (folder / "modules.json").write_text(FOREIGN), MODULES, "custom.Transformer"),
    "other class": (edit_json("config_sentence_transformers.json", model_type="Other"), MODULES, "'Other'"),
    "pooling": (edit_json("1_Pooling/config.json", pooling_mode="mean"), MODULES, "mat1 and mat2"),
    "no bias": (edit_tensors(lambda t: t.pop("linear.bias"), DENSE), MODULES, "linear.bias"),
    "nan": (edit_tensors(lambda t: t["linear.bias"].fill_(torch.nan), DENSE), MODULES, "not finite"),
}
CONTEXTUAL = {
    "second stage": (edit_tensors(lambda t: t["second_stage.layer_norm.weight"].mul_(1.5)), "outputs", "second_stage"),
    "position": (edit_json("config.json", text_position=4), "outputs", "second_stage"),
    "class": (edit_json("config.json", architectures=["NeoBERTModel"]), "config", "NeoBERTContextualModel"),
    "code": (remove("contextual_neobert.py"), "code", "contextual_neobert.py"),
}
KINDS = {"masked_lm": MASKED_LM, "embedder": EMBEDDER, "contextual": CONTEXTUAL}


@pytest.mark.parametrize("kind, damage", [(kind, damage) for kind, damages in KINDS.items() for damage in damages])
def test_damage_is_found_and_named(kind, damage, request, tmp_path, capsys):
    change, check, name = KINDS[kind][damage]
    shutil.copytree(request.getfixturevalue(kind), tmp_path / "folder")
    change(tmp_path / "folder")
    assert main(["doctor", str(tmp_path / "folder")]) == 1
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed.split()[1] == check and name in failed


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


def test_no_code_of_the_folder_is_run(masked_lm, tmp_path):
    shutil.copytree(masked_lm, tmp_path / "folder")
    for name in ("modeling_neobert.py", "configuration_neobert.py", "tokenization_own.py"):
        with open(tmp_path / "folder" / name, "a", encoding="utf-8") as file:
            file.write(f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    auto_map = {"AutoConfig": "configuration_neobert.NeoBERTConfig", "AutoTokenizer": ["tokenization_own.Own", None]}
    edit_json("config.json", auto_map=auto_map)(tmp_path / "folder")
    edit_json("tokenizer_config.json", auto_map=auto_map, tokenizer_class="Own")(tmp_path / "folder")
    found = {finding.check: finding.status for finding in diagnose(tmp_path / "folder")}
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

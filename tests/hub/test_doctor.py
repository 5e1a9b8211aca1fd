"""`neobert-hf doctor`: a healthy checkpoint is said to be so, and every kind of damage is found and named."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from transformers import AutoTokenizer

from neobert_hf import NeoBERTContextualModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.common.files import write_json
from neobert_hf.hub import average, convert, doctor, export, publish
from neobert_hf.hub.diagnosis import CHECKS, diagnose
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, compare_outputs, record_outputs
from tests.helpers.examples import status_of
from tests.helpers.models import CLASSES, save_checkpoint, small_model
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.fixture(scope="module")
def healthy(masked_lm, embedder, contextual, tmp_path_factory) -> Path:
    """Folders `masked_lm`, `embedder` and `contextual`; of two of them the outputs are recorded."""
    folder = tmp_path_factory.mktemp("healthy")
    shutil.copytree(embedder, folder / "embedder")
    for source, cls in ((masked_lm, NeoBERTForMaskedLM), (contextual, NeoBERTContextualModel)):
        copy = shutil.copytree(source, folder / ("masked_lm" if source is masked_lm else "contextual"))
        golden = record_outputs(cls.from_pretrained(copy), AutoTokenizer.from_pretrained(copy))
        write_json(copy / GOLDEN_FILE, golden)
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
def test_a_healthy_checkpoint(kind, skipped, healthy, capsys):
    assert status_of(["doctor", str(healthy / kind)]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["skip" if name == skipped else "ok", name] for name in CHECKS]
    if kind == "masked_lm":
        assert "16 tensors" in lines[1] and "70,564" in lines[1]


WO = "model.transformer_encoder.1.wo.weight"
OTHER_HEAD = edit_json("config.json", architectures=["NeoBERTForQuestionAnswering"])
FOREIGN = '[{"idx": 0, "name": "0", "type": "custom.Transformer", "path": ""}]'
DENSE = "2_Dense/model.safetensors"
STALE_CODE = edit_json("config.json", auto_map={"AutoModel": "model.NeoBERT"})
MODULES = "sentence_transformers"
# The model, what is done to it, the check that fails, and the name that it says.
DAMAGES = [
    ("masked_lm", edit_json("config.json", dropuot=0.1), "config", "dropuot"),
    ("masked_lm", remove("model.safetensors"), "tensors", "model.safetensors"),
    ("masked_lm", edit_tensors(lambda t: t[WO][0, 1].fill_(torch.nan)), "tensors", WO),
    ("masked_lm", edit_tensors(lambda t: t.update({key: x.double() for key, x in t.items()})), "tensors", "float64"),
    ("masked_lm", OTHER_HEAD, "tensors", "qa_outputs"),
    ("masked_lm", lambda folder: small_tokenizer(150).save_pretrained(folder), "tokenizer", "vocab_size"),
    ("masked_lm", edit_json("config.json", pad_token_id=3), "tokenizer", "pad_token_id"),
    ("masked_lm", edit_json("tokenizer_config.json", mask_token=None), "tokenizer", "mask_token"),
    ("masked_lm", edit_code, "code", "modeling_neobert.py"),
    ("masked_lm", remove("cpu_neobert.py"), "code", "cpu_neobert.py"),
    ("masked_lm", STALE_CODE, "code", "model.NeoBERT"),
    ("contextual", remove("contextual_neobert.py"), "code", "contextual_neobert.py"),
    ("embedder", remove("*token*"), MODULES, "no tokenizer"),
    ("embedder", lambda folder: (folder / "modules.json").write_text(FOREIGN), MODULES, "custom.Transformer"),
    ("embedder", edit_json("config_sentence_transformers.json", model_type="Other"), MODULES, "'Other'"),
    ("embedder", edit_json("1_Pooling/config.json", pooling_mode=["mean", "cls"]), MODULES, "mat1 and mat2"),
    ("embedder", edit_tensors(lambda t: t["linear.bias"].fill_(torch.nan), DENSE), MODULES, "not finite"),
    # Only the outputs can tell these.
    ("masked_lm", edit_tensors(lambda t: t["decoder.weight"][50:60].zero_()), "outputs", "logits"),
    ("masked_lm", edit_json("config.json", norm_eps=1e-2), "outputs", "last_hidden_state"),
    ("masked_lm", other_words, "outputs", "tokenizer"),
    ("contextual", edit_tensors(lambda t: t["second_stage.layer_norm.weight"].mul_(1.5)), "outputs", "second_stage"),
]


@pytest.mark.parametrize("kind, change, check, name", DAMAGES, ids=[f"{kind} {name}" for kind, *_, name in DAMAGES])
def test_damage_is_found_and_named(kind, change, check, name, healthy, tmp_path, capsys):
    shutil.copytree(healthy / kind, tmp_path / "folder")
    change(tmp_path / "folder")
    assert f"checks failed: {check}" in status_of(["doctor", str(tmp_path / "folder")])
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed.split()[1] == check and name in failed


@pytest.mark.parametrize("kind, width", [(SparseEncoder, 100), (MultiVectorEncoder, 128), (CrossEncoder, 1)])
def test_every_kind_of_sentence_transformers_model(kind, width, masked_lm, tmp_path, capsys):
    """It is also published."""
    scorer = save_checkpoint(tmp_path / "scorer", NeoBERTForSequenceClassification, num_labels=1)
    kind(str(scorer if kind is CrossEncoder else masked_lm), device="cpu").save_pretrained(str(tmp_path / "model"))
    assert status_of(["publish", str(tmp_path / "model"), "me/model", "--dry_run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = [line for line in lines if line[1:2] == [MODULES]]
    assert line[0] == "ok" and line[-2:] == [str(width), "dimensions"]
    assert ["ok", "outputs"] in [line[:2] for line in lines]


def test_no_code_of_the_folder_is_run(healthy, tmp_path):
    shutil.copytree(healthy / "masked_lm", tmp_path / "folder")
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
    model, tokenizer = small_model(cls), small_tokenizer()
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
        assert str(path) in status_of(["doctor", str(path)])


@pytest.mark.parametrize("command", [average, convert, doctor, export, publish])
def test_the_setting_for_a_model_has_one_name(command):
    names = {one.name for kind in command.kinds for one in fields(kind)}
    assert {"model", "models"} & names and not {"path", "source"} & names

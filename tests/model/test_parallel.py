"""One model on several processes: Transformers' tensor parallelism by the plan of the config, with gloo on a CPU.

The plan of a pipeline is only read by servers: see test_serving.py.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import ModernBertConfig, ModernBertModel, ModernBertPreTrainedModel
from transformers.models.auto import modeling_auto

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.checkpoint_checks_neobert import check_division
from tests.helpers.models import small_config, small_model
from tests.helpers.pretraining_runs import start_divided


# Sums over parts round otherwise than sums over the whole.
OUTPUTS, GRADIENTS = 1e-5, 1e-6


def divide(folder: Path, cls: type, processes: int = 2, plan: dict[str, str] | None = None, **changes) -> dict:
    """What tests/helpers/divided_model.py finds on so many processes."""
    small_model(cls, **changes).save_pretrained(folder)
    start_divided([str(folder), cls.__name__, str(processes), json.dumps(plan)], processes).finish()
    return json.loads((folder / "found.json").read_text())


def assert_equal(found: dict) -> None:
    assert "error" not in found, found["error"]
    assert len(found["outputs"]) == 6 and max(found["outputs"].values()) <= OUTPUTS, found["outputs"]
    assert max(found["gradients"].values()) <= GRADIENTS, found["gradients"]


def test_two_processes_compute_what_one_does(tmp_path):
    found = divide(tmp_path, NeoBERTForMaskedLM)
    assert_equal(found)
    assert found["divided"] == {
        "model.encoder.weight": [50, 64],
        **{
            f"model.transformer_encoder.{layer}.{name}.weight": shape
            for layer in range(2)
            for name, shape in {"qkv": [96, 64], "wo": [64, 32], "ffn.w12": [64, 64], "ffn.w3": [64, 32]}.items()
        },
        "decoder.weight": [50, 64],
        "decoder.bias": [50],
    }
    # What was divided is saved whole.
    saved = NeoBERTForMaskedLM.from_pretrained(tmp_path / "divided").state_dict()
    expected = NeoBERTForMaskedLM.from_pretrained(tmp_path).state_dict()
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.parametrize(
    "cls, processes, changes",
    [
        # Neither vocabulary nor MLP is a multiple of 3.
        (NeoBERTForMaskedLM, 3, {"hidden_size": 48, "num_attention_heads": 3}),
        (NeoBERTForMaskedLM, 2, {"tie_word_embeddings": True, "vocab_size": 101, "embedding_init_range": 0.1}),
        # An MLP that every process computes whole.
        (NeoBERTForMaskedLM, 2, {"hidden_act": "gelu", "rope": False, "rms_norm": False}),
        (NeoBERTForSequenceClassification, 2, {"classifier_pooling": "mean"}),
    ],
)
def test_other_models_and_numbers_of_processes(cls, processes, changes, tmp_path):
    assert_equal(divide(tmp_path, cls, processes, **changes))


def test_heads_that_cannot_be_divided_are_refused_when_loading(tmp_path):
    found = divide(tmp_path, NeoBERTForMaskedLM, hidden_size=48, num_attention_heads=3)
    assert found["error"].startswith("`tp_size` is 2, but the model has 3 attention heads.")


def test_a_plan_of_ones_own_that_would_mix_heads_is_refused_when_loading(tmp_path):
    """Transformers would run it: halves of the first two heads beside halves of the last two."""
    plan = {"model.transformer_encoder.*.qkv": "packed_colwise"}
    assert "rows of the first, which are ordered by head" in divide(tmp_path, NeoBERTForMaskedLM, plan=plan)["error"]


def divided(processes: int, plan: dict[str, str] | None = None, **changes) -> nn.Module:
    """A model as it is when Transformers has divided it and loads the weights, as far as the check looks."""
    model = small_model(NeoBERTForMaskedLM, **changes)
    model._tp_size = processes
    model.tp_plan = model.tp_plan | (plan or {})
    return model


QKV, WO, W12, W3 = (f"model.transformer_encoder.*.{name}" for name in ("qkv", "wo", "ffn.w12", "ffn.w3"))


@pytest.mark.parametrize(
    "processes, plan",
    [
        (1, {QKV: "packed_colwise"}),
        (2, {}),
        (4, {QKV: "replicate", WO: "replicate"}),
        (2, {W12: "replicate", W3: "replicate", "decoder": "replicate"}),
    ],
)
def test_divisions_that_are_right(processes, plan):
    check_division(divided(processes, plan))


@pytest.mark.parametrize(
    "processes, plan, message",
    [
        (3, {}, r"`tp_size` is 3, but the model has 4 attention heads.* one of \[2, 4\]"),
        (8, {}, r"one of \[2, 4\]"),
        (2, {QKV: "packed_colwise"}, "it must have .*'colwise'.*ordered by head"),
        (2, {W12: "colwise"}, "it must have .*'packed_colwise'"),
        (2, {QKV: "replicate"}, "the columns of the second"),
        (2, {W3: "replicate"}, "the columns of the second"),
        (2, {"model.transformer_encoder.*.ffn_norm": "sequence_parallel"}, "inside a block it may name"),
    ],
)
def test_divisions_that_would_give_wrong_numbers(processes, plan, message):
    with pytest.raises(ValueError, match=message):
        check_division(divided(processes, plan))


@pytest.mark.parametrize("cls", [NeoBERTModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_plans_name_what_is_there(cls):
    model = small_model(cls)
    names = {name.replace(".0.", ".*.") for name, _ in model.named_modules()}
    assert set(model.tp_plan) <= names and set(model.pp_plan) <= names
    assert set(NeoBERTConfig.base_model_tp_plan) <= {name.removeprefix("model.") for name in model.tp_plan}
    assert ("decoder" in model.tp_plan) == ("decoder" in model.pp_plan) == (cls is NeoBERTForMaskedLM)
    assert model.supports_tp_plan and model.supports_pp_plan


def test_what_does_not_hold_is_not_claimed():
    """Transformers divides sequences among GPUs with causal attention only, and two encoders have no plan."""
    assert not small_model().supports_context_parallel
    config = neobert_hf.NeoBERTContextualConfig(**{**small_config().to_dict(), "model_type": "neobert_contextual"})
    model = neobert_hf.NeoBERTContextualModel(config)
    assert not model.supports_tp_plan and not model.supports_pp_plan


def test_flags_are_those_of_the_peer():
    """What ModernBERT says of itself, NeoBERT says too, in the Transformers that is installed."""
    flags = [name for name in vars(ModernBertPreTrainedModel) if name.startswith("_supports_")]
    assert len(flags) >= 4
    assert {name: getattr(NeoBERTModel, name) for name in flags} == {
        name: getattr(ModernBertModel, name) for name in flags
    }
    peer, ours = ModernBertModel._can_record_outputs, NeoBERTModel._can_record_outputs
    assert peer.keys() == ours.keys() and NeoBERTModel._no_split_modules == ["NeoBERTEncoderBlock"]


def test_auto_classes_are_those_of_the_peer():
    """Every Auto class of the Transformers that is installed which has a ModernBERT has a NeoBERT, and no other has."""
    classes = {
        name: cls for name, cls in vars(modeling_auto).items() if getattr(cls, "_model_mapping", None) is not None
    }
    peer, ours = (
        {name for name, cls in classes.items() if config in cls._model_mapping}
        for config in (ModernBertConfig, NeoBERTConfig)
    )
    assert peer == ours and len(ours) >= 6

"""Which settings count for the trained weights, which of Transformers' a recipe refuses, and what follows from some."""

import math

import pytest
import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from neobert_hf.distillation.trainer import DistilArguments
from neobert_hf.embeddings.arguments import EmbeddingArguments
from neobert_hf.pretraining.settings import PretrainingArguments
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.fine_tuning import FineTuningArguments


def settings(**changes) -> dict:
    return result_settings(TrainingArguments(**{"output_dir": "runs", "use_cpu": True, "max_steps": 10} | changes))


@pytest.mark.parametrize(
    "name, value",
    [("label_smoothing_factor", 0.1), ("seed", 1), ("gradient_accumulation_steps", 2), ("adam_beta2", 0.9)],
)
def test_what_changes_the_weights_counts(name, value):
    assert settings(**{name: value}) == settings() | {name: value} != settings()


@pytest.mark.parametrize(
    "kind, name, value",
    [
        (PretrainingArguments, "save_only_model", True),
        (PretrainingArguments, "optim", "sgd"),
        (FineTuningArguments, "save_steps", 7),
        (FineTuningArguments, "train_sampling_strategy", "group_by_length"),
        (FineTuningArguments, "lora_alpha", 2.0),
    ],
)
def test_settings_that_would_break_a_promise_are_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        kind("runs", use_cpu=True, **{name: value})


def test_an_empty_text_is_no_folder():
    """As a shell gives it, if the variable in `--output_dir "$FOLDER"` is not set."""
    with pytest.raises(ValueError, match="`output_dir` is an empty text"):
        FineTuningArguments("", use_cpu=True)


@pytest.mark.parametrize("kind", [PretrainingArguments, EmbeddingArguments, FineTuningArguments, DistilArguments])
@pytest.mark.parametrize(
    "name, value",
    [
        ("learning_rate", math.nan),
        ("learning_rate", -1e-3),
        ("weight_decay", math.inf),
        ("adam_beta2", 1.0),
        ("per_device_train_batch_size", 0),
        ("per_device_eval_batch_size", -1),
        ("gradient_accumulation_steps", 0),
        ("eval_steps", 0),
        ("warmup_steps", -5),
        ("seed", -1),
    ],
)
def test_numbers_out_of_their_range_are_refused_in_one_place(kind, name, value):
    with pytest.raises(ValueError, match=f"^`{name}` is") as error:
        kind("runs", use_cpu=True, **{name: value})
    # A message of Transformers would come with a traceback.
    assert str(error.traceback[-1].path).endswith("neobert_hf/common/settings.py")


@pytest.mark.parametrize("kind", [PretrainingArguments, EmbeddingArguments, FineTuningArguments])
def test_the_precision_follows_the_hardware(kind):
    assert kind("runs").bf16 is is_torch_bf16_gpu_available()
    assert kind("runs", use_cpu=True).bf16 is False
    assert kind("runs", use_cpu=True, bf16=True).bf16 is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be used")
@pytest.mark.parametrize("fast", [True, False])
def test_distillation_on_a_cpu_uses_bfloat16_where_it_is_fast(fast, monkeypatch):
    monkeypatch.setattr("neobert_hf.distillation.trainer.fast_bfloat16", lambda device: fast)
    assert DistilArguments("runs").bf16 is DistilArguments("runs", use_cpu=True).bf16 is fast
    assert DistilArguments("runs").device.type == "cpu"


def test_an_epoch_is_a_pass_over_the_rows_with_any_accumulation():
    for batch, accumulated, steps in ((4, 1, 18), (4, 4, 6), (5, 1, 15), (5, 2, 9)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "use_cpu": True}
        assert FineTuningArguments("runs", num_train_epochs=3, **options).planned(rows=24).max_steps == steps

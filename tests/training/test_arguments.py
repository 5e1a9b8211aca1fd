"""Which settings count for the trained weights, and which of Transformers' a recipe refuses."""

import pytest
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from neobert_hf.embeddings.arguments import EmbeddingArguments
from neobert_hf.training.arguments import result_settings
from neobert_hf.training.fine_tuning import FineTuningArguments
from neobert_hf.training.pretraining import PretrainingArguments


def settings(**changes) -> dict:
    return result_settings(TrainingArguments(**{"output_dir": "runs", "use_cpu": True, "max_steps": 10} | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"label_smoothing_factor": 0.1},
        {"seed": 1},
        {"gradient_accumulation_steps": 2},
        {"adam_beta2": 0.9},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_weights_counts(change):
    ((name, value),) = change.items()
    assert settings(**change) == settings() | {name: value} != settings()


def test_what_does_not_change_them_does_not_count():
    change = {"output_dir": "elsewhere", "logging_steps": 7, "save_steps": 7, "eval_strategy": "steps", "eval_steps": 5}
    assert settings(**change, dataloader_num_workers=2, gradient_checkpointing=True) == settings()


@pytest.mark.parametrize(
    "kind, changes",
    [
        (PretrainingArguments, {"save_only_model": True}),
        (PretrainingArguments, {"optim": "sgd"}),
        (FineTuningArguments, {"save_steps": 7}),
        (FineTuningArguments, {"train_sampling_strategy": "group_by_length"}),
        (FineTuningArguments, {"lora_alpha": 2.0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_would_break_a_promise_are_refused(kind, changes):
    with pytest.raises(ValueError, match=f"`{next(iter(changes))}`"):
        kind("runs", use_cpu=True, **changes)


@pytest.mark.parametrize("kind", [PretrainingArguments, EmbeddingArguments, FineTuningArguments])
def test_the_precision_follows_the_hardware(kind):
    assert kind("runs").bf16 is is_torch_bf16_gpu_available()
    assert kind("runs", use_cpu=True).bf16 is False
    assert kind("runs", use_cpu=True, bf16=True).bf16 is True

"""Which settings count for the trained weights, and which of Transformers' a recipe refuses."""

import math

import pytest
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from neobert_hf.pretraining.arguments import UNUSED, PretrainingArguments
from neobert_hf.training.arguments import check_fixed, result_settings


def settings(**changes) -> dict:
    return result_settings(TrainingArguments(**{"output_dir": "runs", "use_cpu": True, "max_steps": 10} | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"data_seed": 1},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"optim_args": "amsgrad=true"},
        {"seed": 1},
        {"learning_rate": 1e-3},
        {"max_steps": 11},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_weights_counts(change):
    ((name, value),) = change.items()
    assert settings(**change) == settings() | {name: value} != settings()


@pytest.mark.parametrize(
    "change",
    [
        {"output_dir": "elsewhere"},
        {"logging_steps": 7},
        {"save_steps": 7},
        {"save_total_limit": 1},
        {"eval_strategy": "steps", "eval_steps": 5},
        {"report_to": "none"},
        {"dataloader_num_workers": 2},
        {"gradient_checkpointing": True},
        {"disable_tqdm": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_them_does_not_count(change):
    assert settings(**change) == settings()


def test_what_a_recipe_leaves_out_does_not_count():
    arguments = TrainingArguments("runs", use_cpu=True, max_steps=10)
    assert settings().keys() - result_settings(arguments, leave_out={"seed", "optim"}).keys() == {"seed", "optim"}


def test_checkpoints_of_pretraining_store_these_names():
    """As they have since the first checkpoints: another name here would refuse to resume all of them."""
    arguments = PretrainingArguments("runs", use_cpu=True, bf16=False)
    assert result_settings(arguments, leave_out=set(UNUSED)) == {
        "optimizer": "adamw",
        "schedule": "cosine_to_floor",
        "learning_rate": 6e-4,
        "warmup_steps": 2000,
        "max_steps": 1_000_000,
        "weight_decay": 0.1,
        "decay_norms_and_biases": True,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "bf16": False,
        "fp16": False,
        "seed": 42,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "`auto_find_batch_size` is True; this recipe needs False"),
        ({"save_only_model": True}, "`save_only_model` is True"),
        ({"optim": "sgd"}, "`optim` is .*; this recipe needs 'adamw_torch'"),
        ({"max_steps": -1}, "`max_steps` is -1; it must be 1 or more"),
        ({"resume_from_checkpoint": "checkpoint-5"}, "`resume_from_checkpoint` is .*leave it out: the same command"),
        ({"learning_rate": math.nan}, "`learning_rate` is nan; it must be a number, above 0"),
        ({"learning_rate": 0.0}, "`learning_rate` is 0.0; it must be above 0"),
        ({"warmup_steps": 1.5}, "`warmup_steps` is 1.5; it must be a whole number of optimizer steps, or a share"),
        ({"weight_decay": -0.1}, "`weight_decay` is -0.1; it must be 0 or more"),
        ({"adam_epsilon": math.inf}, "`adam_epsilon` is inf; it must be a number, 1e-37 or more"),
        ({"max_grad_norm": math.nan}, "`max_grad_norm` is nan"),
        ({"save_total_limit": -1}, "`save_total_limit` is -1; it must be 1 or more"),
        ({"lr_scheduler_kwargs": '{"num_cycles": NaN}'}, "`lr_scheduler_kwargs` is .*; each must be a number, finite"),
    ],
)
def test_settings_that_would_break_a_promise_are_refused(changes, message):
    arguments = TrainingArguments(**{"output_dir": "runs", "use_cpu": True, "max_steps": 10} | changes)
    arguments.logging_nan_inf_filter = False
    with pytest.raises(ValueError, match=message):
        check_fixed(arguments, {"optim": "adamw_torch"} if "optim" in changes else {})


@pytest.mark.skipif(is_torch_bf16_gpu_available(), reason="for machines that cannot train in bfloat16 by themselves")
def test_bfloat16_without_a_gpu_is_refused_with_both_ways_out():
    # Ours comes before Transformers' own check, which names neither.
    with pytest.raises(ValueError, match="`bf16` is true, .*`--use_cpu true` for bfloat16, or `--bf16 false`"):
        PretrainingArguments(output_dir="runs")
    assert PretrainingArguments(output_dir="runs", use_cpu=True).bf16

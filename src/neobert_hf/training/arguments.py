"""Settings of Transformers' `TrainingArguments`: those that recipes fix, and those that trained weights depend on."""

import json
import os
import sys
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.utils import is_torch_bf16_gpu_available

from neobert_hf.common.settings import check_numbers, nearest


# What every recipe needs of Transformers' settings, in addition to its own: other values would hide errors, or make
# resuming inexact.
FIXED = {
    # True would hide NaN in the logged loss.
    "logging_nan_inf_filter": False,
    "auto_find_batch_size": False,
    "save_only_model": False,
    # The same command with the same `output_dir` resumes by itself.
    "resume_from_checkpoint": None,
}

# The help of `bf16`. A flag without a value switches it on.
BF16 = {
    "help": "bfloat16 autocast, with weights and optimizer in float32; where a GPU computes in it if unset",
    "nargs": "?",
    "const": True,
}

# Settings that do not change the trained weights: where files go, what is printed and when, how fast training runs, and
# on which devices (a run may move to others; the engine is compared separately). Everything else is compared on resume:
# a list of the settings that do matter would miss the next setting that Transformers adds.
INCIDENTAL_PREFIXES = ("logging_", "log_", "save_", "hub_", "push_", "eval_", "trackio_", "dataloader_", "ddp_", "do_")
INCIDENTAL = set(
    "output_dir report_to run_name project disable_tqdm accelerator_config include_num_input_tokens_seen "
    "skip_memory_metrics debug per_device_eval_batch_size prediction_loss_only include_for_metrics "
    "batch_eval_metrics bf16_full_eval fp16_full_eval use_cpu local_rank fsdp fsdp_config deepspeed "
    "parallelism_config resume_from_checkpoint torch_compile torch_compile_backend torch_compile_mode tf32 "
    "torch_empty_cache_steps enable_jit_checkpoint gradient_checkpointing gradient_checkpointing_kwargs "
    "activation_checkpointing activation_checkpointing_kwargs full_determinism use_cache label_names "
    "remove_unused_columns ignore_data_skip restore_callback_states_from_checkpoint average_tokens_across_devices "
    "metric_for_best_model greater_is_better".split()
)
# Settings that are stored even if they have their default, for readers of a checkpoint. Others are stored only if they
# differ from their default.
ALWAYS_STORED = set(
    "optim lr_scheduler_type lr_scheduler_kwargs optimizer schedule learning_rate warmup_steps max_steps weight_decay "
    "decay_norms_and_biases adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16 seed "
    "per_device_train_batch_size batch_sampler".split()
)


# The ranges of numbers that Transformers does not look at, or explains with a traceback.
RANGES = {
    "learning_rate": "0 or more",
    "weight_decay": "0 or more",
    "warmup_steps": "0 or more",
    "adam_beta1": "0 or more and below 1",
    "adam_beta2": "0 or more and below 1",
    "adam_epsilon": "above 0",
    "max_grad_norm": "0 or more",
    "num_train_epochs": "above 0",
    "max_steps": "a number",
    "per_device_train_batch_size": "1 or more",
    "per_device_eval_batch_size": "1 or more",
    "gradient_accumulation_steps": "1 or more",
    "logging_steps": "above 0",
    "save_steps": "above 0",
    "eval_steps": "above 0",
    "save_total_limit": "1 or more",
    "dataloader_num_workers": "0 or more",
    "seed": "0 or more",
}


def fix(arguments: TrainingArguments, fixed: dict[str, Any], unused: dict[str, str | None]) -> None:
    """Give settings of Transformers the only value that a recipe allows.

    Args:
        fixed: these values by name, in addition to `FIXED`.
        unused: names of settings that the recipe does not use, each with the setting to use instead, if there is one.

    Raises:
        ValueError: naming a setting that the user gave another value, or a number out of its range.
    """
    if arguments.output_dir == "":
        raise ValueError("`output_dir` is an empty text: name a folder.")
    check_numbers(arguments, RANGES)
    # Transformers would look for an integration of the name None.
    arguments.report_to = arguments.report_to or "none"
    report_to = [arguments.report_to] if isinstance(arguments.report_to, str) else arguments.report_to
    if unknown := [name for name in report_to if name not in {*INTEGRATION_TO_CALLBACK, "none", "all"}]:
        raise ValueError(
            f"`report_to` is {unknown[0]!r}{nearest(unknown[0], [*INTEGRATION_TO_CALLBACK, 'none', 'all'])}"
        )
    if not sys.stderr.isatty():
        # A progress bar would fill a log file with thousands of lines.
        arguments.disable_tqdm = True
    defaults = {field.name: field.default for base in type(arguments).__bases__ for field in fields(base)}
    for name, value in (FIXED | fixed).items():
        if getattr(arguments, name) not in (value, defaults[name]):
            raise ValueError(f"`{name}` is {getattr(arguments, name)!r}; this recipe needs {value!r}: leave it out.")
        setattr(arguments, name, value)
    for name, instead in unused.items():
        if getattr(arguments, name) != defaults[name]:
            advice = f"set `{instead}` instead" if instead else "leave it out"
            raise ValueError(f"`{name}` is {getattr(arguments, name)!r}, but this recipe does not use it: {advice}.")


def refused_by(fixed: dict[str, Any], unused: dict[str, str | None]) -> set[str]:
    """The settings that a recipe with these values refuses, which its help does not list."""
    return {*FIXED, *fixed, *unused}


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 faster than in float32: other CPUs only emulate it."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def use_fast_bfloat16(model: nn.Module, device: torch.device) -> None:
    """Bring a model that only reads into bfloat16, where a device is faster so.

    Its buffers stay as they are: RoPE's frequencies, rounded, would turn tokens that are far apart by wrong angles.
    """
    if fast_bfloat16(device):
        for weight in model.parameters():
            weight.data = weight.data.bfloat16()


def follow_hardware(arguments: TrainingArguments) -> None:
    """If `bf16` is unset, use it where a GPU computes in it; CPUs train in float32 unless they are told otherwise."""
    if arguments.bf16 is None:
        arguments.bf16 = not (arguments.fp16 or arguments.use_cpu) and is_torch_bf16_gpu_available()
    if not (arguments.bf16 or arguments.fp16):
        # The settings decide, and not the precision of Accelerate's launcher, which Transformers would follow.
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    # Without a GPU there is nothing to pin memory for, and torch would say so at every evaluation.
    arguments.dataloader_pin_memory &= torch.cuda.is_available()


def result_settings(arguments: TrainingArguments, leave_out: set[str] = frozenset()) -> dict[str, Any]:
    """The settings that trained weights depend on, by name, as they are after a round trip through JSON.

    Args:
        leave_out: names of settings that the recipe stores in another form or does not use.
    """
    settings = {}
    for field in fields(arguments):
        name, value = field.name, getattr(arguments, field.name)
        if name in INCIDENTAL or name in leave_out or name.startswith(INCIDENTAL_PREFIXES):
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if name in ALWAYS_STORED or value != default:
            settings[name] = value
    return json.loads(json.dumps(settings, default=str))

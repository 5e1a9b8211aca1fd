"""Settings of Transformers' `TrainingArguments`: those that recipes fix, and those that trained weights depend on."""

import json
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from neobert_hf.common.settings import Range, check_ranges


# The settings that every recipe fixes, in addition to its own: other values would make resuming inexact or hide errors.
FIXED = {
    # Would hide NaN in the logged loss.
    "logging_nan_inf_filter": False,
    "auto_find_batch_size": False,
    "load_best_model_at_end": False,
    "save_only_model": False,
}

# Ranges of numbers that Transformers and Sentence Transformers do not check. Numbers not listed here must be finite.
RANGES = {
    name: allowed
    for allowed, names in (
        (Range(0), "weight_decay max_grad_norm neftune_noise_alpha warmup_steps eval_delay"),
        (Range(0), "dataloader_num_workers"),
        (Range(0, 1), "label_smoothing_factor warmup_ratio"),
        (Range(0, below=1), "adam_beta1 adam_beta2"),
        (Range(above=0), "learning_rate num_train_epochs logging_steps save_steps eval_steps"),
        # Smaller values are 0 in float32, and weights without a gradient would become NaN.
        (Range(1e-37), "adam_epsilon"),
        (Range(1), "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps"),
        (Range(1), "eval_accumulation_steps torch_empty_cache_steps dataloader_prefetch_factor save_total_limit"),
        (Range(1), "ddp_bucket_cap_mb ddp_timeout"),
        # The seeds that NumPy accepts.
        (Range(0, 2**32 - 1), "seed data_seed"),
        # -1 stands for no limit and for no rank.
        (Range(-1), "max_steps local_rank"),
    )
    for name in names.split()
}

# Settings that do not change the trained weights: where files go, what is printed and when, how fast training runs, and
# on which devices (a run may move to others; the engine is compared separately). Everything else is compared on resume:
# a list of the settings that do matter would miss the next setting that Transformers adds.
INCIDENTAL_PREFIXES = ("logging_", "log_", "save_", "hub_", "push_", "eval_", "trackio_", "dataloader_", "ddp_", "do_")
INCIDENTAL = set(
    "output_dir report_to run_name project disable_tqdm include_num_input_tokens_seen skip_memory_metrics debug "
    "per_device_eval_batch_size prediction_loss_only include_for_metrics batch_eval_metrics bf16_full_eval "
    "fp16_full_eval use_cpu local_rank fsdp fsdp_config deepspeed parallelism_config resume_from_checkpoint "
    "torch_compile torch_compile_backend torch_compile_mode tf32 torch_empty_cache_steps enable_jit_checkpoint "
    "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs "
    "full_determinism use_cache label_names remove_unused_columns ignore_data_skip "
    "restore_callback_states_from_checkpoint average_tokens_across_devices metric_for_best_model greater_is_better "
    "peak_tflops".split()
)
# Settings that are stored even if they have their default, for readers of a checkpoint. Others are stored only if they
# differ from their default.
ALWAYS_STORED = set(
    "optim lr_scheduler_type lr_scheduler_kwargs optimizer schedule learning_rate warmup_steps max_steps weight_decay "
    "decay_norms_and_biases adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16 seed "
    "per_device_train_batch_size batch_sampler".split()
)


def check_inherited(arguments: TrainingArguments) -> None:
    """Check the settings that a recipe's arguments inherit from Transformers, before Transformers uses them.

    Raises:
        ValueError: naming the setting.
    """
    check_ranges(arguments, RANGES)
    # Transformers would only say "Your setup doesn't support bf16/gpu", and not which settings to change.
    if (arguments.bf16 or arguments.bf16_full_eval) and not arguments.use_cpu:
        if not is_torch_bf16_gpu_available() and not is_torch_xla_available():
            raise ValueError(
                "`bf16` is true, but no GPU here computes in bfloat16. On a CPU, give `--use_cpu true` "
                "for bfloat16, or `--bf16 false` for float32 (faster on a CPU without AVX512-BF16 or AMX)."
            )
    warmup = arguments.warmup_steps
    if warmup > 1 and warmup != int(warmup):
        # Transformers would round 1.5 down to 1 step.
        raise ValueError(
            f"`warmup_steps` is {warmup}; it must be a whole number of optimizer steps, or a share of all below 1."
        )
    if arguments.resume_from_checkpoint is not None:
        raise ValueError(
            f"`resume_from_checkpoint` is {arguments.resume_from_checkpoint!r}; leave it out: the same command with "
            "the same `output_dir` resumes from its newest complete checkpoint automatically."
        )


def check_fixed(arguments: TrainingArguments, fixed: dict) -> None:
    """Refuse settings of Transformers that would break what a recipe promises, and training without an end.

    Args:
        fixed: settings with the only value that the recipe allows, in addition to `FIXED`.

    Raises:
        ValueError: naming the setting.
    """
    # Checked again, since settings that were given as JSON text are dictionaries now.
    check_inherited(arguments)
    for name, value in (FIXED | fixed).items():
        if getattr(arguments, name) != value:
            raise ValueError(f"`{name}` is {getattr(arguments, name)!r}; this recipe needs {value!r}.")
    if not arguments.accelerator_config.use_seedable_sampler:
        raise ValueError(
            "`accelerator_config` sets `use_seedable_sampler` to false; leave it out: a resumed run would shuffle its "
            "rows differently, and would see some twice and others not at all."
        )
    if arguments.max_steps < 1:
        raise ValueError(f"`max_steps` is {arguments.max_steps}; it must be 1 or more, since the data are endless.")


def check_unused(arguments: TrainingArguments, base: type[TrainingArguments], unused: dict[str, str | None]) -> None:
    """Refuse settings that a recipe does not use, if they have been set.

    Args:
        base: the class that declares their defaults.
        unused: names of settings, each with the setting to use instead, if there is one.

    Raises:
        ValueError: naming the setting.
    """
    defaults = {field.name: field.default for field in fields(base)}
    for name, instead in unused.items():
        if getattr(arguments, name) != defaults[name]:
            advice = f"set `{instead}` instead" if instead else "leave it out"
            raise ValueError(f"`{name}` is {getattr(arguments, name)!r}, but this recipe does not use it: {advice}.")


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
        if isinstance(value, AcceleratorConfig):
            value, default = value.to_dict(), AcceleratorConfig().to_dict()
            # Transformers removes this key from the value when it sets up the device.
            value.pop("use_configured_state", None)
            default.pop("use_configured_state")
        if name in ALWAYS_STORED or value != default:
            settings[name] = value
    return json.loads(json.dumps(settings, default=str))

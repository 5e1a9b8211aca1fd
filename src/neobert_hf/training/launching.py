"""Start and end of a training: its output folder, the processes that were asked for, and a clean exit."""

import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator
from accelerate.utils import get_int_from_env
from transformers import TrainingArguments

from neobert_hf.common.files import Inputs, output_folder


# Set by torchrun, several MPIs and `srun`. Slurm counts tasks, of which there may be fewer than processes, never more.
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def training_folder(
    arguments: TrainingArguments, recipe: str, writes: Iterable[str], inputs: Inputs
) -> AbstractContextManager:
    """The `output_dir` of a training, which the first process locks for all processes; see `output_folder`.

    Args:
        writes: the names of what is written there besides checkpoints, the model and its log.
    """
    if arguments.process_index:
        return nullcontext()
    return output_folder(arguments.output_dir, recipe, ("model", "checkpoint-*", "log.json", *writes), inputs)


def check_alone(arguments: TrainingArguments) -> None:
    """Refuse several processes, for recipes that run in a single one."""
    if arguments.world_size > 1:
        raise ValueError(
            f"{arguments.world_size} processes were started, but this recipe runs in one: start it with `python`."
        )


def check_launch(accelerator: Accelerator) -> None:
    """Compare the running processes and engine with those that the launcher requested through environment variables.

    Accelerate silently drops FSDP on a CPU, and if it finds no GPU, it silently lets each of several processes train by
    itself. The results would show this only hours later.

    Raises:
        RuntimeError: if the number of processes or the engine is not the requested one.
    """
    processes = max(get_int_from_env([name], 1) for name in WORLD_SIZES)
    engine = None
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            engine = name
    running = accelerator.distributed_type.value
    running_engine = running if running in ("FSDP", "DEEPSPEED") else None
    if accelerator.num_processes != processes or engine != running_engine:
        raise RuntimeError(
            f"{processes} process(es) with {engine or 'plain data parallelism'} were requested, but this process runs "
            f"as one of {accelerator.num_processes} with {running}. Several CPU processes need ACCELERATE_USE_CPU=true "
            "and a config file with distributed_type MULTI_GPU (configs/accelerate/cpu_ddp.yaml); FSDP and DeepSpeed "
            "need a GPU."
        )


def end_processes(accelerator: Accelerator, code: int = 0) -> None:
    """End the processes of a finished run. Returns only if there is no other process to end and `code` is 0."""
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        # Gloo's threads abort one exit in ten ("terminate called without an active exception", torch 2.13), and then
        # the launcher would report a finished run as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)

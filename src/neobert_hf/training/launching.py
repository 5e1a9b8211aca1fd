"""The beginning and the end of a run of several processes: are they those that were asked for, and a clean exit."""

import logging
import os
import sys
from argparse import Namespace

import psutil
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.utils import get_int_from_env


# Set by torchrun, MPI and `srun` respectively. Slurm counts tasks, which may be fewer than processes, never more.
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def asked_of_accelerate() -> Namespace | None:
    """The settings of the `accelerate launch` that started this process, or None without one."""
    for process in psutil.Process().parents():
        try:
            words, folder = process.cmdline(), process.cwd()
        except psutil.Error:  # the process of another user, or one that has ended
            continue
        names = [os.path.basename(word) for word in words[:4]]
        if {"accelerate", "accelerate_cli.py", "accelerate.commands.accelerate_cli"} & set(names) and "launch" in names:
            words = words[names.index("launch") + 1 :]
        elif {"accelerate-launch", "accelerate.commands.launch"} & set(names) or words[1:2] == [launch.__file__]:
            words = words[2 + ("-m" in words[1:2]) :]
        else:
            continue
        asked = launch.launch_command_parser().parse_args(words)
        if asked.config_file is not None:
            asked.config_file = os.path.join(folder, asked.config_file)
        launch.logger.setLevel(logging.ERROR)  # the launcher has already listed its defaults
        return launch._validate_launch_command(asked)[0]
    return None


def check_launch(accelerator: Accelerator) -> None:
    """Compare with what the environment and the launcher's command line ask for; about 10 ms.

    `accelerate launch` starts one process where several CPU processes are asked for, drops FSDP on a CPU, and leaves
    each of several processes alone if it finds no GPU: all without a word, hours before the results show it.

    Raises:
        RuntimeError: if the number of processes or the engine is another one.
    """
    asked = asked_of_accelerate()
    processes = max(get_int_from_env([name], 1) for name in WORLD_SIZES)
    engines = {name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"}
    if asked is not None:
        processes = max(processes, asked.num_processes or 1)
        engines |= {name for name in ("FSDP", "DEEPSPEED") if getattr(asked, f"use_{name.lower()}")}
    engine = engines.pop() if engines else None
    running = accelerator.distributed_type.value
    if accelerator.num_processes != processes or engine != (running if running in ("FSDP", "DEEPSPEED") else None):
        raise RuntimeError(
            f"{processes} process(es) with {engine or 'plain data parallelism'} were asked for, but this process runs "
            f"as one of {accelerator.num_processes} with {running}. Several CPU processes need ACCELERATE_USE_CPU=true "
            "and a file of distributed_type MULTI_GPU (configs/accelerate/cpu_ddp.yaml); FSDP and DeepSpeed need a GPU."
        )


def leave(accelerator: Accelerator, code: int = 0) -> None:
    """End the processes of a run whose work is done; returns only where there is nothing to end and `code` is 0."""
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        # Gloo's threads abort one exit in ten ("terminate called without an active exception", torch 2.13), and the
        # launcher would report a finished run as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)

"""Small runs of the pretraining scripts for their tests: in this process, or in one or several of their own.

A process that imports torch and transformers takes 8 s of CPU, a small run 1 to 2 s. So processes are forked here from
a server that has imported everything once, with the environment that `accelerate launch` would give them.
"""

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  Here and below: what scripts import while they run, 1 to 2 s each.
import pytest
import pytorch_optimizer  # noqa: F401
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

import neobert_hf_cli
from neobert_hf.common.fingerprints import file_checksum
from neobert_hf.training import trainer as training
from neobert_hf.training.run import COMPLETE, complete_checkpoints, step_of
from tests.helpers.examples import command_of, load_example, to_flags
from tests.helpers.models import ROOT


CONFIGS = ROOT / "configs" / "accelerate"
pretrain = load_example("pretrain")
# For the server that processes are forked from.
for script in ("run_classification",):
    load_example(script)


# Mixture and dropout, so that a resume has to restore every source of randomness.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "dropout": 0.1,
    "decoder_init_range": 0.2,
    "embedding_init_range": 1.0,
    "max_length": 64,
    "micro_batch_tokens": 256,
    "global_batch_tokens": 1024,
    "min_lengths": "0 60",
    "probabilities": "0.5 0.5",
    "shuffle_shards": 2,
    "max_steps": 12,
    "warmup_steps": 2,
    "seed": 0,
    "learning_rate": 5e-3,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_steps": 3,
    "report_to": "none",
}


def small_flags(prepared: Path, output_dir: Path, **changes) -> list[str]:
    """The command line of a small run on the folder of the fixture `prepared`."""
    return to_flags({"output_dir": output_dir, "train_data": prepared / "train"} | SMALL | changes)


def run(flags: list[str]) -> list[dict]:
    """Train in this process and return the log."""
    pretrain.main(flags)
    return json.loads((Path(flags[1]) / "log.json").read_text())


def launched_environments(config: str, processes: int, *options: str) -> list[dict[str, str]]:
    """What `accelerate launch --config_file configs/accelerate/<config>` puts into the environment of each process.

    Nothing is compiled unless the options of the launcher say so: generating code takes a minute.
    """
    options = options or ("--dynamo_backend", "no")
    flags = ["--config_file", str(CONFIGS / config), "--num_processes", str(processes), *options]
    arguments = launch_command_parser().parse_args([*flags, "--main_process_port", "0", "script.py"])
    settings = _validate_launch_command(arguments)[0]
    environment = prepare_multi_gpu_env(settings)
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(settings.main_process_port)}
    environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true"}
    return [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


class ScriptProcesses:
    """Processes of one script that work together; what they print goes to one file, as long as this lives.

    Args:
        flags: of the script.
        environments: of each process.
        script: the name of one in examples/, or a function with its flags as argument.
    """

    def __init__(self, flags: list[str], environments: list[dict[str, str]], script: str | Callable = "pretrain"):
        self.log = tempfile.NamedTemporaryFile(suffix=".log")
        context = multiprocessing.get_context("forkserver")
        # No test may start another server before.
        context.set_forkserver_preload([__name__])
        self.processes = [
            context.Process(target=_run_script, args=(flags, environment, self.log.name, script))
            for environment in environments
        ]
        for process in self.processes:
            process.start()

    @property
    def output(self) -> str:
        return Path(self.log.name).read_text()

    def check_running(self) -> None:
        """Wait a moment, in a loop that waits for something that a running process does."""
        time.sleep(0.02)
        assert all(process.is_alive() for process in self.processes), self.output[-4000:]

    def signal(self, number: int) -> None:
        """To each process with its loader workers, as a launcher does."""
        for process in self.processes:
            os.killpg(process.pid, number)

    def end(self) -> list[int]:
        """Wait for the end and return the exit codes."""
        for process in self.processes:
            process.join(timeout=1500)
            assert process.exitcode is not None, self.output[-4000:]
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.end()

    def finish(self) -> str:
        """Wait for an end without an error and return what was printed."""
        assert set(self.end()) == {0}, self.output[-4000:]
        return self.output


def _run_script(flags: list[str], environment: dict[str, str], log: str, script: str | Callable) -> None:
    os.setsid()
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    # As in a script of one's own: this process has taken over the server's method, with which every loader worker would
    # import everything anew (8 s of CPU) and come from another server, which a signal to the group ends.
    multiprocessing.set_start_method("fork", force=True)
    if isinstance(script, str):
        neobert_hf_cli.run(command_of(script), flags)
    else:
        script(flags)


def start(flags: list[str], **options) -> ScriptProcesses:
    """Run a script, to train if it is not named, in a process of its own."""
    return ScriptProcesses(flags, [{}], **options)


def interrupted_copy(whole: Path, folder: Path, after: int) -> None:
    """A copy of a run as if it had been interrupted at this step."""
    shutil.copytree(whole, folder)
    for checkpoint in complete_checkpoints(folder):
        if step_of(checkpoint) > after:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "model")


@contextmanager
def interrupted_behind(checkpoint: str) -> Iterator[None]:
    """A run in this process, inside, is interrupted as soon as it has this checkpoint."""

    def stop(folder, keep, best):
        if (folder / checkpoint / COMPLETE).is_file():
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "delete_old", stop)
        yield


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    """Of all modules of the models that two runs left, to the bit."""
    found, expected = (
        {str(file.relative_to(folder)): file_checksum(file) for file in folder.glob("model/**/*.safetensors")}
        for folder in (first, second)
    )
    assert found == expected != {}

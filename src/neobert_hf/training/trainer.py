"""What all training recipes add to the Trainer: complete checkpoints, a clean stop on Ctrl-C, only finite weights."""

import atexit
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_model
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging

from neobert_hf.common.files import partial_folder, remove, replace_folder, saying_if_full
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.training.compiling import SayCompiling
from neobert_hf.training.run import (
    Run,
    check_engine,
    complete_checkpoints,
    delete_checkpoint,
    delete_old,
    mark_complete,
    read_progress,
    step_of,
)


# Endings of the metrics by which recipes choose the best weights, for the line of an evaluation.
CHOSEN_BY = ("score", "cosine", "ndcg@10", "spearman_cosine", "spearman", "loss")
# Endings of the names of timings, which the Trainer logs.
TIMINGS = ("runtime", "_per_second", "_preparation_time")


def is_measured(name: str) -> bool:
    """Whether a value of the log is a loss or a metric of an evaluation."""
    return name == "loss" or (name.startswith("eval_") and not name.endswith(TIMINGS))


class StopOnSignal(TrainerCallback):
    """On Ctrl-C (SIGINT) and SIGTERM, saves and stops after the current step, which is the same for all processes."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer
        self.received = 0
        self.previous = {}

    def on_train_begin(self, args, state, control, **kwargs):
        # Python handles signals in the main thread only; a notebook's server may train in another.
        if threading.current_thread() is not threading.main_thread():
            return
        self.previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}

    def _receive(self, number, frame):
        self.received = number

    def restore(self) -> None:
        """Also after an error: other processes may then wait for this one until a signal ends them."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def on_step_end(self, args, state, control, **kwargs):
        received = self.received
        if args.world_size > 1:
            flag = torch.tensor(float(received), device=args.device)
            received = int(self.trainer.accelerator.gather(flag[None]).max())
        if received and state.global_step < state.max_steps:
            self.trainer.stopped_by = signal.Signals(received)
            control.should_save = control.should_training_stop = True


class Stopped(KeyboardInterrupt):
    """Training was ended by Ctrl-C or SIGTERM, and a checkpoint was saved: the same call goes on from there."""

    def __init__(self, number: signal.Signals, step: int, advice: str):
        super().__init__(f"Stopped by {number.name} after step {step:,}. {advice}")
        self.signal = number


@cache
def _look_after_workers() -> None:
    """Once in a process that trains: a data loader's workers end with it, and leave its signals to it."""
    os.register_at_fork(after_in_child=_leave_signals_to_the_parent)
    atexit.register(_end_workers)


def _leave_signals_to_the_parent() -> None:
    """In a data loader's worker: launchers signal all processes, and a worker that dies ends training at once.

    Signals are blocked, and not ignored, since torch sets a handler of its own in each worker.
    """
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopOnSignal):
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _end_workers() -> None:
    """After an error that nobody caught, Python would wait for workers that it has ended by the blocked signal."""
    # At the end of a worker, torch's handler of this signal would raise an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping without the warning that the best weights are not loaded, since `load_best` loads them."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass


class Bar(ProgressCallback):
    """Transformers' progress bar with the time left, without a dictionary of 15 numbers for each evaluation."""

    def on_log(self, args, state, control, **kwargs):
        pass


class GoOnWithLog(TrainerCallback):
    """The first log after a resume is that of an uninterrupted run; see `ResumableTrainer.since_log`."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        checkpoint = self.trainer.run.checkpoint
        if checkpoint is not None and (measured := read_progress(checkpoint).since_log):
            self.trainer.go_on_since_log(measured)


class ShortLogs(TrainerCallback):
    """One short line for each log, with the time left.

    Of an evaluation it has what the recipe chooses by, or else the loss; all metrics are in `log.json`.
    """

    def __init__(self):
        # A finished run may be evaluated without being trained.
        self.began, self.first_step = time.monotonic(), 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.first_step = time.monotonic(), state.global_step
        if (warmup := args.get_warmup_steps(state.max_steps)) > state.max_steps and state.is_world_process_zero:
            tqdm.write(
                f"note: `warmup_steps` is {warmup:,} and the training has {state.max_steps:,}: its rate rises to "
                f"{state.max_steps / warmup:.2g} of `learning_rate` at most, so little is learned."
            )

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs):
        if not state.is_world_process_zero:
            return
        values = {name: value for name, value in logs.items() if isinstance(value, float) and name != "epoch"}
        if evaluated := [name for name in values if name.startswith("eval_")]:
            chosen = [name for end in CHOSEN_BY for name in evaluated if name.endswith(end)]
            values = {name: values[name] for name in chosen[:1] or evaluated[:1]}
        done = state.global_step - self.first_step
        seconds = (time.monotonic() - self.began) / done * (state.max_steps - state.global_step) if done else 0
        left = f", {timedelta(seconds=round(seconds))} left" if seconds else ""
        found = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        tqdm.write(f"   step {state.global_step:,} of {state.max_steps:,}{left}: {found}")


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without "Writing model shards" between the scores."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class ResumableTrainer(Trainer):
    """A Trainer that uses only complete checkpoints; see `run.py`.

    Args:
        run: its identity is stored in checkpoints, and training goes on from its checkpoint.

    Attributes:
        stopped_by: the signal that ended training before `max_steps`, if one did.
        engine: the engine that sets the format of weights and optimizer in a checkpoint: `plain` (one process, DDP),
            `FSDP` or `DeepSpeed`.

    Raises:
        FloatingPointError: if loss or weights are not finite. Such weights are not saved.
    """

    def __init__(self, *args, run: Run, **kwargs):
        self.run = run
        self.stopped_by: signal.Signals | None = None
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"One process sees {self.args.n_gpu} GPUs: set CUDA_VISIBLE_DEVICES=0 to use one of them, or start one "
                "process for each with `accelerate launch`."
            )
        # The Trainer's own rotation would delete old checkpoints before the new one is complete, and with a limit of 1
        # it would delete the newest at the end of training, to keep the best.
        self.keep, self.args.save_total_limit = self.args.save_total_limit, None
        # Transformers compares these with the numbers of steps in a checkpoint: a share would seem to be another.
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if (share := getattr(self.args, name) or 1) < 1 and self.args.max_steps > 0:
                setattr(self.args, name, math.ceil(share * self.args.max_steps))
        self.engine = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else "plain"
        self.stop_on_signal = StopOnSignal(self)
        self.add_callback(self.stop_on_signal)
        self.add_callback(SayCompiling(self.accelerator.state.dynamo_plugin))
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        if not self.args.disable_tqdm:
            self.add_callback(Bar())
        self.add_callback(ShortLogs())
        self.add_callback(GoOnWithLog(self))

    def cursor(self) -> dict:
        """The position in the training data; empty for recipes that let the Trainer skip the rows already seen."""
        return {}

    def since_log(self) -> dict[str, Any]:
        """What was measured since the last log, as JSON can hold it: a checkpoint need not follow a log."""
        loss = self.accelerator.reduce(self._tr_loss.clone(), "mean").item()
        return {"loss": loss, "step": self._globalstep_last_logged}

    def go_on_since_log(self, measured: dict[str, Any]) -> None:
        """Continue from what `since_log` returned."""
        self._tr_loss += measured["loss"]
        self._globalstep_last_logged = measured["step"]

    def measured(self) -> list[dict[str, Any]]:
        """Losses and evaluations of the whole run, without the times of its parts."""
        entries = [entry for entry in self.state.log_history if any(is_measured(name) for name in entry)]
        # Sorted, since entries that were read from a checkpoint are: a run that was interrupted has the same log.
        return [
            {name: value for name, value in sorted(entry.items()) if not name.endswith(TIMINGS)} for entry in entries
        ]

    def train_to_the_end(self) -> None:
        """Train to the end, from the run's checkpoint or the start.

        If the checkpoint is the last of a finished training, only its weights and its log are loaded.

        Raises:
            CheckpointError: if another engine wrote the checkpoint.
            Stopped: after Ctrl-C or SIGTERM, when a checkpoint is saved.
        """
        _look_after_workers()
        resume = self.run.checkpoint
        if resume is not None and self.is_finished(resume):
            self._load_finished(resume)
            if self.is_world_process_zero():
                # The run may have been killed while it did so.
                delete_old(self.run.folder, self.keep, self.state.best_global_step)
            return
        if resume is not None:
            check_engine(resume, self.engine)
            # The run was evaluated at its start. Another evaluation would count as one without a better score.
            self.args.eval_on_start = False
        try:
            self.train(resume_from_checkpoint=str(resume) if resume else None)
        finally:
            self.stop_on_signal.restore()
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by, self.state.global_step, self.advice())

    def _load_finished(self, checkpoint: Path) -> None:
        if self.engine != "plain":
            raise RuntimeError(
                "Training is finished. Run the command once more with a single process to write "
                f"{self.run.folder / 'model'}."
            )
        if read_progress(checkpoint).engine == "FSDP":
            # Transformers reads such a checkpoint only under FSDP; it holds the whole model as well.
            load_model(self.model, checkpoint / "model.safetensors")
        else:
            self._load_from_checkpoint(str(checkpoint))
        self.model.to(self.args.device)
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def is_finished(self, checkpoint: Path) -> bool:
        """Whether training ended with this checkpoint, by `max_steps` or by early stopping.

        A run that stopped early must not go on: a further evaluation might be better.
        """
        return step_of(checkpoint) == self.args.max_steps or read_progress(checkpoint).stopped_early

    def training_step(self, model, *args, **kwargs):
        # A compiled model shares its layers with this one, but is another module; losses and logs look at this one.
        self.model.train()
        return super().training_step(model, *args, **kwargs)

    def save_whole(self, folder: Path) -> None:
        """Write the model to a temporary folder and rename it, so that `folder` never holds an incomplete model."""
        if self.is_fsdp_enabled:
            # With sharded checkpoints, `save_model` would silently write nothing.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        # All processes must use the same folder.
        (partial,) = map(Path, broadcast_object_list([str(partial_folder(folder))]))
        try:
            with _no_bars(), saying_if_full(folder):
                self.save_model(str(partial))
        except OSError:
            remove(partial)
            raise
        if self.is_world_process_zero():
            (partial / "training_args.bin").unlink(missing_ok=True)
            replace_folder(partial, folder)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # A processor holds a tokenizer; otherwise it is one itself.
        clear_truncation(getattr(self.processing_class, "tokenizer", self.processing_class))
        super()._save(output_dir, state_dict)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(f"The loss is {logs['loss']} at step {self.state.global_step}. {self.advice()}")
        # Transformers divides the losses since the last resume by all steps.
        logs.pop("train_loss", None)
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        step = self.state.global_step
        if not self._all_finite(model):
            raise FloatingPointError(f"Loss or weights are not finite after step {step}. {self.advice()}")
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        if self.is_world_process_zero() and folder.exists():
            # An earlier run was interrupted while it saved this step.
            delete_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        try:
            with _no_bars(), saying_if_full(folder):
                super()._save_checkpoint(model, trial)
        except OSError:
            # Half a checkpoint is of no use, and would leave no room for the next attempt.
            remove(folder)
            raise
        self.accelerator.wait_for_everyone()
        since_log = self.since_log()
        if self.is_world_process_zero():
            stops = self.control.should_training_stop and self.stopped_by is None
            stopped_early = stops and step < self.args.max_steps
            others = {"stopped_early": stopped_early, "since_log": since_log}
            mark_complete(folder, self.engine, self.run.identity, self.cursor(), **others)
            delete_old(folder.parent, self.keep, self.state.best_global_step)

    def _all_finite(self, model) -> bool:
        """Whether loss and weights are finite on all processes. Engines that shard weights check each its own part."""
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
        finite = torch.stack([tensor.detach().isfinite().all() for tensor in (self._tr_loss, *weights)]).all()
        return self.accelerator.reduce((~finite).float(), "sum").item() == 0

    def advice(self) -> str:
        """The checkpoint from which the run can be resumed, for the message that ends it."""
        complete = complete_checkpoints(Path(self.args.output_dir))
        if not complete:
            return "There is no earlier checkpoint."
        return f"{complete[-1]} is complete: the same command goes on from there."


def end_processes(code: int = 0) -> None:
    """End one of several processes, together with the others."""
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
    if state.device.type == "cpu":
        # Gloo's threads abort one exit in ten ("terminate called without an active exception", torch 2.13), and then
        # the launcher would report a finished run as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

"""What all training recipes add to the Trainer: complete checkpoints, a clean stop on Ctrl-C, only finite weights."""

import atexit
import math
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_model
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback

from neobert_hf.common.files import partial_folder, replace_folder
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.training.compiling import SayCompiling
from neobert_hf.training.run_checkpoints import (
    Progress,
    check_engine,
    complete_checkpoints,
    delete_checkpoint,
    delete_old,
    mark_complete,
    read_progress,
    step_of,
)


class StopOnSignal(TrainerCallback):
    """On Ctrl-C (SIGINT) and SIGTERM, saves and stops after the current step, which is the same for all processes."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer
        self.received = 0
        self.previous = {}

    def on_train_begin(self, args, state, control, **kwargs):
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


def _leave_signals_to_the_parent() -> None:
    """In a data loader's worker: launchers signal all processes, and a worker that dies ends training at once.

    Signals are blocked, and not ignored, since torch sets a handler of its own in each worker.
    """
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopOnSignal):
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


@atexit.register
def _end_workers() -> None:
    """After an error that nobody caught, Python would wait for workers that it has ended by the blocked signal."""
    # At the end of a worker, torch's handler of this signal would raise an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


os.register_at_fork(after_in_child=_leave_signals_to_the_parent)


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping without the warning that the best weights are not loaded, since `load_best` loads them."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass


class PrintLogs(TrainerCallback):
    """Where there is no progress bar, prints each log as one readable line with its step."""

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs):
        if state.is_world_process_zero:
            values = [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float)]
            print(f"   step {state.global_step:,} of {state.max_steps:,}: {', '.join(values)}", flush=True)


class ResumableTrainer(Trainer):
    """A Trainer that uses only complete checkpoints; see `run_checkpoints.py`.

    Attributes:
        run_settings: every setting that the result depends on, stored in checkpoints and compared on resume.
        stopped_by: the signal that ended training before `max_steps`, if one did.
        engine: the engine that sets the format of weights and optimizer in a checkpoint: `plain` (one process, DDP),
            `FSDP` or `DeepSpeed`.

    Raises:
        FloatingPointError: if loss or weights are not finite. Such weights are not saved.
    """

    def __init__(self, *args, settings: dict, **kwargs):
        self.run_settings = settings
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
        self.engine = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else "plain"
        self.stop_on_signal = StopOnSignal(self)
        self.add_callback(self.stop_on_signal)
        self.add_callback(SayCompiling(self.accelerator.state.dynamo_plugin))
        if self.args.disable_tqdm:
            self.remove_callback(PrinterCallback)
            self.add_callback(PrintLogs())

    def cursor(self) -> dict:
        """The position in the training data; empty for recipes that let the Trainer skip the rows already seen."""
        return {}

    def train_to_the_end(self, resume: Path | None) -> None:
        """Train to the end, from a checkpoint or the start. Ctrl-C and SIGTERM save, and end the process.

        If the checkpoint is the last of a finished training, only its weights and its log are loaded.

        Raises:
            CheckpointError: if another engine wrote the checkpoint.
        """
        if resume is not None and self.is_finished(resume):
            if self.engine != "plain":
                sys.exit(
                    "Training is finished. Run the command once more with a single process to write "
                    f"{Path(self.args.output_dir) / 'model'}."
                )
            if read_progress(resume).engine == "FSDP":
                # Transformers reads such a checkpoint only under FSDP; it holds the whole model as well.
                load_model(self.model, resume / "model.safetensors")
            else:
                self._load_from_checkpoint(str(resume))
            self.model.to(self.args.device)
            self.state = TrainerState.load_from_json(str(resume / "trainer_state.json"))
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
            name, step = self.stopped_by.name, self.state.global_step
            print(f"Stopped by {name} after step {step:,}. {self.advice()}", flush=True)
            end_processes(self.accelerator, 128 + self.stopped_by)

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
        self.save_model(str(partial))
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
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            stops = self.control.should_training_stop and self.stopped_by is None
            stopped_early = stops and step < self.args.max_steps
            mark_complete(folder, Progress(self.engine, self.run_settings, self.cursor(), stopped_early))
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

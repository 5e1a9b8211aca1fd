"""What all training recipes add to the Trainer: complete checkpoints, a clean stop on SIGTERM, only finite weights."""

import math
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import DynamoBackend, broadcast_object_list
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from neobert_hf.common.atomic_writes import partial_folder, replace_folder
from neobert_hf.training.launching import end_processes
from neobert_hf.training.run_checkpoints import (
    CheckpointError,
    Progress,
    check_engine,
    complete_checkpoints,
    delete_checkpoint,
    delete_old,
    mark_complete,
    read_progress,
    step_of,
)


class Diverged(SystemExit):
    """Loss, weights or scores are not finite. Ends the process with its message, unless a recipe catches it."""


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, saves and stops after the current step; all processes stop after the same step."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer
        self.received = False

    def on_train_begin(self, args, state, control, **kwargs):
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, signum, frame):
        self.received = True

    def on_step_end(self, args, state, control, **kwargs):
        received = self.received
        if args.world_size > 1:
            flag = torch.tensor(float(received), device=args.device)
            received = self.trainer.accelerator.reduce(flag, "sum").item() > 0
        if received and state.global_step < state.max_steps:
            self.trainer.stopped = True
            control.should_save = control.should_training_stop = True


class GoOn(TrainerCallback):
    """Restores from a checkpoint what the Trainer does not restore, once the Trainer has loaded the rest."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        resume = self.trainer.resume
        expected = 0 if resume is None else step_of(resume)
        if state.global_step != expected:
            # If the Trainer does not find the state of a run, it silently starts from the beginning.
            start = "a new run" if resume is None else str(resume)
            raise CheckpointError(f"Training is at step {state.global_step}, but {start} is at step {expected}.")
        if resume is not None:
            self.trainer.take_over(read_progress(resume).totals)


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping without the warning that the best weights are not loaded, since `load_best` loads them."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass


class PrintLogs(TrainerCallback):
    """Prints each log as one readable line. A progress bar would fill a log file with thousands of lines."""

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs):
        if state.is_world_process_zero:
            values = [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float)]
            print(f"   step {state.global_step:,} of {state.max_steps:,}: {', '.join(values)}", flush=True)


def ignore_sigterm(worker: int, start: Callable[[int], None] | None = None) -> None:
    """Let data loader workers ignore SIGTERM.

    Launchers signal whole process groups, and a worker that dies ends training at once.

    Args:
        start: what else a worker does when it starts, such as seeding its random numbers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start is not None:
        start(worker)


def compile_models(model: nn.Module, arguments: TrainingArguments) -> None:
    """Let each Transformers model inside `model` compile itself, with the settings of `torch_compile`.

    NeoBERT compiles its blocks only, and still strips padding before them. Accelerate would compile the whole model at
    once, which then computes the padding as well.
    """
    options = {"backend": arguments.torch_compile_backend, "mode": arguments.torch_compile_mode}
    inside = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            module.compile(**{name: value for name, value in options.items() if value is not None})
            inside |= set(module.modules())


class ResumableTrainer(Trainer):
    """A Trainer that uses only complete checkpoints; see `run_checkpoints.py`.

    Attributes:
        run_settings: every setting that the result depends on, stored in checkpoints and compared on resume.
        resume: the checkpoint that training resumes from.
        stopped: whether SIGTERM ended training before `max_steps`.
        engine: the engine that sets the format of weights and optimizer in a checkpoint: `plain` (one process, DDP),
            `FSDP` or `DeepSpeed`.

    Raises:
        CheckpointError: if a checkpoint cannot be written. Earlier checkpoints stay usable.
        FloatingPointError: if loss or weights are not finite. Such weights are not saved.
    """

    def __init__(self, *args, settings: dict, **kwargs):
        self.run_settings = settings
        self.resume: Path | None = None
        self.stopped = False
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(f"One process sees {self.args.n_gpu} GPUs: use `accelerate launch`, one process per GPU.")
        wanted = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "no"
        if (found := self.accelerator.mixed_precision) != wanted:
            raise ValueError(
                f"Accelerate was launched with the precision {found!r}, but the settings of this run say {wanted!r}: "
                f"give `--mixed_precision {wanted}` to `accelerate launch`, or change `bf16` or `fp16`."
            )
        # Data loaders prepared by Accelerate move batches to the device themselves; for others see `_prepare_input`.
        self.accelerator.dataloader_config.non_blocking = self.args.dataloader_pin_memory
        if self.args.torch_compile:
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
            compile_models(self.model, self.args)
        # The Trainer's own rotation would delete old checkpoints before the new one is complete, and with a limit of 1
        # it would delete the newest at the end of training, to keep the best.
        self.keep, self.args.save_total_limit = self.args.save_total_limit, None
        self.engine = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else "plain"
        self.add_callback(StopOnSigterm(self))
        self.add_callback(GoOn(self))
        if not sys.stderr.isatty():
            self.remove_callback(ProgressCallback)
            self.remove_callback(PrinterCallback)
            self.add_callback(PrintLogs())

    def get_train_dataloader(self) -> DataLoader:
        return self._shielded(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        return self._shielded(super().get_eval_dataloader(eval_dataset))

    @staticmethod
    def _shielded(loader: DataLoader) -> DataLoader:
        # Accelerate wraps the loader that starts the workers.
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(ignore_sigterm, start=inner.worker_init_fn)
        return loader

    def _prepare_input(self, data):
        if isinstance(data, torch.Tensor) and not self.is_deepspeed_enabled:
            # Copies from pinned memory while the GPU still computes. The method of Transformers waits for the copy.
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def cursor(self) -> dict:
        """The position in the training data; empty for recipes that let the Trainer skip the rows already seen."""
        return {}

    def totals(self) -> dict:
        """Sums over past steps and all processes that the next logged numbers include."""
        return {
            "logged_step": self._globalstep_last_logged,
            # The loss of the steps since the logged step, and of those before it.
            "loss": self.mean_over_processes(self._tr_loss),
            "logged_loss": self._total_loss_scalar,
        }

    def mean_over_processes(self, value: torch.Tensor) -> float:
        return self.accelerator.reduce(value.detach().float(), "mean").item()

    def take_over(self, totals: dict) -> None:
        """Continue the sums of the checkpoint."""
        self._globalstep_last_logged = totals["logged_step"]
        self._tr_loss += totals["loss"]
        self._total_loss_scalar = totals["logged_loss"]

    def train(self, *args, **kwargs):
        previous = signal.getsignal(signal.SIGTERM)
        try:
            return super().train(*args, **kwargs)
        finally:
            # Restored also after an error: other processes may then wait for this one until a signal ends them.
            signal.signal(signal.SIGTERM, previous)

    def train_to_the_end(self, resume: Path | None) -> None:
        """Train to the end, from a checkpoint or the start. Errors and SIGTERM end the process with a message.

        If the checkpoint is the last of a finished training, only its log is loaded, for the steps after training.

        Raises:
            CheckpointError: if another engine wrote the checkpoint.
        """
        if resume is not None and self.is_finished(resume):
            if self.engine != "plain":
                sys.exit(
                    "Training is finished. Run the command once more with a single process to write "
                    f"{Path(self.args.output_dir) / 'model'}."
                )
            self.state = TrainerState.load_from_json(str(resume / "trainer_state.json"))
            return
        if resume is not None:
            check_engine(resume, read_progress(resume), self.engine)
            # The run was evaluated at its start. Another evaluation would count as one without a better score.
            self.args.eval_on_start = False
        self.resume = resume
        try:
            self.train(resume_from_checkpoint=str(resume) if resume else None)
        except CheckpointError as error:
            sys.exit(str(error))
        except FloatingPointError as error:
            raise Diverged(f"{error} {self.advice()}") from error
        if self.stopped:
            print(f"Stopped by SIGTERM after step {self.state.global_step}. {self.advice()}", flush=True)
            end_processes(self.accelerator, 143)

    def is_finished(self, checkpoint: Path) -> bool:
        """Whether training ended with this checkpoint, by `max_steps` or by early stopping.

        A run that stopped early must not go on: a further evaluation might be better.
        """
        callbacks = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).stateful_callbacks
        waited = callbacks.get(EarlyStopping.__name__)
        stopped = waited is not None and (
            waited["attributes"]["early_stopping_patience_counter"] >= waited["args"]["early_stopping_patience"]
        )
        return stopped or step_of(checkpoint) == self.args.max_steps

    @property
    def best_checkpoint(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"

    def load_best(self) -> None:
        """Load the weights of the best evaluation into the model."""
        self._load_from_checkpoint(str(self.best_checkpoint))
        self.model.to(self.args.device)

    def _issue_warnings_after_load(self, load_result) -> None:
        # Checkpoints store tied weights only once. Transformers would warn that the second name is missing.
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(f"The loss is {logs['loss']} at step {self.state.global_step}.")
        if logs.pop("train_loss", None) is not None:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        step = self.state.global_step
        if not self._all_finite(model):
            raise FloatingPointError(f"Loss or weights are not finite after step {step}.")
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        totals = self.totals()
        try:
            if self.is_world_process_zero() and folder.exists():
                # An earlier run was interrupted while it saved this step.
                delete_checkpoint(folder)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                mark_complete(folder, Progress(self.engine, self.run_settings, self.cursor(), totals))
                delete_old(folder.parent, self.keep, self.state.best_global_step)
        except (OSError, RuntimeError, SafetensorError) as error:
            free = shutil.disk_usage(self.args.output_dir).free
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written ({error}); {free:,} bytes are free. "
                f"{self.advice()}"
            ) from error

    def _all_finite(self, model) -> bool:
        """Whether loss and weights are finite on all processes. Engines that shard weights check each its own part."""
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
        finite = torch.stack([tensor.detach().isfinite().all() for tensor in (self._tr_loss, *weights)]).all()
        return self.accelerator.reduce((~finite).float(), "sum").item() == 0

    def advice(self) -> str:
        """The checkpoint from which the run can be resumed, for the message that ends it."""
        complete = complete_checkpoints(Path(self.args.output_dir))
        # Checkpoints of later steps are damaged, or this run would have resumed from them.
        complete = [folder for folder in complete if step_of(folder) <= self.state.global_step]
        if not complete:
            return "There is no earlier checkpoint."
        return f"{complete[-1]} is complete: the same command resumes from there."

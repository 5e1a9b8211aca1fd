"""What every training recipe here adds to a Trainer: whole checkpoints, SIGTERM, and no weights that are not finite."""

import math
import shutil
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from accelerate.utils import DynamoBackend, broadcast_object_list
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
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
    add_checksums,
    check_content,
    check_engine,
    complete_checkpoints,
    delete_checkpoint,
    delete_old,
    mark_complete,
    read_progress,
    step_of,
)


class Diverged(SystemExit):
    """Loss, weights or scores are not finite. Ends the process with its message, unless a recipe goes on."""


class StopOnSigterm(TrainerCallback):
    """SIGTERM saves and stops after the current step, on all processes after the same one."""

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
    """Takes over from a checkpoint what the Trainer does not, once it has loaded the rest."""

    def __init__(self, trainer: "ResumableTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        resume = self.trainer.resume
        expected = 0 if resume is None else step_of(resume)
        if state.global_step != expected:
            # The Trainer starts anew, without a word, where it does not find the state of a run.
            raise CheckpointError(f"Training is at step {state.global_step} and not at {expected}, that of {resume}.")
        if resume is not None:
            self.trainer.take_over(read_progress(resume).totals)


class EarlyStopping(EarlyStoppingCallback):
    """Without its warning that the best weights are not loaded: `load_best` takes them from their checkpoint."""

    def on_train_begin(self, args, state, control, **kwargs):
        pass


class PrintLogs(TrainerCallback):
    """Logs as one readable line each, where a progress bar would fill a file with thousands."""

    def on_log(self, args, state, control, logs: dict[str, float], **kwargs):
        if state.is_world_process_zero:
            values = [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float)]
            print(f"   step {state.global_step:,} of {state.max_steps:,}: {', '.join(values)}", flush=True)


def ignore_sigterm(worker: int) -> None:
    """Of loader workers: launchers signal whole process groups, and a worker that dies ends training at once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def compile_models(model: nn.Module, arguments: TrainingArguments) -> None:
    """Let each model of Transformers inside compile itself, as `torch_compile` and its settings say.

    NeoBERT compiles its blocks, and goes on to strip padding before them. Accelerate would compile everything at once,
    with the padding.
    """
    options = {"backend": arguments.torch_compile_backend, "mode": arguments.torch_compile_mode}
    inside = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            module.compile(**{name: value for name, value in options.items() if value is not None})
            inside |= set(module.modules())


class ResumableTrainer(Trainer):
    """A Trainer whose checkpoints are whole or not used; see `run_checkpoints.py`.

    Attributes:
        run_settings: every setting that the result depends on, stored in checkpoints and compared on resume.
        resume: the checkpoint that training goes on from.
        stopped: whether SIGTERM ended training before `max_steps`.
        engine: whose form weights and optimizer have in a checkpoint: `plain` (one process, DDP), `FSDP`, `DeepSpeed`.

    Raises:
        CheckpointError: when a checkpoint cannot be written. Those before it stay usable.
        FloatingPointError: when loss or weights are not finite, before such weights are saved.
    """

    def __init__(self, *args, settings: dict, **kwargs):
        self.run_settings = settings
        self.resume: Path | None = None
        self.stopped = False
        self.counts_all_steps = True
        # Reads what a checkpoint wrote while the next steps run.
        self.checksums = ThreadPoolExecutor(1)
        self.being_added: list[Future] = []
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise ValueError(f"One process sees {self.args.n_gpu} GPUs: use `accelerate launch`, one process for each.")
        wanted = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "no"
        if (found := self.accelerator.mixed_precision) != wanted:
            raise ValueError(
                f"Accelerate was launched for the precision {found!r}, and the settings of this run say {wanted!r}: "
                f"give `--mixed_precision {wanted}` to `accelerate launch`, or change `bf16` or `fp16`."
            )
        # Loaders that accelerate prepares move batches themselves; see `_prepare_input` for the others.
        self.accelerator.dataloader_config.non_blocking = self.args.dataloader_pin_memory
        if self.args.torch_compile:
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
            compile_models(self.model, self.args)
        # The Trainer's own rotation comes before the new checkpoint is whole, and with a limit of 1 it ends training by
        # deleting the newest for the best.
        self.keep, self.args.save_total_limit = self.args.save_total_limit, None
        self.engine = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else "plain"
        self.add_callback(StopOnSigterm(self))
        self.add_callback(GoOn(self))
        if not sys.stderr.isatty():
            self.remove_callback(ProgressCallback)
            self.remove_callback(PrinterCallback)
            self.add_callback(PrintLogs())

    def _prepare_input(self, data):
        if isinstance(data, torch.Tensor) and not self.is_deepspeed_enabled:
            # Out of pinned memory, while the GPU still computes; Transformers' own waits.
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def cursor(self) -> dict:
        """Where the data stand; of a recipe that lets the Trainer skip, nothing."""
        return {}

    def totals(self) -> dict:
        """Of the steps so far, over all processes, what the next logged numbers count beside the steps to come."""
        return {
            "logged_step": self._globalstep_last_logged,
            # Of the steps since that one, and of those before.
            "loss": self.mean_over_processes(self._tr_loss),
            "logged_loss": self._total_loss_scalar,
        }

    def mean_over_processes(self, value: torch.Tensor) -> float:
        return self.accelerator.reduce(value.detach().float(), "mean").item()

    def take_over(self, totals: dict) -> None:
        """Go on from `totals`, or from nothing, which checkpoints of before stored."""
        # A loss over the steps of this process alone is not that of the run.
        self.counts_all_steps = bool(totals)
        if totals:
            self._globalstep_last_logged = totals["logged_step"]
            self._tr_loss += totals["loss"]
            self._total_loss_scalar = totals["logged_loss"]

    def train(self, *args, **kwargs):
        previous = signal.getsignal(signal.SIGTERM)
        try:
            output = super().train(*args, **kwargs)
            self._finish_checksums()
            return output
        finally:
            # Also after an error, when other processes may wait for this one until a signal ends them.
            signal.signal(signal.SIGTERM, previous)
            wait(self.being_added)

    def _finish_checksums(self) -> None:
        """Wait until the last checkpoint has its checksums. CheckpointError if they cannot be written."""
        while self.being_added:
            try:
                self.being_added.pop().result()
            except OSError as error:
                raise CheckpointError(
                    f"The checksums of the last checkpoint could not be written ({error}), so that damage to it would "
                    f"not be noticed. {self.advice()}"
                ) from error

    def train_to_the_end(self, resume: Path | None) -> None:
        """Train to the end, from a checkpoint or the start. Errors and SIGTERM end the process with a message.

        Of a finished checkpoint only the log is taken: what is left to do follows training.

        Raises:
            CheckpointError: if another engine wrote the checkpoint.
        """
        if resume is not None and self.is_finished(resume):
            if self.engine != "plain":
                sys.exit(
                    "Training is finished. Run the command once more on one process, to write "
                    f"{Path(self.args.output_dir) / 'model'}."
                )
            self.state = TrainerState.load_from_json(str(resume / "trainer_state.json"))
            return
        if resume is not None:
            check_engine(resume, read_progress(resume), self.engine)
            # It was evaluated at its start: once more would count as an evaluation without a better score.
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
        """Whether training ended with it, also by early stopping: one evaluation more could be a better one."""
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
        """Give the model the weights of the best evaluation."""
        check_content(self.best_checkpoint)
        self._load_from_checkpoint(str(self.best_checkpoint))
        self.model.to(self.args.device)

    def _issue_warnings_after_load(self, load_result) -> None:
        # Checkpoints hold a weight that is tied to another once. Transformers warns that the second name is missing.
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def save_whole(self, folder: Path) -> None:
        """Write the model beside and rename: `folder` never holds half of it."""
        if self.is_fsdp_enabled:
            # With sharded checkpoints it would write nothing, without a word.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        # The same folder for all processes.
        (partial,) = map(Path, broadcast_object_list([str(partial_folder(folder))]))
        self.save_model(str(partial))
        if self.is_world_process_zero():
            (partial / "training_args.bin").unlink(missing_ok=True)
            replace_folder(partial, folder)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not math.isfinite(logs.get("loss", 0.0)):
            raise FloatingPointError(f"The loss is {logs['loss']} at step {self.state.global_step}.")
        if logs.pop("train_loss", None) is not None and self.counts_all_steps:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _save_checkpoint(self, model, trial) -> None:
        step = self.state.global_step
        if not self._all_finite(model):
            raise FloatingPointError(f"Loss or weights are not finite after step {step}.")
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        totals = self.totals()
        self._finish_checksums()
        try:
            if self.is_world_process_zero() and folder.exists():
                # An earlier run was interrupted while it saved this step.
                delete_checkpoint(folder)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                mark_complete(folder, Progress(self.engine, self.run_settings, self.cursor(), totals))
                self.being_added = [self.checksums.submit(add_checksums, folder)]
                delete_old(folder.parent, self.keep, self.state.best_global_step)
        except (OSError, RuntimeError, SafetensorError) as error:
            free = shutil.disk_usage(self.args.output_dir).free
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written ({error}); {free:,} bytes are free. "
                f"{self.advice()}"
            ) from error

    def _all_finite(self, model) -> bool:
        """Loss and weights, of this process's part on engines that share them out, on all processes."""
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
        finite = torch.stack([tensor.detach().isfinite().all() for tensor in (self._tr_loss, *weights)]).all()
        return self.accelerator.reduce((~finite).float(), "sum").item() == 0

    def advice(self) -> str:
        """From where the run can go on, for the message that ends it."""
        complete = complete_checkpoints(Path(self.args.output_dir))
        # One of a later step is damaged: this run went on from one before it.
        complete = [folder for folder in complete if step_of(folder) <= self.state.global_step]
        if not complete:
            return "There is no earlier checkpoint."
        return f"{complete[-1]} is complete: the same command goes on from there."

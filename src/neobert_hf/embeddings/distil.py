"""Distillation: a small student learns the token states and vectors that a teacher has computed for texts.

The loss is the sum of three parts: the squared distance of the token states, whose root mean square length is 1; twice
one minus the cosine of the vectors, as in Sentence Transformers' `EmbedDistillLoss`; and half the KL divergence of the
similarities within a batch. With vectors alone, the cosine to MiniLM ended at 0.737 instead of 0.816. Cosines do not
depend on lengths, so teachers may normalise their vectors or not.

References:
    https://arxiv.org/abs/1909.10351 (TinyBERT: hidden states), https://arxiv.org/abs/2004.09813 (vectors), and
    https://arxiv.org/abs/2010.11386 (KL of similarities in a batch).
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from neobert_hf.common.files import atomic_folder, atomic_write, write_json, write_text
from neobert_hf.common.fingerprints import check_same_settings, depends_on, model_fingerprint, texts_checksum
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.embeddings.student import Student, cosine_to_teacher
from neobert_hf.embeddings.teacher import Answers, Text, fast_bfloat16


TEMPERATURE = 0.05
# Texts of this many batches are sorted by length before they are divided, so that little is padded.
BATCHES_OF_POOL = 40
WARMUP = 0.06
CHECKPOINT = "checkpoint.pt"


@dataclass
class DistilSettings:
    """The teacher, the texts, the student's size and its training."""

    teacher: str = field(
        metadata={"help": "an embedding model of Sentence Transformers: path or Hub id", "path": "or Hub id"}
    )
    texts: list[str] = field(
        metadata={
            "help": "files, patterns, folders or Hub datasets (Parquet, JSON lines, CSV or text)",
            "path": "or Hub id",
        }
    )
    output_dir: str = field(
        default="runs/distil", metadata={"help": "folder for model, log and teacher's states", "path": True}
    )
    column: str = field(default="text", metadata={"help": "name of the column that holds the text"})
    passages: int = field(
        default=16_000,
        metadata={"help": "passages to learn from, of which each gives up to three texts; fewer if there are fewer"},
    )
    num_hidden_layers: int = field(default=2, metadata={"help": "0 for a mere table of token vectors"})
    hidden_size: int = field(default=384, metadata={"help": "width of the student"})
    num_attention_heads: int = field(default=6, metadata={"help": "must divide the width"})
    intermediate_size: int = field(default=768, metadata={"help": "width of the MLP; SwiGLU uses two thirds of it"})
    vocabulary: str = field(
        default="all", metadata={"help": "all of the teacher's, or only the entries `used` by the texts (WordPiece)"}
    )
    epochs: int = field(default=2, metadata={"help": "how often each text is learned"})
    batch_size: int = field(default=80, metadata={"help": "texts"})
    block_rate: float = field(default=8e-4, metadata={"help": "highest learning rate of the blocks"})
    # Twice this rate broke the embeddings in a trial.
    embedding_rate: float = field(default=1.5e-4, metadata={"help": "highest learning rate of the embeddings"})
    seed: int = field(default=0, metadata={"help": "of the blocks' weights and the order of the texts"})
    save_steps: int = field(default=200, metadata={"help": "steps between two checkpoints"})
    logging_steps: int = field(default=50, metadata={"help": "steps between two lines of progress"})

    def __post_init__(self):
        if self.vocabulary not in ("all", "used"):
            raise ValueError(f"`vocabulary` is {self.vocabulary!r}; it must be 'all' or 'used'.")

    def sizes(self) -> dict[str, int]:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        return {name: getattr(self, name) for name in names}

    def identity(self, learned: list[Text]) -> dict[str, Any]:
        """All that the result depends on, by name."""
        unimportant = ("column", "save_steps", "logging_steps")
        teacher, texts = model_fingerprint(self.teacher), texts_checksum(map(repr, learned))
        return depends_on(self, leave_out=unimportant, teacher=teacher, texts=texts)


def read_checkpoint(settings: DistilSettings, learned: list[Text]) -> dict[str, Any] | None:
    """What an interrupted run has saved in `output_dir`; None if there is nothing.

    Raises:
        SettingsMismatch: if it is of a run with other settings or texts; the message names them.
    """
    file = Path(settings.output_dir) / CHECKPOINT
    if not file.exists():
        return None
    checkpoint = torch.load(file, weights_only=True, map_location="cpu")
    check_same_settings(file, checkpoint["identity"], settings.identity(learned), "Choose another `output_dir`.")
    return checkpoint


def batches_of(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The numbers of the texts in each batch of an epoch. Texts of a batch are about equally long."""
    draw = np.random.default_rng([seed, epoch])
    order = draw.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), batch_size * BATCHES_OF_POOL):
        pool = order[start : start + batch_size * BATCHES_OF_POOL]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        batches += [pool[place : place + batch_size] for place in range(0, len(pool), batch_size)]
    return [batches[number] for number in draw.permutation(len(batches))]


def loss_of(student: Student, answers: Answers, batch: Sequence[int]) -> tuple[torch.Tensor, float]:
    """The loss of a batch, a scalar, and the mean cosine of its vectors to the teacher's."""
    device = student.model.device
    ids, states, vectors = zip(*(answers[number] for number in batch))
    wanted_states = torch.cat(states).to(device).float() / student.scale
    wanted = F.normalize(torch.stack(vectors).to(device), dim=1)
    with torch.autocast(device.type, torch.bfloat16, enabled=fast_bfloat16(device)):
        found_states, found = student.read(ids)
    of_states = (found_states.float() - wanted_states).square().sum(1).mean()
    found = found.float()
    cosine = (found * wanted).sum(1).mean()
    of_similarities = F.kl_div(_similarities(found), _similarities(wanted), log_target=True, reduction="batchmean")
    return of_states + 2 * (1 - cosine) + 0.5 * of_similarities, cosine.item()


def _similarities(vectors: torch.Tensor) -> torch.Tensor:
    """Logarithms of the softmax over the other texts of a batch, (texts, texts)."""
    cosines = vectors @ vectors.T / TEMPERATURE
    # Not minus infinity: its product with a probability of zero is not a number.
    return cosines.masked_fill(torch.eye(len(cosines), dtype=torch.bool, device=cosines.device), -1e4).log_softmax(1)


def build_optimizer(student: Student, settings: DistilSettings) -> torch.optim.AdamW:
    blocks = list(student.encoder.transformer_encoder.parameters())
    others = (student.encoder.layer_norm, student.linear, student.head)
    # The linear layer may also be the head. A checkpoint stores the moments by place, so the order must not change.
    others = list(dict.fromkeys(each for module in others for each in module.parameters()))
    groups = [
        {"params": [student.encoder.encoder.weight], "lr": settings.embedding_rate, "weight_decay": 0.0},
        {"params": others, "lr": settings.embedding_rate / 2},
    ]
    groups += [{"params": blocks, "lr": settings.block_rate}] if blocks else []
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


class Training:
    """The student, its optimizer and how far they are. Everything else follows from settings, texts and step.

    Args:
        learned: the texts to learn from, and the teacher's answers to them.
        held_out: texts to measure on, and the teacher's answers to them.
    """

    def __init__(
        self,
        student: Student,
        settings: DistilSettings,
        learned: tuple[list[Text], Answers],
        held_out: tuple[list[Text], Answers],
    ):
        texts, self.answers = learned
        self.student, self.settings, self.held_out = student, settings, held_out
        self.optimizer = build_optimizer(student, settings)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.identity = settings.identity(texts)
        self.step, self.log = 0, []
        self.steps_of_epoch = -(-len(self.answers.lengths) // settings.batch_size)
        self.last_step = settings.epochs * self.steps_of_epoch

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Go on from what `read_checkpoint` returned."""
        self.student.load_state_dict(checkpoint["student"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step, self.log = checkpoint["step"], checkpoint["log"]
        print(f"going on after step {self.step:,} of {self.last_step:,}", flush=True)

    def save(self) -> None:
        state = {"identity": self.identity, "student": self.student.state_dict(), "step": self.step, "log": self.log}
        with atomic_write(Path(self.settings.output_dir) / CHECKPOINT) as partial:
            torch.save(state | {"optimizer": self.optimizer.state_dict()}, partial)

    def run(self) -> None:
        """Train to the last step. Ctrl-C and SIGTERM end the process after the current step, with a checkpoint."""
        stopped: list[int] = []
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda number, frame: stopped.append(number)) for number in signals]
        try:
            started, tokens, batches = monotonic(), 0, []
            while self.step < self.last_step:
                epoch, place = divmod(self.step, self.steps_of_epoch)
                if not batches or place == 0:
                    batches = batches_of(self.answers.lengths, self.settings.batch_size, self.settings.seed, epoch)
                loss, cosine = self._learn(batches[place])
                tokens += int(self.answers.lengths[batches[place]].sum())
                if self.step % self.settings.logging_steps == 0 or self.step == self.last_step:
                    self._report(loss, cosine, tokens / (monotonic() - started))
                if stopped or self.step % self.settings.save_steps == 0 or self.step == self.last_step:
                    self.save()
                if stopped:
                    print(f"Stopped after step {self.step:,}: the same command goes on from there.", flush=True)
                    sys.exit(128 + stopped[0])
        finally:
            for number, handler in zip(signals, before):
                signal.signal(number, handler)

    def _learn(self, batch: np.ndarray) -> tuple[float, float]:
        """One step; its loss and cosine."""
        done = self.step / self.last_step
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate * min(1, done / WARMUP + 0.02) * (1 - done)
        self.student.model.train()
        loss, cosine = loss_of(self.student, self.answers, batch)
        loss.backward()
        nn.utils.clip_grad_norm_([each for group in self.optimizer.param_groups for each in group["params"]], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item(), cosine

    def _report(self, loss: float, cosine: float, speed: float) -> None:
        held_out = cosine_to_teacher(self.student, *self.held_out)
        self.log.append({"step": self.step, "loss": loss, "cosine": cosine, "held_out_cosine": held_out})
        print(
            f"step {self.step:,} of {self.last_step:,}: loss {loss:.3f}, cosine to the teacher {cosine:.3f}, of "
            f"held-out texts {held_out:.4f}; {speed:,.0f} tokens a second",
            flush=True,
        )


def save_student(training: Training) -> Path:
    """Write `model/`, with a card, and `log.json`; return the model's folder."""
    output, settings, model = Path(training.settings.output_dir), training.settings, training.student.model
    held_out = cosine_to_teacher(training.student, *training.held_out)
    parameters = sum(each.numel() for each in model.parameters())
    card = [
        "---",
        "library_name: sentence-transformers",
        "pipeline_tag: sentence-similarity",
        "tags: [sentence-transformers, feature-extraction, neobert]",
        "---",
        "",
        f"# {settings.num_hidden_layers} x {settings.hidden_size}, distilled from {Path(settings.teacher).name}",
        "",
        f"A NeoBERT of {parameters:,} parameters whose vectors lie in the space of its teacher, {settings.teacher}: an "
        "index that the teacher made can be searched with them. Its cosine to the teacher's vectors is "
        f"{held_out:.3f} on texts that it did not learn from.",
        "",
        f"It learned {len(training.answers.lengths):,} texts, {training.answers.lengths.sum():,} tokens, "
        f"{settings.epochs} times, with examples/distil.py of neobert_hf. The licences of teacher and texts apply.",
    ]
    clear_truncation(model.tokenizer)
    with atomic_folder(output / "model") as partial:
        model.eval().save_pretrained(str(partial), create_model_card=False)
        write_text(partial / "README.md", "\n".join(card) + "\n")
    write_json(output / "log.json", training.log)
    return output / "model"

"""Training of a student: the settings, the batches, three learning rates, and the model card."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import TrainingArguments

from neobert_hf.common.files import atomic_folder, write_json, write_text
from neobert_hf.common.recipe import Result
from neobert_hf.common.settings import check_numbers
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.data.sources import list_of
from neobert_hf.distillation.student import Student, blocks_of, cosine_to_teacher
from neobert_hf.distillation.teacher import Targets
from neobert_hf.embeddings.space import write_teacher
from neobert_hf.training.arguments import BF16, fast_bfloat16, fix, follow_hardware, refused_by
from neobert_hf.training.run import Run
from neobert_hf.training.trainer import ResumableTrainer


FIXED = {
    "remove_unused_columns": False,
    "dataloader_drop_last": False,
    "ignore_data_skip": False,
    "load_best_model_at_end": False,
}


@dataclass
class DistilSettings:
    """The teacher and the texts; `StudentSettings` say what learns."""

    teacher: str = field(
        metadata={"help": "an embedding model of Sentence Transformers: path or Hub id", "path": "or Hub id"}
    )
    texts: list[str] = field(
        metadata={
            "help": "files, patterns, folders or Hub datasets (Parquet, JSON lines, CSV or text)",
            "path": "or Hub id",
        }
    )
    column: str = field(default="text", metadata={"help": "name of the column that holds the text"})
    passages: int = field(
        default=60_000,
        metadata={"help": "passages to learn from, of which each gives up to three texts; fewer if there are fewer"},
    )
    # They ruined new students of few texts, which cannot tell far texts apart yet.
    nearest_texts: int = field(
        default=0,
        metadata={
            "help": "compare each text with so many that are nearest to it for the teacher, and as many others: 128 "
            "helps a trained `student` to search; 0 for random others alone, as a new one needs"
        },
    )
    # Twice this rate broke the embeddings in a trial.
    embedding_learning_rate: float = field(default=1.5e-4, metadata={"help": "peak value, for the embeddings"})

    def __post_init__(self):
        self.texts = list_of(self.texts)
        check_numbers(
            self, {"passages": "1 or more", "nearest_texts": "0 or more", "embedding_learning_rate": "0 or more"}
        )


@dataclass
class DistilArguments(TrainingArguments):
    """Transformers' arguments with the defaults of this recipe."""

    refused: ClassVar = refused_by(FIXED, {})

    num_train_epochs: float = field(default=1, metadata={"help": "how often each text is learned"})
    per_device_train_batch_size: int = field(default=80, metadata={"help": "texts"})
    learning_rate: float = field(default=8e-4, metadata={"help": "peak value, for the blocks"})
    # A number, not a share: two steps of warm-up cost a student of 1,000 passages more than the other 28 gave back.
    warmup_steps: float = field(default=50, metadata={"help": "steps, or a share of all if below 1"})
    weight_decay: float = field(default=0.01, metadata={"help": "decoupled; not on the embeddings"})
    adam_beta2: float = field(default=0.98, metadata={"help": "decay rate of the second moment"})
    bf16: bool | None = field(default=None, metadata=BF16 | {"help": "bfloat16 autocast; where it is fast if unset"})
    report_to: str | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ... or none"})
    logging_steps: float = field(default=50, metadata={"help": "steps between two lines of progress"})
    eval_strategy: str = field(default="steps", metadata={"help": "steps, or no for no evaluation"})
    eval_on_start: bool = field(default=True, metadata={"help": "also measure the student before the first step"})
    save_steps: float = field(default=200, metadata={"help": "steps between two checkpoints"})
    save_total_limit: int | None = field(default=1, metadata={"help": "number of complete checkpoints to keep"})

    def __post_init__(self):
        fix(self, FIXED, {})
        if self.bf16 is None:
            device = "cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu"
            self.bf16 = fast_bfloat16(torch.device(device))
            # Transformers refuses bfloat16 on a CPU unless it is told to train there.
            self.use_cpu |= self.bf16 and device == "cpu"
        follow_hardware(self)
        super().__post_init__()


def collate(texts: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]], padding: int) -> dict[str, torch.Tensor]:
    """The inputs of `Student` for texts of `Targets`.

    They are sorted by length, but a batch has all lengths. In batches of one length each step undid a part of what the
    one before had learned for other lengths: the cosine was 0.695 after 200 steps, not 0.718.
    """
    numbers, ids, states, vectors = zip(*sorted(texts, key=lambda text: len(text[1])))
    lengths = torch.tensor([len(each) for each in ids])
    padded = nn.utils.rnn.pad_sequence([each.long() for each in ids], batch_first=True, padding_value=padding)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    return {
        "numbers": torch.tensor(numbers),
        "input_ids": padded,
        "attention_mask": mask,
        "states": torch.cat(states),
        "vectors": torch.stack(vectors),
    }


CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, {kind}]
---

# {layers} x {width}, distilled from {name}

A model of {parameters:,} parameters whose vectors lie in the space of its teacher, {teacher}:
an index that the teacher made can be searched with them. Its cosine to the teacher's vectors is {cosine:.3f} on texts
that it did not learn from.

It learned {texts:,} texts, {tokens:,} tokens, in {steps:,} steps, with `distil` of neobert_hf. The licences
of teacher and texts apply.
"""


class DistilTrainer(ResumableTrainer):
    """Trains a student.

    Args:
        settings: the distillation's; its other values are among the Trainer's arguments.
        targets, held_out: of the texts to learn from and to measure on.
    """

    def __init__(
        self,
        student: Student,
        settings: DistilSettings,
        args: DistilArguments,
        targets: Targets,
        held_out: Targets,
        run: Run,
    ):
        self.distil_settings = settings
        if args.max_steps <= 0:
            steps = -(-len(targets) // (args.per_device_train_batch_size * args.gradient_accumulation_steps))
            args.max_steps = int(args.num_train_epochs * steps)
        padding = student.encoder.config.pad_token_id
        super().__init__(
            student,
            args,
            data_collator=lambda texts: collate(texts, padding),
            train_dataset=targets,
            eval_dataset=held_out,
            run=run,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with three learning rates: of the embeddings, of the blocks, and half of the former for the rest."""
        encoder, arguments, rate = self.model.encoder, self.args, self.distil_settings.embedding_learning_rate
        embeddings, blocks = [encoder.get_input_embeddings().weight], list(blocks_of(encoder).parameters())
        known = set(embeddings + blocks)
        others = [weight for weight in self.model.parameters() if weight not in known]
        groups = [
            {"params": embeddings, "lr": rate, "weight_decay": 0.0},
            {"params": others, "lr": rate / 2},
            {"params": blocks, "lr": arguments.learning_rate},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(arguments.adam_beta1, arguments.adam_beta2),
            weight_decay=arguments.weight_decay,
            fused=True,
        )
        return self.optimizer

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """The mean cosine of the student's vectors to the teacher's, of the held-out texts."""
        metrics = {"eval_cosine": cosine_to_teacher(self.model.model, self.eval_dataset)}
        self.log(metrics)
        # Without it, the Trainer would measure once more at the end of an epoch.
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_student(self) -> Result:
        """Write `model/`, with a card, and `log.json`."""
        output, model, settings = self.run.folder, self.model.model, self.distil_settings
        cosine = cosine_to_teacher(model, self.eval_dataset)
        card = CARD.format(
            kind=model[0].model.config.model_type,
            layers=model[0].model.config.num_hidden_layers,
            width=model[0].model.config.hidden_size,
            name=Path(settings.teacher).name,
            parameters=sum(each.numel() for each in model.parameters()),
            teacher=settings.teacher,
            cosine=cosine,
            texts=len(self.train_dataset),
            tokens=self.train_dataset.lengths.sum(),
            steps=self.args.max_steps,
        )
        clear_truncation(model.tokenizer)
        with atomic_folder(output / "model") as partial:
            model.eval().save_pretrained(str(partial), create_model_card=False)
            write_text(partial / "README.md", card)
            write_teacher(partial, settings.teacher)
        write_json(output / "log.json", self.measured())
        measured = [entry["eval_cosine"] for entry in self.state.log_history if "eval_cosine" in entry]
        before = {"cosine": measured[0]} if measured else {}
        words = f" ({measured[0]:.4f} before training)" if measured else ""
        print(f"{output / 'model'}: cosine to the teacher {cosine:.4f}{words}, on held-out texts", flush=True)
        return Result(output / "model", {"cosine": cosine}, before)

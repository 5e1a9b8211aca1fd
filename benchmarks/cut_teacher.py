"""Train some of a teacher's layers to give the teacher's vectors, as a rival of a distilled NeoBERT.

    python benchmarks/distil_data.py data/benchmark runs/packages runs/small
    python benchmarks/cut_teacher.py --texts runs/small/texts.parquet --output_dir runs/cut
    python benchmarks/cut_teacher.py --texts runs/small/texts.parquet --output_dir runs/cut_2 --layers 1 4
    python benchmarks/cut_teacher.py --texts runs/small/texts.parquet --output_dir runs/cut_90k --passages 90000
    python benchmarks/kinds.py --models models/distilled=models/distilled 'teacher cut to 3 layers=runs/cut/model'

Sentence Transformers' own way: `MSELoss` against the teacher's vectors. The texts are cut as `distil` cuts them, and
each is learned once. An interrupted command goes on when it is run again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from kinds import KEPT, cut
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import MSELoss
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.settings import parse_config
from neobert_hf.distillation.teacher import choose_texts, compute_targets, load_teacher
from neobert_hf.training.arguments import fast_bfloat16


BATCH, RATE = 80, 2e-4
# So many batches are sorted by length together, so that few of their places are padding.
BATCHES_OF_PART = 50


class SortedInParts(DefaultBatchSampler):
    """Random batches of texts of about one length: BERT computes padding."""

    def __iter__(self) -> Iterator[list[int]]:
        lengths, size = np.array([len(text) for text in self.sampler["text"]]), BATCHES_OF_PART * self.batch_size
        generator = np.random.default_rng(self.seed)
        order = generator.permutation(len(lengths))
        for part in (order[start : start + size] for start in range(0, len(order), size)):
            ordered = part[np.argsort(lengths[part], kind="stable")].tolist()
            batches = [ordered[start : start + self.batch_size] for start in range(0, len(part), self.batch_size)]
            yield from (batches[number] for number in generator.permutation(len(batches)))


@dataclass(kw_only=True)
class CutSettings:
    texts: str = field(metadata={"help": "Parquet file with a column `text`", "path": True})
    output_dir: str = field(metadata={"help": "the teacher's vectors, checkpoints and the model", "path": True})
    teacher: str = field(
        default="sentence-transformers/all-MiniLM-L6-v2",
        metadata={"help": "an embedding model that is a BERT", "path": "or Hub id"},
    )
    layers: list[int] = field(default_factory=lambda: [*KEPT], metadata={"help": "of the teacher that stay"})
    passages: int = field(default=15_000, metadata={"help": "of the texts that are learned; each gives two or three"})
    seed: int = field(default=0, metadata={"help": "of the order"})


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(CutSettings, args=args)
    output, teacher = Path(settings.output_dir), settings.teacher
    texts, _ = choose_texts([settings.texts], "text", settings.passages)
    reader = load_teacher(teacher, torch.device("cpu"))
    student = cut(SentenceTransformer(teacher, device="cpu").float(), settings.layers)
    if student[0].model.config.num_hidden_layers != len(settings.layers):
        raise ValueError(f"`teacher` is {teacher!r}, without layers {settings.layers} to keep: name a BERT with more.")
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            # A vector to copy is the same each time, and training is faster without dropout.
            module.p = 0.0

    # What the teacher says of the texts
    targets = compute_targets(reader, model_fingerprint(teacher), texts, output / "teacher")
    vectors = torch.cat([file["vectors"] for file in targets.files]).numpy()
    rows = Dataset.from_dict({"text": [text.content for text in texts], "label": vectors})

    # Training
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        seed=settings.seed,
        learning_rate=RATE,
        warmup_steps=0.06,
        use_cpu=True,
        batch_sampler=SortedInParts,
        bf16=fast_bfloat16(torch.device("cpu")),
        save_steps=200,
        save_total_limit=1,
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(student, arguments, rows, loss=MSELoss(student))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output)))
    student.save(str(output / "model"), create_model_card=False)
    print(f"{output / 'model'}: {targets.lengths.sum():,} tokens of {len(texts):,} texts", flush=True)


if __name__ == "__main__":
    main()

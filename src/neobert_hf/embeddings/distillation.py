"""Distillation: an embedding model learns what a larger model or a reranker computes for the same texts.

| `distillation` | What is learned from the teacher | Loss of Sentence Transformers |
| --- | --- | --- |
| `margin_mse` | by how much it scores the right document above each hard negative | `MarginMSELoss` |
| `kl` | its probabilities for the documents of a row, the softmax of their scores | `DistillKLDivLoss` |
| `mse` | its embeddings of queries and right documents | `MSELoss` |

The scores of the model in training are cosines over the temperature, as in the contrastive loss. The teacher reads all
texts once, before training, with its own prompts. Its results are kept in files of a few thousand rows, in a folder
whose name identifies the teacher and the texts. An interrupted run goes on after the last file, and other runs find the
results there.

References:
    https://arxiv.org/abs/2010.02666 (MarginMSE), https://arxiv.org/abs/2010.11386 (KL), https://arxiv.org/abs/2004.09813
    (MSE of embeddings), https://arxiv.org/abs/2212.03533 (KL together with a contrastive loss, E5).
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import (
    DistillKLDivLoss,
    MarginMSELoss,
    MSELoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import pairwise_cos_sim
from torch import nn

from neobert_hf.common.fingerprints import data_fingerprint, model_files_fingerprint, value_checksum
from neobert_hf.common.stored_rows import load_rows, store_rows
from neobert_hf.embeddings.arguments import DenseArguments
from neobert_hf.embeddings.descriptions import PairDataset
from neobert_hf.embeddings.inference import check_finite, kind_of
from neobert_hf.embeddings.mining import name_for_prompts, prompt_of_helper, prompts_of_helper
from neobert_hf.embeddings.models import (
    check_prefixes,
    load_trained_model,
    load_trained_reranker,
    with_prefixes,
)
from neobert_hf.embeddings.pairs import most_negatives
from neobert_hf.embeddings.recipe import Run
from neobert_hf.training.run_checkpoints import CheckpointError


# Rows in a file of results, which is the most that an interruption may cost.
PART_ROWS = 2_000
# With embeddings of 1,024 numbers, this is a gigabyte.
KEPT_TEXTS = 2**18

# Columns of the file that says what kind of results a folder holds.
ANSWERS = Features({"unit": Value("string"), "width": Value("int32")})


@dataclass
class Answers:
    """What kind of results a teacher gives.

    Args:
        unit: of its scores, `cosine`, `dot`, ... for an embedding model and `logit` for a reranker; or `embedding`.
        width: of its embeddings; None for scores.
    """

    unit: str
    width: int | None


class Teacher:
    """A trained embedding model or reranker, loaded when it is first used.

    Args:
        path: folder or Hub id.
        embeddings: whether its embeddings are used, and not its scores.

    Raises:
        ValueError: if it is neither, or the embeddings of a reranker are asked for.
    """

    def __init__(self, path: str, embeddings: bool, device: torch.device, trust_remote_code: bool = False):
        self.path, self.embeddings, self.device, self.trust_remote_code = path, embeddings, device, trust_remote_code
        self.fingerprint = model_files_fingerprint(path)
        # Embeddings by prompt and text: a hard negative of some rows is the right document of another.
        self.known: dict[str, dict[str, torch.Tensor]] = {}
        self.is_reranker = kind_of_teacher(path, trust_remote_code) == "CrossEncoder"
        if self.is_reranker and embeddings:
            raise ValueError(
                f"{path} is a reranker, which has no embeddings: set `distillation` to margin_mse or kl, or give an "
                "embedding model as `teacher`."
            )

    @cached_property
    def model(self) -> SentenceTransformer | CrossEncoder:
        load = load_trained_reranker if self.is_reranker else load_trained_model
        return load(self.path, self.trust_remote_code).to(self.device).eval()

    def answers(self) -> Answers:
        if self.is_reranker:
            return Answers("logit", None)
        if self.embeddings:
            return Answers("embedding", self.model.get_embedding_dimension())
        return Answers(self.model.similarity_fn_name, None)

    def prompts(self, description: PairDataset) -> list[str]:
        """The prompts of queries and, for an embedding model, of documents: the dataset's if known, or its own."""
        if self.is_reranker:
            return [prompt_of_helper("teacher", self.model, description.prompt)]
        return list(prompts_of_helper("teacher", self.model, description))

    def read(self, rows: Dataset, prompts: list[str]) -> list:
        """Embeddings of query and right document, or scores of all documents, for each row.

        Args:
            rows: as `comparable_rows` returns them.
        """
        queries, positives = rows["query"][:], rows["positive"][:]
        if self.embeddings:
            vectors = [self._embed(*each) for each in zip((queries, positives), prompts)]
            return np.stack([vector.float().cpu().numpy() for vector in vectors], axis=1).tolist()
        documents = [[right, *wrong] for right, wrong in zip(positives, rows["negatives"][:])]
        pairs = [(query, text) for query, texts in zip(queries, documents) for text in texts]
        scores = self._score(pairs, *prompts)
        if not np.isfinite(scores).all():
            pair = pairs[int(np.flatnonzero(~np.isfinite(scores))[0])]
            raise FloatingPointError(f"The score that the teacher {self.path} gives {pair!r:.200} is not finite.")
        return scores.reshape(len(queries), -1).tolist()

    def _score(self, pairs: list[tuple[str, str]], prompt: str, document_prompt: str = "") -> np.ndarray:
        if self.is_reranker:
            # Logits, since the probabilities that most rerankers give hardly differ near 0 and 1.
            return self.model.predict(pairs, prompt=prompt, activation_fn=nn.Identity(), show_progress_bar=False)
        queries, documents = zip(*pairs)
        first, second = self._embed(queries, prompt), self._embed(documents, document_prompt)
        return self.model.similarity_pairwise(first, second).float().cpu().numpy()

    def _embed(self, texts: tuple[str, ...] | list[str], prompt: str) -> torch.Tensor:
        """Embeddings, (texts, width). Each text is embedded once, unless there are more than `KEPT_TEXTS`."""
        known = self.known.setdefault(prompt, {})
        if new := [text for text in dict.fromkeys(texts) if text not in known]:
            vectors = self.model.encode(new, prompt=prompt, convert_to_tensor=True, show_progress_bar=False).cpu()
            check_finite(vectors.float().numpy(), new)
            known |= zip(new, vectors)
        found = torch.stack([known[text] for text in texts])
        if len(known) > KEPT_TEXTS:
            known.clear()
        return found


def kind_of_teacher(path: str, trust_remote_code: bool = False) -> str:
    """`SentenceTransformer` or `CrossEncoder`: the kind of model in a folder or under a Hub id.

    Raises:
        ValueError: if it is neither.
    """
    kind = kind_of(path, trust_remote_code)
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        found = kind or "an encoder without a trained pooling or head"
        raise ValueError(
            f"`teacher` is {path}, which is {found}; it must be an embedding model (SentenceTransformer) or a reranker "
            "(CrossEncoder)."
        )
    return kind


def add_teacher(run: Run, model: SentenceTransformer) -> Answers:
    """Give the training datasets a column `label` with the teacher's results for each row.

    Args:
        model: the one to be trained.

    Raises:
        CheckpointError: if training has begun, and the results that it began with are missing.
        ResultError: if results are damaged.
        ValueError: if the teacher's results cannot be learned, or a dataset has no documents to compare.
    """
    settings, width = run.settings, model.get_embedding_dimension()
    check_prefixes(model, settings.matryoshka_dims)
    embeddings = settings.distillation == "mse"
    teacher = Teacher(settings.teacher, embeddings, run.arguments.device, settings.trust_remote_code)
    folder = Path(settings.teacher_dir or Path(run.arguments.output_dir) / "teacher")
    # Prepare all datasets first, so that the teacher reads nothing if one of them is refused.
    rows = {name: comparable_rows(name, pairs, embeddings) for name, pairs in run.data.train.items()}
    with run.arguments.main_process_first(desc="reading with the teacher"):
        for name, pairs in rows.items():
            description = run.data.descriptions[name]
            prompts = [description.prompt, description.document_prompt]
            content = [teacher.fingerprint, embeddings, *prompts, data_fingerprint(pairs), PART_ROWS]
            content += name_for_prompts(settings.teacher, description)
            place = folder / value_checksum(content)
            if run.checkpoint is not None and _missing_parts(place, len(pairs)):
                raise CheckpointError(
                    f"The run in {run.arguments.output_dir} began with results of its teacher, and {place} no longer "
                    "holds all of them. Restore that folder, or start anew with another `output_dir`."
                )
            answers = _what_it_answers(place, teacher, width)
            labels = _read_missing(place, pairs, teacher, description)
            run.data.train[name] = concatenate_datasets([pairs, labels], axis=1)
    return answers


def comparable_rows(name: str, pairs: Dataset, embeddings: bool) -> Dataset:
    """The pairs with the same number of hard negatives in every row, or with none if embeddings are learned.

    Rows with fewer hard negatives are filled up with right documents of other rows, the same ones in every run. These
    need not be wrong, since the teacher scores them, too.
    """
    if embeddings:
        return pairs.map(lambda row: {"negatives": []}, features=pairs.features, desc=name)
    most = most_negatives(pairs)
    if not most:
        raise ValueError(
            f"Dataset {name} has no hard negatives, but learning a teacher's scores needs several documents for each "
            "query. Set `miner` and `negatives`, name a column of `negatives`, or set `distillation` to mse."
        )
    documents = pairs.unique("positive")
    if len(documents) < 2 * most + 1:
        raise ValueError(
            f"Dataset {name} has {len(documents):,} different documents, too few to give every row {most} others to "
            "compare. Set a smaller `max_negatives` or `negatives`."
        )

    def fill(row: dict, number: int) -> dict:
        texts = row["negatives"]
        if len(texts) < most:
            drawn = random.Random(number).sample(documents, 2 * most + 1)
            texts = texts + [text for text in drawn if text != row["positive"] and text not in texts]
        return {"negatives": texts[:most]}

    return pairs.map(fill, with_indices=True, features=pairs.features, desc=name)


def _parts(rows: int) -> range:
    return range(-(-rows // PART_ROWS))


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05}.parquet"


def _missing_parts(folder: Path, rows: int) -> list[int]:
    return [number for number in _parts(rows) if not _part(folder, number).exists()]


def _what_it_answers(folder: Path, teacher: Teacher, width: int) -> Answers:
    """The kind of results in a folder, which is kept in a file. Refuses results that the model cannot learn."""
    file = folder / "answers.parquet"
    if not file.exists():
        store_rows(Dataset.from_list([asdict(teacher.answers())], ANSWERS), file)
    answers = Answers(**load_rows(file)[0])
    if answers.width is not None and answers.width < width:
        raise ValueError(
            f"The embeddings of the teacher {teacher.path} have {answers.width} numbers, and those of the model to "
            f"train have {width}: mse needs a teacher with at least as many. Set `distillation` to margin_mse or kl."
        )
    return answers


def _read_missing(folder: Path, rows: Dataset, teacher: Teacher, description: PairDataset) -> Dataset:
    """The teacher's results for all rows, as a column `label`. It reads only rows whose results are missing."""
    numbers = List(Value("float32"))
    features = Features({"label": List(numbers) if teacher.embeddings else numbers})
    missing = _missing_parts(folder, len(rows))
    prompts = teacher.prompts(description) if missing else []
    for number in missing:
        first, behind = number * PART_ROWS, min((number + 1) * PART_ROWS, len(rows))
        results = teacher.read(rows.select(range(first, behind)), prompts)
        store_rows(Dataset.from_dict({"label": results}, features), _part(folder, number))
        print(f"teacher: {description.name}, {behind:,} of {len(rows):,} rows", flush=True)
    return concatenate_datasets([load_rows(_part(folder, number)) for number in _parts(len(rows))])


class DistillationLoss(nn.Module):
    """A loss of Sentence Transformers on the teacher's results, plus a contrastive loss if that has a weight.

    The contrastive loss gets only queries and right documents: how wrong a hard negative is, the teacher says.

    Args:
        settings: `distillation`, `temperature`, `teacher_temperature` and `contrastive_weight` are used.
        unit: of the teacher's results; see `Answers`.
        projection: (teacher's width, model's width), if the teacher's embeddings are wider than the model's.
    """

    def __init__(
        self, model: SentenceTransformer, settings: DenseArguments, unit: str, projection: torch.Tensor | None = None
    ):
        super().__init__()
        self.model = model
        similarity = partial(cosine_over_temperature, temperature=settings.temperature)
        losses = {
            "margin_mse": partial(MarginMSELoss, similarity_fct=similarity),
            "kl": partial(DistillKLDivLoss, similarity_fct=similarity),
            "mse": MSELoss,
        }
        self.distillation = losses[settings.distillation](model)
        own = settings.temperature if unit == "cosine" else 1.0
        self.teacher_temperature = settings.teacher_temperature or own
        self.contrastive_weight = settings.contrastive_weight or 0.0
        self.contrastive = MultipleNegativesRankingLoss(model, scale=1 / settings.temperature)
        self.register_buffer("projection", projection)

    def forward(self, sentence_features: Iterable[dict[str, torch.Tensor]], labels: torch.Tensor) -> torch.Tensor:
        embeddings = embed_columns(self.model, sentence_features)
        if isinstance(self.distillation, MSELoss):
            labels = labels if self.projection is None else labels @ self.projection
            loss = self.distillation.compute_loss_from_embeddings(embeddings, labels.unbind(1))
        else:
            loss = self.distillation.compute_loss_from_embeddings(embeddings, labels / self.teacher_temperature)
        if self.contrastive_weight:
            loss = loss + self.contrastive_weight * self.contrastive.compute_loss_from_embeddings(embeddings[:2], None)
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """For the model card."""
        config = {"loss": type(self.distillation).__name__} | self.distillation.get_config_dict()
        return config | {
            "teacher_temperature": self.teacher_temperature,
            "contrastive_weight": self.contrastive_weight,
        }

    @property
    def citation(self) -> str:
        return self.distillation.citation


def cosine_over_temperature(first: torch.Tensor, second: torch.Tensor, temperature: float) -> torch.Tensor:
    """The score of each pair, row by row, computed as in the contrastive loss."""
    return pairwise_cos_sim(first, second) / temperature


def distillation_loss(model: SentenceTransformer, run: Run, answers: Answers) -> nn.Module:
    """The loss for a run whose datasets have been given labels by `add_teacher`, which returned `answers`."""
    width, projection = model.get_embedding_dimension(), None
    if answers.width is not None and answers.width > width:
        projection = principal_axes(run.data.train.values(), answers.width, width)
        print(f"teacher: its embeddings of {answers.width} numbers are projected to {width}", flush=True)
    loss = DistillationLoss(model, run.settings, answers.unit, projection)
    return with_prefixes(model, loss, run.settings.matryoshka_dims)


def principal_axes(datasets: Iterable[Dataset], width: int, kept: int) -> torch.Tensor:
    """The directions in which a teacher's embeddings (column `label`) are largest: (width, kept), orthonormal.

    As in Sentence Transformers' distillation example, but not centred: no other projection preserves the inner products
    of embeddings better.
    """
    products = np.zeros((width, width))
    for rows in datasets:
        for table in rows.select_columns("label").with_format("arrow").iter(10_000):
            numbers = table["label"].combine_chunks().flatten().flatten().to_numpy(zero_copy_only=False)
            vectors = numbers.reshape(-1, width).astype(np.float64)
            products += vectors.T @ vectors
    # `eigh` returns them in ascending order.
    _, axes = np.linalg.eigh(products)
    return torch.from_numpy(axes[:, ::-1][:, :kept].astype(np.float32))

"""The recipe of pseudo-perplexity: its settings, the documents at each length, and the work of each model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.fingerprints import loaded_fingerprint
from neobert_hf.common.paths import check_file_name, check_model_exists
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.data.tables import stream_text
from neobert_hf.evaluation.pseudo_perplexity.report import score_texts
from neobert_hf.evaluation.pseudo_perplexity.rope_scaling import parse_rope, scale_rope
from neobert_hf.evaluation.pseudo_perplexity.scoring import (
    MaskableText,
    append_losses,
    choose_positions,
    masked_batches,
    masked_losses,
    read_losses,
    texts_fingerprint,
)


@dataclass
class PseudoPerplexityArguments:
    models: list[str] = field(
        metadata={"help": "name=path or name=Hub id of each masked language model", "path": "name=or Hub id"}
    )
    source: str = field(
        metadata={"help": "text or Markdown files, Parquet, JSON lines, or a Hub dataset", "path": "or Hub id"}
    )
    output_dir: str = field(metadata={"help": "folder for losses, scores and the plot", "path": True})
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})
    split: str = field(default="train", metadata={"help": "split of a Hub dataset"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    rope: list[str] = field(
        default_factory=lambda: ["native"],
        metadata={"help": "native, linear:FACTOR, dynamic:FACTOR (NTK), yarn:FACTOR; every model is scored with each"},
    )
    lengths: list[int] = field(
        default_factory=list,
        metadata={"help": "token counts; each scores the documents that are at least as long, cut to it"},
    )
    max_length: int | None = field(default=None, metadata={"help": "tokens to cut longer documents to; uncut if unset"})
    min_tokens: int = field(default=0, metadata={"help": "shorter documents are left out"})
    max_documents: int | None = field(
        default=None, metadata={"help": "use the first so many of the remaining documents"}
    )
    sample: int | None = field(
        default=None, metadata={"help": "score this many random positions of each document; all if unset"}
    )
    stride: int = field(default=1, metadata={"help": "score every n-th position"})
    seed: int = field(default=0, metadata={"help": "seed of `sample`"})
    batch_tokens: int = field(
        default=16384, metadata={"help": "tokens of a batch (at least one sequence); does not change results"}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "dtype of the models"}
    )
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest available if unset"})

    def __post_init__(self):
        if self.lengths and self.max_length is not None:
            raise ValueError("`lengths` and `max_length` both cut documents: give one of them.")
        if self.sample is not None and self.stride != 1:
            raise ValueError("`sample` and `stride` both choose positions: give one of them.")
        for entry in self.models:
            if not re.fullmatch("[^/=]+=.+", entry):
                raise ValueError(f"`models` holds {entry!r}; write name=path, the name without a slash.")
            check_file_name(entry.split("=")[0], "A name in `models`")
        names = [entry.split("=")[0] for entry in self.models]
        for setting, values in (("models", names), ("rope", self.rope), ("lengths", self.lengths)):
            if repeated := {value for value in values if values.count(value) > 1}:
                raise ValueError(f"`{setting}` holds {repeated.pop()} more than once.")
        for setting in self.rope:
            parse_rope(setting)

    @property
    def paths(self) -> dict[str, str]:
        """The path of each model, by name."""
        return dict(entry.split("=", 1) for entry in self.models)


@dataclass
class Job:
    """One model with one RoPE setting on the documents of one length.

    Args:
        cut: the tokens that documents were cut to; None if they are uncut, or only cut to `max_length`.
        texts: the documents, short ones first.
        file: stores `losses`, which are in the order of `masked_batches`; see `read_losses`.
        settings: everything that the losses depend on.
    """

    cut: int | None
    texts: list[MaskableText]
    mask_id: int
    file: Path
    settings: dict = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens go through the model: for each position, all tokens of the text."""
        return sum(len(text.ids) * len(text.positions) for text in self.texts)

    @property
    def tokens_scored(self) -> int:
        lengths = [len(text.ids) for text in self.texts for _ in text.positions]
        return sum(lengths[: len(self.losses)])

    def score(self, model: PreTrainedModel, batch_tokens: int) -> Iterator[int]:
        """Score and store what is missing, batch by batch, and yield the number of tokens of each batch."""
        for batch in masked_batches(self.texts, batch_tokens, len(self.losses)):
            losses = masked_losses(model, batch, self.mask_id)
            append_losses(self.file, self.settings, len(self.losses), losses)
            self.losses += losses
            yield len(batch) * len(batch[0][0].ids)


@dataclass
class ScaledModel:
    """A model with one RoPE setting, and the texts that it has to score.

    Short texts come first, because in Transformers the frequencies of dynamic NTK grow with the longest sequence so
    far: only in this order are they right for models other than NeoBERT.
    """

    name: str
    path: str
    rope: str
    jobs: list[Job]

    def load(self, settings: PseudoPerplexityArguments) -> PreTrainedModel:
        config = AutoConfig.from_pretrained(self.path)
        scale_rope(config, self.rope)
        model, info = AutoModelForMaskedLM.from_pretrained(
            self.path, config=config, dtype=getattr(torch, settings.dtype), output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):
            # Transformers would initialise them at random, with a warning that is lost between progress bars.
            raise ValueError(f"{self.path} is no masked language model: it lacks {', '.join(missing[:4])}.")
        return model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()

    def check(self, settings: PseudoPerplexityArguments) -> None:
        """Read the losses that are stored already, and run the model once on its longest sequence."""
        names = ("dtype", "max_length", "min_tokens", "max_documents", "sample", "stride", "seed")
        model, mask_id = self.load(settings), self.jobs[0].mask_id
        shared = {name: getattr(settings, name) for name in names}
        shared["model"] = loaded_fingerprint(model, model.config, mask_id)
        for job in self.jobs:
            job.settings = shared | {"documents": texts_fingerprint(job.texts)}
            job.losses = read_losses(job.file, job.settings)
        longest = self.jobs[-1].texts[-1]
        try:
            masked_losses(model, [(longest, longest.positions[0])], mask_id)
        except (IndexError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{self.name} cannot read a sequence of {len(longest.ids):,} tokens: {error}. Give a smaller "
                "`max_length`, or smaller `lengths`."
            ) from error

    def scores(self) -> list[dict]:
        """The rows of `scores.parquet`, one for each length and document."""
        return [
            {"model": self.name, "rope": self.rope, "cut": job.cut} | row
            for job in self.jobs
            for row in score_texts(job.texts, job.losses)
        ]


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(path, getattr(AutoConfig.from_pretrained(path), "vocab_size", None))
    if tokenizer.mask_token_id is None:
        raise ValueError(f"The tokenizer of {path} has no mask token: pseudo-perplexity is for masked language models.")
    return tokenizer


def read_texts(
    settings: PseudoPerplexityArguments, tokenizer: PreTrainedTokenizerBase
) -> dict[int | None, list[MaskableText]]:
    """The documents at each length, short ones first."""
    texts: dict[int | None, list[MaskableText]] = {length: [] for length in settings.lengths or [None]}
    documents, longest = 0, 0
    stream = stream_text(settings.source, settings.text_column, settings.split, settings.subset)
    for number, row in enumerate(tqdm(stream, "documents", unit="", leave=False)):
        text = row[settings.text_column]
        encoded = tokenizer(text, verbose=False)
        tokens = len(encoded["input_ids"])
        longest = max(longest, tokens)
        if tokens < settings.min_tokens:
            continue
        for length in texts:
            if length is not None and tokens < length:
                continue
            ids = _cut_ids(tokenizer, text, encoded, length or settings.max_length)
            special_ids = tokenizer.all_special_ids
            chosen = choose_positions(number, ids, special_ids, settings.sample, settings.stride, settings.seed)
            if not chosen.maskable:
                raise ValueError(
                    f"Row {number:,} of {settings.source!r} holds nothing to mask, only {tokens} special tokens: "
                    "remove it, or leave short documents out with `min_tokens`."
                )
            texts[length].append(chosen)
        documents += 1
        if documents == settings.max_documents:
            break
    for length, found in texts.items():
        if not found:
            wanted = f"at least {max(settings.min_tokens, length or 0):,} tokens"
            raise ValueError(f"No document of {settings.source!r} has {wanted}; the longest read has {longest:,}.")
        found.sort(key=lambda text: (len(text.ids), text.document))
    return texts


def _cut_ids(tokenizer: PreTrainedTokenizerBase, text: str, encoded: BatchEncoding, length: int | None) -> np.ndarray:
    """Cut the ids of a text as the tokenizer would truncate it, without tokenising the text again if possible."""
    ids = np.array(encoded["input_ids"])
    if length is None or len(ids) <= length:
        return ids
    if not encoded.is_fast:
        # Tokenizers in pure Python do not say which special tokens they have added to the text.
        return np.array(tokenizer(text, truncation=True, max_length=length, verbose=False)["input_ids"])
    # A special token that is spelt in the text itself counts as a token of the text.
    of_text = np.flatnonzero([sequence is not None for sequence in encoded.sequence_ids(0)])
    surplus = len(ids) - length
    return np.delete(ids, of_text[:surplus] if tokenizer.truncation_side == "left" else of_text[-surplus:])


def plan_models(settings: PseudoPerplexityArguments) -> list[ScaledModel]:
    """Every model with every RoPE setting and the texts that it has to score, checked before anything is scored."""
    # First the checks that take no time: is there a RoPE to scale, and a mask token?
    for path in settings.paths.values():
        check_model_exists(path, "models")
        for rope in settings.rope:
            scale_rope(AutoConfig.from_pretrained(path), rope)
    tokenizers = {name: tokenizer_of(path) for name, path in settings.paths.items()}
    models = []
    for name, path in settings.paths.items():
        texts = sorted(read_texts(settings, tokenizers[name]).items())
        mask_id = tokenizers[name].mask_token_id
        for rope in settings.rope:
            folder = Path(settings.output_dir) / name / rope.replace(":", "_")
            jobs = [Job(length, found, mask_id, folder / f"{length or 'whole'}.jsonl") for length, found in texts]
            models.append(ScaledModel(name, path, rope, jobs))
    for model in models:
        model.check(settings)
    return models


def score_all(models: list[ScaledModel], settings: PseudoPerplexityArguments) -> None:
    """Score and store what is missing, with a progress bar."""
    jobs = [job for scaled in models for job in scaled.jobs]
    done, total = sum(job.tokens_scored for job in jobs), sum(job.tokens for job in jobs)
    with tqdm(desc="scoring", initial=done, total=total, unit="token", unit_scale=True) as progress:
        for scaled in models:
            if all(job.tokens_scored == job.tokens for job in scaled.jobs):
                continue
            model = scaled.load(settings)
            for job in scaled.jobs:
                for tokens in job.score(model, settings.batch_tokens):
                    progress.update(tokens)

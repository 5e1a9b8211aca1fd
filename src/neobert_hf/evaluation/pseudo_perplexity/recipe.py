"""The recipe of pseudo-perplexity: its settings, the documents at each length, and the work on each model."""

import re
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.paths import check_file_name, check_model_exists
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.data.tables import stream_text
from neobert_hf.evaluation.pseudo_perplexity.rope_scaling import scale_rope
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
        for entry in self.models:
            if not re.fullmatch("[^/=]+=.+", entry):
                raise ValueError(f"`models` holds {entry!r}; write name=path, the name without a slash.")
            check_file_name(entry.split("=")[0], "A name in `models`")
        if len(self.paths) < len(self.models):
            raise ValueError(f"`models` is {self.models}: give each model a name of its own.")

    @property
    def paths(self) -> dict[str, str]:
        """The path of each model, by name."""
        return dict(entry.split("=", 1) for entry in self.models)


@dataclass
class Job:
    """One model with one RoPE setting on the documents of one length.

    Args:
        model: its name.
        cut: the tokens that documents were cut to; None if they are uncut, or only cut to `max_length`.
        texts: the documents, short ones first.
        file: stores the losses; see `read_losses`.
        settings: everything that the losses depend on.
        losses: those that are known, in the order of `masked_batches`.
    """

    model: str
    path: str
    rope: str
    cut: int | None
    texts: list[MaskableText]
    mask_id: int
    file: Path
    settings: dict
    losses: list[float]

    @property
    def rows(self) -> int:
        """How many losses there are in the end."""
        return sum(len(text.positions) for text in self.texts)

    def score(self, model: PreTrainedModel, batch_tokens: int) -> None:
        """Score and store what is missing, batch by batch."""
        name, done = f"{self.model}, {self.rope}, {self.cut or 'whole'}", len(self.losses)
        with tqdm(desc=name, initial=done, total=self.rows, unit="token") as progress:
            for batch in masked_batches(self.texts, batch_tokens, done):
                losses = masked_losses(model, batch, self.mask_id)
                append_losses(self.file, self.settings, losses)
                self.losses += losses
                progress.update(len(losses))


def plan_jobs(settings: PseudoPerplexityArguments) -> list[Job]:
    """All jobs, with the losses that are stored already. What can be checked without loading a model is checked here.

    Raises:
        SettingsMismatch: if stored losses are of other weights, settings or documents.
    """
    names = ("dtype", "max_length", "min_tokens", "max_documents", "sample", "seed")
    shared = {name: getattr(settings, name) for name in names}
    for path in settings.paths.values():
        check_model_exists(path, "models")
        for rope in settings.rope:
            scale_rope(AutoConfig.from_pretrained(path), rope)
    jobs = []
    for name, path in settings.paths.items():
        tokenizer, weights = tokenizer_of(path), model_fingerprint(path)
        by_length = read_texts(settings, tokenizer)
        for rope in dict.fromkeys(settings.rope):
            for cut, texts in by_length.items():
                file = Path(settings.output_dir, name, rope.replace(":", "_"), f"{cut or 'whole'}.jsonl")
                identity = shared | {"model": weights, "documents": texts_fingerprint(texts)}
                losses = read_losses(file, identity)
                jobs.append(Job(name, path, rope, cut, texts, tokenizer.mask_token_id, file, identity, losses))
    return jobs


def score_all(jobs: list[Job], settings: PseudoPerplexityArguments) -> None:
    """Score and store what is missing, model by model.

    Short texts come first, because in Transformers the frequencies of dynamic NTK grow with the longest sequence so
    far: only in this order are they right for models other than NeoBERT.
    """
    missing = [job for job in jobs if len(job.losses) < job.rows]
    for (path, rope), group in groupby(missing, key=lambda job: (job.path, job.rope)):
        model = load_model(path, rope, settings)
        for job in group:
            job.score(model, settings.batch_tokens)


def load_model(path: str, rope: str, settings: PseudoPerplexityArguments) -> PreTrainedModel:
    """A masked language model with a RoPE setting; ValueError if weights are missing."""
    config = AutoConfig.from_pretrained(path)
    scale_rope(config, rope)
    model, info = AutoModelForMaskedLM.from_pretrained(
        path, config=config, dtype=getattr(torch, settings.dtype), output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        # Transformers would initialise them at random, with a warning that is lost between progress bars.
        raise ValueError(f"{path} is no masked language model: it lacks {', '.join(missing[:4])}.")
    return model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(path, getattr(AutoConfig.from_pretrained(path), "vocab_size", None))
    if tokenizer.mask_token_id is None:
        raise ValueError(f"The tokenizer of {path} has no mask token: pseudo-perplexity is for masked language models.")
    return tokenizer


def read_texts(
    settings: PseudoPerplexityArguments, tokenizer: PreTrainedTokenizerBase
) -> dict[int | None, list[MaskableText]]:
    """The documents at each length, both short ones first."""
    texts: dict[int | None, list[MaskableText]] = {length: [] for length in sorted(settings.lengths) or [None]}
    documents, longest = 0, 0
    stream = stream_text(settings.source, settings.text_column, settings.split, settings.subset)
    for number, text in enumerate(tqdm(stream, "documents", unit="", leave=False)):
        tokens = len(tokenizer(text, verbose=False)["input_ids"])
        longest = max(longest, tokens)
        if tokens < settings.min_tokens:
            continue
        for length, found in texts.items():
            if length is not None and tokens < length:
                continue
            cut = length or settings.max_length
            ids = tokenizer(text, truncation=cut is not None, max_length=cut, verbose=False)["input_ids"]
            special = tokenizer.all_special_ids
            chosen = choose_positions(number, ids, special, settings.sample, settings.seed)
            if not chosen.maskable:
                raise ValueError(
                    f"Row {number:,} of {settings.source!r} holds nothing to mask, only {tokens} special tokens: "
                    "remove it, or leave short documents out with `min_tokens`."
                )
            found.append(chosen)
        documents += 1
        if documents == settings.max_documents:
            break
    for length, found in texts.items():
        if not found:
            wanted = f"at least {max(settings.min_tokens, length or 0):,} tokens"
            raise ValueError(f"No document of {settings.source!r} has {wanted}; the longest read has {longest:,}.")
        found.sort(key=lambda text: (len(text.ids), text.document))
    return texts

"""Pseudo-perplexity of masked language models against sequence length (section 5.3, Figures 2 and 6).

    python examples/pseudo_perplexity.py --models small=runs/small/model --source 'corpus/*.parquet' \\
        --lengths 64 256 1024 --sample 32 --output_dir runs/pseudo_perplexity
    python examples/pseudo_perplexity.py --models neobert=chandar-lab/NeoBERT bert=google-bert/bert-base-uncased \\
        --source articles.jsonl --max_length 512 --output_dir runs/two_models
    python examples/pseudo_perplexity.py --models neobert=chandar-lab/NeoBERT --source articles.jsonl --sample 64 \\
        --lengths 4096 8192 16384 32768 --rope native yarn:4 dynamic:8 --output_dir runs/long

Any masked language model of Transformers, any text; `pip install 'neobert_hf[eval]'`. Of every document each position
is masked in turn, or with `--sample` or `--stride` some of them. Run the same command again after an interruption: at
most one batch is lost, and no position is scored twice. `output_dir` gets `scores.parquet` (a row for each model, RoPE
setting, document and length), `pseudo_perplexity.md` and `pseudo_perplexity.png`. Pseudo-perplexities compare models of
one tokenizer; those of others count other tokens.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.atomic_writes import atomic_write, write_text
from neobert_hf.common.results import ResultError
from neobert_hf.common.settings import parse_config
from neobert_hf.common.text_sources import stream_text
from neobert_hf.evaluation.pseudo_perplexity.report import curves, plot, score_texts, table
from neobert_hf.evaluation.pseudo_perplexity.rope_scaling import parse_rope, scale_rope
from neobert_hf.evaluation.pseudo_perplexity.scoring import (
    MaskableText,
    append_losses,
    choose_positions,
    fingerprint,
    masked_batches,
    masked_losses,
    read_losses,
    texts_fingerprint,
)


@dataclass
class PseudoPerplexityArguments:
    models: list[str] = field(metadata={"help": "name=path or name=Hub id of each masked language model"})
    source: str = field(metadata={"help": "text or Markdown files, Parquet, JSON lines, or a Hub dataset"})
    output_dir: str = field(metadata={"help": "where losses, scores and the plot go"})
    text_column: str = field(default="text", metadata={"help": "that holds the text"})
    split: str = field(default="train", metadata={"help": "of a Hub dataset"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    rope: list[str] = field(
        default_factory=lambda: ["native"],
        metadata={"help": "native, linear:FACTOR, dynamic:FACTOR (NTK), yarn:FACTOR; every model is scored with each"},
    )
    lengths: list[int] = field(
        default_factory=list, metadata={"help": "tokens to cut every document to that has as many; scored at each"}
    )
    max_length: int | None = field(default=None, metadata={"help": "tokens to cut longer documents to; whole if unset"})
    min_tokens: int = field(default=0, metadata={"help": "shorter documents are left out"})
    max_documents: int | None = field(default=None, metadata={"help": "the first so many that are left"})
    sample: int | None = field(default=None, metadata={"help": "random positions of each document; all if unset"})
    stride: int = field(default=1, metadata={"help": "score every so many-th position"})
    seed: int = field(default=0, metadata={"help": "of `sample`"})
    batch_tokens: int = field(default=16384, metadata={"help": "tokens at once, or one sequence; same results"})
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", metadata={"help": "of the models"})
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest there is if unset"})


@dataclass
class Job:
    """One model at one RoPE setting and one length, or None for whole documents."""

    model: str
    path: str
    rope: str
    cut: int | None
    texts: list[MaskableText]
    mask_id: int
    file: Path
    settings: dict = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def tokens(self) -> tuple[int, int]:
        """Tokens that have gone through the model, and that will have in the end."""
        lengths = [len(text.ids) for text in self.texts for _ in text.positions]
        return sum(lengths[: len(self.losses)]), sum(lengths)


def check_settings(settings: PseudoPerplexityArguments) -> dict[str, str]:
    """Returns:
        The path of each model, by name.

    Raises:
        ValueError: naming the setting that makes no sense.
    """
    if settings.lengths and settings.max_length is not None:
        raise ValueError("`lengths` and `max_length` both cut documents: give one of them.")
    if settings.sample is not None and settings.stride != 1:
        raise ValueError("`sample` and `stride` both choose positions: give one of them.")
    lowest = [("lengths", 3, settings.lengths), ("max_length", 3, [settings.max_length])]
    lowest += [("sample", 2, [settings.sample]), ("max_documents", 1, [settings.max_documents])]
    lowest += [("stride", 1, [settings.stride]), ("batch_tokens", 1, [settings.batch_tokens])]
    for name, least, values in lowest:
        for value in values:
            if value is not None and value < least:
                raise ValueError(f"`{name}` is {value}, it must be at least {least}.")
    pairs = [entry.partition("=") for entry in settings.models]
    for entry, (name, _, path) in zip(settings.models, pairs):
        if not name or not path or "/" in name:
            raise ValueError(f"`models` holds {entry!r}; write name=path, the name without a slash.")
    for name, values in (
        ("models", [name for name, _, _ in pairs]),
        ("rope", settings.rope),
        ("lengths", settings.lengths),
    ):
        if repeated := {value for value in values if values.count(value) > 1}:
            raise ValueError(f"`{name}` holds {repeated.pop()} more than once.")
    for setting in settings.rope:
        parse_rope(setting)
    return {name: path for name, _, path in pairs}


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"The tokenizer of {path} has no mask token: pseudo-perplexity is for masked language models.")
    return tokenizer


def read_texts(
    settings: PseudoPerplexityArguments, tokenizer: PreTrainedTokenizerBase
) -> dict[int | None, list[MaskableText]]:
    """The documents at each length, short ones first.

    Raises:
        ValueError: if a document holds nothing to mask, or there is none of a length.
    """
    texts: dict[int | None, list[MaskableText]] = {length: [] for length in settings.lengths or [None]}
    documents, longest = 0, 0
    stream = stream_text(settings.source, settings.text_column, settings.split, settings.subset)
    for row, text in enumerate(tqdm((one[settings.text_column] for one in stream), "documents", unit="", leave=False)):
        tokens = len(tokenizer(text or "", verbose=False)["input_ids"])
        if tokens < settings.min_tokens:
            continue
        for length in texts:
            if length is not None and tokens < length:
                continue
            cut = length or settings.max_length
            ids = tokenizer(text or "", truncation=cut is not None, max_length=cut, verbose=False)["input_ids"]
            special_ids = tokenizer.all_special_ids
            chosen = choose_positions(row, np.array(ids), special_ids, settings.sample, settings.stride, settings.seed)
            if not chosen.maskable:
                raise ValueError(
                    f"Row {row:,} of {settings.source!r} holds nothing to mask, only {tokens} special tokens: remove "
                    "it, or leave short documents out with `min_tokens`."
                )
            texts[length].append(chosen)
        documents, longest = documents + 1, max(longest, tokens)
        if documents == settings.max_documents:
            break
    for length, found in texts.items():
        if not found:
            wanted = f"at least {max(settings.min_tokens, length or 0):,} tokens"
            raise ValueError(f"No document of {settings.source!r} has {wanted}; the longest read has {longest:,}.")
        found.sort(key=lambda text: (len(text.ids), text.document))
    return texts


def load_model(settings: PseudoPerplexityArguments, path: str, rope: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path)
    scale_rope(config, rope)
    model = AutoModelForMaskedLM.from_pretrained(path, config=config, dtype=getattr(torch, settings.dtype))
    return model.to(settings.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def plan(settings: PseudoPerplexityArguments, paths: dict[str, str]) -> list[Job]:
    """All that is to be scored; of each model and RoPE setting the short texts first.

    That order gives other models than NeoBERT their right frequencies with dynamic NTK, which in Transformers grow with
    the longest sequence so far.
    """
    for path in paths.values():
        for rope in settings.rope:
            scale_rope(AutoConfig.from_pretrained(path), rope)
    tokenizers = {name: load_tokenizer(path) for name, path in paths.items()}
    jobs = []
    for name, path in paths.items():
        texts = read_texts(settings, tokenizers[name])
        for rope in settings.rope:
            folder = Path(settings.output_dir) / name / rope.replace(":", "_")
            for length, found in sorted(texts.items()):
                file = folder / f"{length or 'whole'}.jsonl"
                jobs.append(Job(name, path, rope, length, found, tokenizers[name].mask_token_id, file))
    return jobs


def by_model(jobs: list[Job]) -> Iterator[list[Job]]:
    """Jobs that share a model and its RoPE setting."""
    for key in dict.fromkeys((job.model, job.rope) for job in jobs):
        yield [job for job in jobs if (job.model, job.rope) == key]


def check_jobs(settings: PseudoPerplexityArguments, jobs: list[Job]) -> None:
    """Read the losses that are there already, and let every model read its longest sequence once.

    Raises:
        ResultError: if they were made with other settings.
        ValueError: if a model cannot read a sequence of that length.
    """
    names = ("dtype", "max_length", "min_tokens", "max_documents", "sample", "stride", "seed")
    common = {name: getattr(settings, name) for name in names}
    for group in by_model(jobs):
        model, longest = load_model(settings, group[0].path, group[0].rope), group[-1].texts[-1]
        own = common | {"model": fingerprint(model, group[0].mask_id)}
        for job in group:
            job.settings = own | {"documents": texts_fingerprint(job.texts)}
            job.losses = read_losses(job.file, job.settings)
        try:
            masked_losses(model, [(longest, longest.positions[0])], group[0].mask_id)
        except (IndexError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{group[0].model} cannot read a sequence of {len(longest.ids):,} tokens: {error}. Give a smaller "
                "`max_length`, or smaller `lengths`."
            ) from error


def score(model: PreTrainedModel, job: Job, batch_tokens: int, progress: tqdm) -> None:
    """Score what is missing of a job."""
    for batch in masked_batches(job.texts, batch_tokens, len(job.losses)):
        losses = masked_losses(model, batch, job.mask_id)
        append_losses(job.file, job.settings, len(job.losses), losses)
        job.losses += losses
        progress.update(len(batch) * len(batch[0][0].ids))


def main(args: list[str] | None = None) -> None:
    # 1. Settings, documents and models; nothing is scored before all of them are found right
    (settings,) = parse_config(PseudoPerplexityArguments, args=args)
    jobs = plan(settings, check_settings(settings))
    check_jobs(settings, jobs)

    # 2. Losses, from where they stand
    done, total = map(sum, zip(*(job.tokens() for job in jobs)))
    with tqdm(desc="scoring", initial=done, total=total, unit="token", unit_scale=True) as progress:
        for group in by_model(jobs):
            model = load_model(settings, group[0].path, group[0].rope)
            for job in group:
                score(model, job, settings.batch_tokens, progress)

    # 3. Scores, table and plot
    scores = [
        {"model": job.model, "rope": job.rope, "cut": job.cut} | row
        for job in jobs
        for row in score_texts(job.texts, job.losses)
    ]
    output, points = Path(settings.output_dir), curves(scores)
    with atomic_write(output / "scores.parquet") as partial:
        Dataset.from_list(scores).to_parquet(partial)
    plot(points, output / "pseudo_perplexity.png")
    text = "Pseudo-perplexity, geometric mean over documents:\n\n" + table(points)
    write_text(output / "pseudo_perplexity.md", text)
    print(text + f"\n{output}: scores.parquet, pseudo_perplexity.md, pseudo_perplexity.png")


if __name__ == "__main__":
    try:
        main()
    except ResultError as error:
        sys.exit(str(error))

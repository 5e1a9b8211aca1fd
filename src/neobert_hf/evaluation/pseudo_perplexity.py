"""Pseudo-perplexity of masked language models against length (paper, section 5.3 and appendix E, Figures 2 and 6).

Each token of a sequence is masked in turn and predicted from all the others: exp of the mean cross-entropy is the
pseudo-perplexity of the sequence (Salazar et al., 2020, arXiv 1910.14659). A sequence of n tokens takes n forward
passes over n tokens; some random positions of each sequence give an estimate.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from datasets import Dataset
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from neobert_hf.common.files import write_parquet, write_png, write_text
from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.common.paths import check_complete, check_file_name
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.report import markdown_table
from neobert_hf.common.run import output_folder
from neobert_hf.common.settings import check_numbers
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.data.parts import Part, do_parts
from neobert_hf.data.sources import name_of, stream_text


# Documents are scored in parts of about so many positions; an interruption loses one part at most.
POSITIONS_OF_PART = 1_000


@dataclass
class PseudoPerplexityArguments:
    """Models, documents, and how they are scored."""

    models: list[str] = field(
        metadata={"help": "name=path or name=Hub id of each masked language model", "path": "name=or Hub id"}
    )
    source: str = field(
        metadata={"help": "text or Markdown files, Parquet, JSON lines, CSV, or a Hub dataset", "path": "or Hub id"}
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
    batch_tokens: int = field(
        default=16384, metadata={"help": "tokens of a batch (at least one sequence); does not change results"}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "dtype of the models"}
    )
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest available if unset"})

    def __post_init__(self):
        counts = ("lengths", "max_length", "max_documents", "sample", "batch_tokens")
        check_numbers(self, dict.fromkeys(counts, "1 or more"))
        if self.lengths and self.max_length is not None:
            raise ValueError("`lengths` and `max_length` both cut documents: give one of them.")
        for entry in self.models:
            if "=" not in entry:
                raise ValueError(f"`models` holds {entry!r}; write name=path.")
            check_file_name(entry.split("=")[0], "A name in `models`")
        if len(self.paths) < len(self.models):
            raise ValueError(f"`models` is {self.models}: give each model a name of its own.")

    @property
    def paths(self) -> dict[str, str]:
        """The path of each model, by name."""
        return dict(entry.split("=", 1) for entry in self.models)


@recipe
def pseudo_perplexity(settings: PseudoPerplexityArguments) -> Result:
    """Pseudo-perplexity of masked language models against sequence length (section 5.3, Figures 2 and 6).

    This measures any masked language model of Transformers on any text. Every position of a document is masked in turn,
    or only some of them with `sample`. Called again after an interruption, it does not score again what it has stored.
    `output_dir` gets `scores.parquet` (a row for each model, RoPE setting, document and length), `pseudo_perplexity.md`
    and `pseudo_perplexity.png`. Compare only models with the same tokenizer: another tokenizer divides a text into
    other tokens.

    Returns:
        `output`: the folder; `scores`: the pseudo-perplexity by model (and RoPE setting) and length, see `curves`.
    """
    output = Path(settings.output_dir)
    writes = (*settings.paths, "scores.parquet", "pseudo_perplexity.md", "pseudo_perplexity.png")
    inputs, sources = {"models": list(settings.paths.values())}, {"source": settings.source}
    with output_folder(output, "pseudo_perplexity", writes, inputs, sources):
        # 1. Models and their RoPE, which are checked before one is scored
        check_models(settings)

        # 2. Losses, of what an earlier run has not stored
        scores = score_models(settings)

        # 3. Scores, table and plot
        points = curves(scores)
        print(write_report(output, scores, points))
        print(f"{output}: scores.parquet, pseudo_perplexity.md, pseudo_perplexity.png", flush=True)
    by_length = {name: {length: value for length, (_, value) in curve.items()} for name, curve in points.items()}
    return Result(output=output, scores=by_length)


# Documents and their masked positions.


@dataclass
class MaskableText:
    """A document as model input, and the positions to score.

    Args:
        document: its row in the source.
        ids: int64 (tokens,), with special tokens.
        positions: ascending; never those of special tokens.
    """

    document: int
    ids: np.ndarray
    positions: np.ndarray


def choose_positions(
    document: int, ids: Sequence[int], special_ids: list[int], sample: int | None = None
) -> MaskableText:
    """All positions of a document, or `sample` random ones that depend only on its row."""
    ids = np.asarray(ids)
    positions = np.flatnonzero(~np.isin(ids, special_ids))
    if sample is not None and sample < len(positions):
        positions = np.sort(np.random.default_rng([0, document]).choice(positions, sample, replace=False))
    return MaskableText(document, ids, positions)


def read_documents(
    settings: PseudoPerplexityArguments, tokenizer: PreTrainedTokenizerBase
) -> dict[int | None, list[MaskableText]]:
    """The documents to score at each of `lengths`: those that are as long, cut to it. At None all, cut to `max_length`.

    Short ones come first.

    Raises:
        ValueError: if no document is long enough, or a document has nothing to mask.
    """
    documents, longest = [], 0
    stream = stream_text(settings.source, settings.text_column, settings.split, settings.subset)
    for row, text in enumerate(tqdm(stream, "documents", unit="", leave=False)):
        tokens = len(tokenizer(text, verbose=False)["input_ids"])
        longest = max(longest, tokens)
        if tokens >= settings.min_tokens:
            documents.append((row, text, tokens))
        if len(documents) == settings.max_documents:
            break
    found: dict[int | None, list[MaskableText]] = {}
    for length in sorted(settings.lengths) or [None]:
        if longest < (wanted := max(settings.min_tokens, length or 0)) or not documents:
            reason = f"the longest read has {longest:,}"
            raise ValueError(f"No document of {name_of(settings.source)!r} has {wanted:,} tokens; {reason}.")
        cut = length or settings.max_length
        found[length] = []
        for row, text, tokens in documents:
            if tokens < (length or 0):
                continue
            ids = tokenizer(text, truncation=cut is not None, max_length=cut, verbose=False)["input_ids"]
            chosen = choose_positions(row, ids, tokenizer.all_special_ids, settings.sample)
            if not len(chosen.positions):
                raise ValueError(
                    f"Row {row:,} of {name_of(settings.source)!r} holds nothing to mask, only {tokens} special tokens: "
                    "remove it, or leave short documents out with `min_tokens`."
                )
            found[length].append(chosen)
        found[length].sort(key=lambda text: (len(text.ids), text.document))
    return found


def masked_batches(texts: Sequence[MaskableText], batch_tokens: int) -> Iterator[list[tuple[MaskableText, int]]]:
    """Batches of rows (text and position): as many as the budget holds, at least one.

    All rows of a batch have the same length. So nothing is padded, and dynamic NTK, which scales by the longest row,
    scales every text by its own length.
    """
    rows = ((text, position) for text in texts for position in text.positions)
    for length, group in groupby(rows, key=lambda row: len(row[0].ids)):
        while batch := list(islice(group, max(1, batch_tokens // length))):
            yield batch


# The model.


def scale_rope(config: PreTrainedConfig, setting: str) -> None:
    """Set a RoPE scaling in a config, relative to the length that the model was pretrained with.

    That length is `max_position_embeddings` (`max_length` of NeoBERT). Local layers with a RoPE of their own
    (ModernBERT) keep it: they never attend farther than in pretraining.

    Args:
        config: config of a model; changed in place.
        setting: `native`, which changes nothing, or type and factor: `linear:2` (positions divided, Chen et al., 2023,
            arXiv 2306.15595), `dynamic:8` (NTK-aware, by the sequence's length), `yarn:4` (Peng et al., 2023, arXiv
            2309.00071).

    Raises:
        ValueError: if there is no such setting, or the model has no RoPE, or one that is scaled already.
    """
    if setting == "native":
        return
    match = re.fullmatch(r"(linear|dynamic|yarn):(\d+\.?\d*)", setting)
    if not match or float(match[2]) <= 1:
        raise ValueError(
            f"`rope` holds {setting!r}; give native, or linear, dynamic or yarn with a factor above 1, such as yarn:4."
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    stored = parameters.get("full_attention", parameters)
    if not getattr(config, "rope", True) or stored.get("rope_type") != "default":
        raise ValueError(
            f"`rope` holds {setting!r}, but the {config.model_type} has no unscaled RoPE, only {stored}. Use native."
        )
    scaled = stored | {"rope_type": match[1], "factor": float(match[2])}
    config.rope_parameters = parameters | {"full_attention": scaled} if stored is not parameters else scaled
    config.standardize_rope_params()


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


@torch.inference_mode()
def masked_losses(model: PreTrainedModel, batch: list[tuple[MaskableText, int]], mask_id: int) -> list[float]:
    """Cross-entropy, in nats, of the masked token of each row."""
    ids = torch.from_numpy(np.stack([text.ids for text, _ in batch])).to(model.device)
    positions = torch.tensor([int(position) for _, position in batch], device=model.device)
    rows = torch.arange(len(batch), device=model.device)
    targets = ids[rows, positions]
    ids[rows, positions] = mask_id

    def keep_masked(module, args, output):
        # The logits of all positions would fill the memory.
        output.last_hidden_state = output.last_hidden_state[rows, positions].unsqueeze(1)
        return output

    with model.base_model.register_forward_hook(keep_masked):
        logits = model(input_ids=ids).logits[:, 0]
    losses = F.cross_entropy(logits.float(), targets, reduction="none").tolist()
    if not all(map(math.isfinite, losses)):
        raise FloatingPointError(f"Losses of document {batch[0][0].document} are not finite. Set `dtype` to float32.")
    return losses


# The work, which an interruption may end at any time.


def check_models(settings: PseudoPerplexityArguments) -> None:
    """Check all models before one is scored.

    Raises:
        OSError: if there is no such model.
        ValueError: if a tokenizer has no mask token, or a RoPE cannot be scaled.
    """
    for path in settings.paths.values():
        check_complete(path, "models")
        tokenizer_of(path)
        for rope in settings.rope:
            scale_rope(AutoConfig.from_pretrained(path), rope)


def score_models(settings: PseudoPerplexityArguments) -> list[dict[str, Any]]:
    """Score all documents with every model and RoPE setting; what an earlier run has stored is not scored again.

    Returns:
        The rows of `scores.parquet`, one for each model, RoPE setting, length and document.

    Raises:
        SettingsMismatch: if stored losses are of other weights, settings or documents.
    """
    names, rows = ("dtype", "max_length", "min_tokens", "max_documents", "sample"), []
    for name, path in settings.paths.items():
        tokenizer, weights = tokenizer_of(path), model_fingerprint(path)
        by_length = read_documents(settings, tokenizer)
        for rope in settings.rope:
            # Loaded when the first part is scored.
            work = {"load": cache(partial(load_model, path, rope, settings)), "mask_id": tokenizer.mask_token_id}
            # Short texts come first, because in Transformers the frequencies of dynamic NTK grow with the longest
            # sequence so far: only so are they right for models other than NeoBERT.
            for cut, texts in by_length.items():
                masked = [part for text in texts for part in ([text.document], text.ids, text.positions)]
                identity = {each: getattr(settings, each) for each in names}
                identity |= {"model": weights, "documents": fingerprint(*masked)}
                folder = str(Path(settings.output_dir, name, rope.replace(":", "_"), str(cut or "whole")))
                size = max(1, POSITIONS_OF_PART // max(len(text.positions) for text in texts))
                starts = range(0, len(texts), size)
                plan = [Part(number, "documents", first, size) for number, first in enumerate(starts)]
                work |= {"texts": texts, "batch_tokens": settings.batch_tokens}
                do_parts(plan, partial(score_part, **work), folder, identity)
                for row in chain(*(pq.read_table(part.path(folder, "parquet")).to_pylist() for part in plan)):
                    losses = row.pop("losses")
                    mean = float(np.mean(losses))
                    row |= {"positions": len(losses), "mean_loss": mean, "pseudo_perplexity": math.exp(mean)}
                    rows.append({"model": name, "rope": rope, "cut": cut, **row})
    return rows


def score_part(
    part: Part, texts: list[MaskableText], load: Callable[[], PreTrainedModel], mask_id: int, batch_tokens: int
) -> tuple[pa.Table, dict[str, Any]]:
    """The losses of each document of a part, in the order of its positions."""
    texts, losses = texts[part.first_row : part.first_row + part.rows], []
    sizes = [len(text.positions) for text in texts]
    with tqdm(total=sum(sizes), unit="token", leave=False) as progress:
        for batch in masked_batches(texts, batch_tokens):
            losses += masked_losses(load(), batch, mask_id)
            progress.update(len(batch))
    found = {"document": [text.document for text in texts], "tokens": [len(text.ids) for text in texts]}
    return pa.table(found | {"losses": np.split(losses, np.cumsum(sizes)[:-1])}), {}


# The report.


# By model and RoPE setting, then by length: the number of documents and their pseudo-perplexity.
Curves = dict[str, dict[int, tuple[int, float]]]


def curves(scores: list[dict]) -> Curves:
    """The curves of Figure 2.

    The length is what documents were cut to, or else the next power of two. A point is the geometric mean of the
    documents' pseudo-perplexities, exp of the mean of their losses: the few worst documents would dominate an
    arithmetic mean.

    Args:
        scores: rows of `scores.parquet`.
    """
    losses: dict[str, dict[int, list[float]]] = {}
    for row in scores:
        name = row["model"] if row["rope"] == "native" else f"{row['model']}, {row['rope']}"
        length = row["cut"] or 2 ** math.ceil(math.log2(row["tokens"]))
        losses.setdefault(name, {}).setdefault(length, []).append(row["mean_loss"])
    return {
        name: {length: (len(values), math.exp(np.mean(values))) for length, values in sorted(by_length.items())}
        for name, by_length in losses.items()
    }


def write_report(output: Path, scores: list[dict], points: Curves) -> str:
    """Write `scores.parquet`, `pseudo_perplexity.md` and `pseudo_perplexity.png`; returns the Markdown."""
    write_parquet(output / "scores.parquet", Dataset.from_list(scores))
    lengths = sorted({length for curve in points.values() for length in curve})
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in points.items():
        axes.plot(curve.keys(), [perplexity for _, perplexity in curve.values()], label=name, marker="o", markersize=3)
    axes.set(xlabel="length (tokens)", ylabel="pseudo-perplexity", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.legend(fontsize="small")
    write_png(output / "pseudo_perplexity.png", figure)
    rows = []
    for name, curve in points.items():
        cells = {length: f"{perplexity:,.1f} ({count:,})" for length, (count, perplexity) in curve.items()}
        rows.append([name, *(cells.get(length, "-") for length in lengths)])
    table = markdown_table(["tokens", *(f"{length:,}" for length in lengths)], rows)
    text = "\n".join(["Pseudo-perplexity, geometric mean over documents (how many):", "", *table, ""])
    write_text(output / "pseudo_perplexity.md", text)
    return text

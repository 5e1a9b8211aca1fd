"""The steps of examples/extend_length.py: a model is trained on longer texts, with new rotary frequencies."""

import json
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.fingerprints import is_held_out
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.common.settings import Count, CountOrZero, PathOrId, Positive, Range, Share, check_ranges
from neobert_hf.common.text_sources import stream_text
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.pretraining.arguments import DataArguments
from neobert_hf.pretraining.raw_text import RawTextSettings


SCALED, THETA, NATIVE = ("yarn", "linear"), "theta", "native"
# The mixture of the paper's second stage (section 3.2): minimum share of the new length, and probability of the subset.
MIXTURE = {0.0: 0.2, 0.25: 0.4, 0.5: 0.4}


@dataclass(kw_only=True)
class LengthSettings(RawTextSettings):
    """How long the texts may become, and on which text the model is trained for that."""

    model: PathOrId = field(metadata={"help": "a masked language model of NeoBERT: path or Hub id"})
    text: PathOrId = field(
        metadata={"help": "long texts: a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    max_length: Annotated[int, Range(16)] = field(metadata={"help": "the new maximum of tokens in a text"})
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})
    text_subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    rope: str = field(
        default="yarn",
        metadata={"help": "yarn or linear, scaled by the growth in length; theta:NUMBER, a new base; or native"},
    )
    epochs: Positive = field(default=1.0, metadata={"help": "over the text, unless `max_steps` comes first"})
    measured_documents: Count = field(
        default=32, metadata={"help": "held-out documents of full length that are measured before and after training"}
    )
    sample: Annotated[int, Range(2)] = field(
        default=16, metadata={"help": "positions of each document that pseudo-perplexity masks, at each length"}
    )
    facts: Annotated[int, Range(2)] = field(
        default=64, metadata={"help": "number of facts to find in texts of each length"}
    )
    global_batch_tokens: Annotated[int, Range(8)] = field(
        default=2**17, metadata={"help": "tokens of an optimizer step"}
    )
    min_lengths: list[CountOrZero] | None = field(
        default=None,
        metadata={"help": "for each subset, the fewest tokens; 0, a quarter and half of the length if unset"},
    )
    probabilities: list[Share] | None = field(
        default=None, metadata={"help": "probability of drawing each subset; 0.2, 0.4 and 0.4 if unset"}
    )

    def __post_init__(self):
        check_ranges(self)
        if self.min_lengths is None:
            self.min_lengths = [int(share * self.max_length) for share in MIXTURE]
        if self.probabilities is None:
            self.probabilities = list(MIXTURE.values())
        super().__post_init__()
        self.accumulation_steps(1)

    def lengths(self, trained: int) -> list[int]:
        """The lengths to measure at: half of the trained length, then doubled each time, up to the new length."""
        lengths = [max(16, trained // 2)]
        while lengths[-1] < self.max_length:
            lengths.append(min(2 * lengths[-1], self.max_length))
        return lengths


def new_config(settings: LengthSettings, config: NeoBERTConfig) -> dict:
    """What changes in the model's config: its length and its rotary frequencies.

    Raises:
        ValueError: if the model has no RoPE or already has this length, or if `rope` is invalid for it.
    """
    if not config.rope:
        raise ValueError(f"`model` {settings.model} has learned positions, which end at {config.max_length:,} tokens.")
    if settings.max_length <= config.max_length:
        raise ValueError(
            f"`max_length` is {settings.max_length:,}, but {settings.model} was trained with {config.max_length:,} "
            "tokens already: it must be more."
        )
    stored, kind = config.rope_parameters, settings.rope
    length = {"max_length": settings.max_length}
    if kind == NATIVE:
        return length
    if stored["rope_type"] != "default":
        raise ValueError(f"`rope`: the RoPE of {settings.model} is scaled already, {stored}. Set `rope` to {NATIVE}.")
    if kind in SCALED:
        scaled = {"rope_type": kind, "factor": settings.max_length / config.max_length}
        known = {"original_max_position_embeddings": config.max_length} if kind == "yarn" else {}
        return length | {"rope_parameters": {"rope_theta": stored["rope_theta"]} | scaled | known}
    name, _, number = kind.partition(":")
    if name != THETA or not number.replace(".", "", 1).isdecimal() or float(number) <= 0:
        raise ValueError(
            f"`rope` is {kind!r}; it must be {', '.join(SCALED)}, {NATIVE}, or {THETA}: and a number above 0, such as "
            f"{THETA}:160000."
        )
    return length | {"rope_parameters": {"rope_type": "default", "rope_theta": float(number)}}


def untrained_rope(settings: LengthSettings, config: NeoBERTConfig) -> list[str]:
    """The RoPE settings of the measurement before training, in the notation of pseudo_perplexity.py."""
    return [NATIVE, *([f"{settings.rope}:{settings.max_length / config.max_length:g}"] * (settings.rope in SCALED))]


def held_out_texts(settings: LengthSettings, output: Path) -> Path:
    """Write the held-out documents that are measured to a file of their own, uncut."""
    # Written again at every start: a file of an interrupted run may come from other settings or another text.
    file = output / "data" / "held_out.jsonl"
    rows = stream_text(settings.text, settings.text_column, subset=settings.text_subset)
    texts = (row[settings.text_column] or "" for row in rows)
    held_out = (text for text in texts if is_held_out(text, settings.held_out_share))
    lines = (json.dumps({"text": text}) + "\n" for text in islice(held_out, settings.held_out_documents))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(lines))
    return file


def prepare_long_text(settings: LengthSettings, output: Path) -> DataArguments:
    """Tokenise the text into `data/`, held-out documents separately; return the settings of folders and mixture."""
    text = (settings.text, settings.text_column, settings.model, settings.max_length)
    # The held-out part comes first: it is small, so problems of a text show before much work is done.
    parts = ("held_out", "train")
    places = {
        part: settings.prepare_part(part, output / "data" / part, *text, subset=settings.text_subset) for part in parts
    }
    return DataArguments(
        **settings.of_batches(),
        train_data=places["train"],
        validation_data=places["held_out"],
        max_length=settings.max_length,
        init_from=settings.model,
    )


def write_length_report(
    settings: LengthSettings, measured: dict[str, dict[int, dict]], steps: int, output: Path
) -> str:
    """Write `report.md`, `report.json` and `lengths.png`.

    Args:
        measured: what `measure_reading` returns, by state of the model and length.
        steps: the training steps.

    Returns:
        The Markdown.
    """
    lengths = sorted({length for each in measured.values() for length in each})
    head = ["", *(f"{length:,}" for length in lengths)]
    perplexities, facts = (
        [[state, *(written.format(points[length][key]) for length in lengths)] for state, points in measured.items()]
        for key, written in (("pseudo_perplexity", "{:,.1f}"), ("found", "{:.0%}"))
    )
    lines = [
        "# Trained with longer texts",
        "",
        f"{settings.model} on {settings.text}: {steps:,} steps of {settings.global_batch_tokens:,} tokens, up to "
        f"{settings.max_length:,} a text, `rope` {settings.rope}.",
        "",
        "![by length](lengths.png)",
        "",
        "Pseudo-perplexity of held-out documents, by the number of tokens that the model reads (lower is better):",
        "",
        *markdown_table(head, perplexities),
        "",
        "Facts found, by tokens of the text: a statement is somewhere in the text, a question is at its end, and the "
        "model must choose the right one of 100 words (1% by chance):",
        "",
        *markdown_table(head, facts),
    ]
    panels = []
    for key, title in (("pseudo_perplexity", "pseudo-perplexity"), ("found", "share of the facts found")):
        curves = [
            Line([(length, each[key]) for length, each in points.items()], state, {"marker": "o"})
            for state, points in measured.items()
        ]
        panels.append(Panel(curves, {"xlabel": "length (tokens)", "ylabel": title}, lengths))
    plot_lines(output / "lengths.png", panels)
    write_json(output / "report.json", {"measured": measured, "steps": steps})
    text = "\n".join(lines) + "\n"
    write_text(output / "report.md", text)
    return text

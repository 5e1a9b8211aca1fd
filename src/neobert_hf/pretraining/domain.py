"""The steps of examples/adapt_domain.py: train a model on the text of a domain, and measure it before and after."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from neobert_hf.common.atomic_writes import atomic_folder, write_json, write_text
from neobert_hf.common.fingerprints import checkpoint_fingerprint, is_held_out, value_checksum
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import CountOrZero, PathOrId, Positive, Range, check_needed
from neobert_hf.common.text_sources import describe_files, local_files, stream_text
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining.adapting import load_masked_lm, read_start
from neobert_hf.pretraining.arguments import DataArguments
from neobert_hf.pretraining.batches import DocumentKey
from neobert_hf.pretraining.raw_text import RawTextSettings
from neobert_hf.pretraining.recipe import plot_curves
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.pretraining.vocabulary import add_words, choose_words


# This file is in the folder of a model with new words.
WORDS = "new_words.json"
# How many tokens around a mask the report shows, and how many guesses for each mask.
SHOWN, GUESSES = 48, 5
# The metrics of held-out text in the report, each with its number of digits.
METRICS, TIMES = {"loss": 3, "perplexity": 1}, ("before", "after")


@dataclass(kw_only=True)
class DomainSettings(RawTextSettings):
    """Which model is adapted, and to which text."""

    model: PathOrId = field(metadata={"help": "a masked language model of NeoBERT: path or Hub id"})
    domain: PathOrId = field(
        metadata={"help": "the domain: a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    general: PathOrId | None = field(
        default=None, metadata={"help": "general text like that of pretraining: the same kinds of sources"}
    )
    domain_column: str = field(default="text", metadata={"help": "column of the domain that holds the text"})
    general_column: str = field(default="text", metadata={"help": "column of the general text"})
    domain_subset: str | None = field(
        default=None, metadata={"help": "configuration of a Hub dataset that has several"}
    )
    general_subset: str | None = field(default=None, metadata={"help": "the same for the general text"})
    general_documents: Annotated[int, Range(2)] | None = field(
        default=None, metadata={"help": "number of general documents to replay from; all if unset"}
    )
    held_out_documents: Annotated[int, Range(2)] = field(
        default=1000, metadata={"help": "how many of them are evaluated at most"}
    )
    new_words: CountOrZero = field(
        default=0, metadata={"help": "number of words of the domain to add to a WordPiece vocabulary"}
    )
    epochs: Positive = field(default=4.0, metadata={"help": "over the domain, unless `max_steps` comes first"})
    replay_share: Annotated[float, Range(0, below=1)] = field(
        default=0.25, metadata={"help": "share of the micro-batches that is general text"}
    )
    global_batch_tokens: Annotated[int, Range(8)] = field(
        default=2**16, metadata={"help": "tokens of an optimizer step"}
    )
    micro_batch_tokens: Annotated[int, Range(8)] = field(default=2**13, metadata={"help": "tokens of one forward pass"})

    def __post_init__(self):
        super().__post_init__()
        self.accumulation_steps(1)

    def check_texts(self) -> None:
        """Check the settings that name the texts, before any work."""
        if self.replay_share and self.general is None:
            raise ValueError(
                f"`replay_share` is {self.replay_share}, but `general` names no text to replay: name some, or set "
                "`replay_share` to 0. The model then forgets more, and how much is not measured."
            )
        check_needed(self, "general", ("general_subset", "general_documents"))
        names = [
            (getattr(self, name), getattr(self, f"{name}_column"), getattr(self, f"{name}_subset"))
            for name in ("domain", "general")
        ]
        if names[0] == names[1]:
            raise ValueError(
                f"`general` is the domain itself, {self.domain!r}: name text of the kind that the model already knows, "
                "or leave it out and set `replay_share` to 0."
            )
        for source in filter(None, (self.domain, self.general)):
            local_files(source)


def start_model(settings: DomainSettings, output: Path) -> tuple[NeoBERTForMaskedLM, str]:
    """The model that training starts from, and its path: with `new_words` this is `start/`, a copy that has the words.

    Raises:
        FileNotFoundError, ValueError: if `start/` was made with other settings, or the text or model does not exist.
            For more, see `choose_words`.
    """
    settings.check_texts()
    model = load_masked_lm(settings.model)
    if not settings.new_words:
        return model, settings.model
    start = output / "start"
    made_of = {"model": checkpoint_fingerprint(settings.model), "new_words": settings.new_words}
    made_of |= {"held_out_share": settings.held_out_share}
    text = [settings.domain, settings.domain_column, describe_files(settings.domain)]
    text += [settings.domain_subset] if settings.domain_subset else []
    made_of |= {"domain_fingerprint": value_checksum(text)}
    if not (start / WORDS).is_file():
        tokenizer = load_tokenizer(settings.model, model.config.vocab_size)
        column, share = settings.domain_column, settings.held_out_share
        rows = stream_text(settings.domain, column, subset=settings.domain_subset)
        texts = (row[column] or "" for row in rows)
        texts = (text for text in texts if not is_held_out(text, share))
        words, counted = choose_words(texts, tokenizer, settings.new_words)
        with atomic_folder(start) as partial:
            add_words(model, tokenizer, words, partial)
            write_json(partial / WORDS, {"made_of": made_of, "words": list(words), **counted})
    read_start(start / WORDS, made_of)
    # Loaded again even if it was just made: where weights lie in memory may change how their products are rounded.
    return load_masked_lm(str(start)), str(start)


def prepare_text(settings: DomainSettings, start: str, max_length: int, output: Path) -> DataArguments:
    """Tokenise both texts into `data/`, held-out documents separately; return the settings that name the folders."""
    sources = {
        "domain": (settings.domain, settings.domain_column, settings.domain_subset, None),
        "general": (settings.general, settings.general_column, settings.general_subset, settings.general_documents),
    }
    # The held-out part comes first: it is small, so problems of a text show before much work is done.
    parts = [("domain", "held_out"), *([("general", "held_out")] if settings.general else []), ("domain", "train")]
    parts += [("general", "train")] if settings.replay_share else []
    folders = {part: str(output / "data" / "_".join(part)) for part in parts}
    places = DataArguments(
        **settings.of_batches(),
        train_data=folders["domain", "train"],
        validation_data=folders["domain", "held_out"],
        replay_data=folders.get(("general", "train")),
        replay_validation_data=folders.get(("general", "held_out")),
        max_length=max_length,
        init_from=start,
    )
    for (name, part), folder in folders.items():
        source, column, subset, limit = sources[name]
        settings.prepare_part(part, Path(folder), source, column, start, max_length, limit, subset)
    return places


class Looks:
    """Measures a model on the held-out documents, before and after training.

    In each of two documents one word is hidden: the longest one-token word near the middle of its first tokens. This
    choice does not depend on a model.
    """

    def __init__(self, trainer: MLMTrainer):
        self.trainer, self.tokenizer = trainer, trainer.data.tokenizer
        documents = trainer.data.held_out.documents
        rows = sum(documents.shard_sizes)
        keys = [DocumentKey(row, 0, 0) for row in sorted({0, rows // 2})]
        self.masks = [mask for row in documents.__getitems__(keys) if (mask := self._hide(row["input_ids"][:SHOWN]))]

    def _hide(self, ids: np.ndarray) -> tuple[torch.Tensor, int] | None:
        tokens = [*self.tokenizer.convert_ids_to_tokens(ids.tolist()), ""]
        # Words with some text before and after them.
        inner = range(len(ids) // 4, 3 * len(ids) // 4)
        words = [number for number in inner if tokens[number].isalpha() and tokens[number + 1][:2] != "##"]
        return (torch.from_numpy(ids), max(words, key=lambda number: len(tokens[number]))) if words else None

    @torch.no_grad()
    def look(self) -> dict:
        """The held-out metrics (see `MLMTrainer.measure`) and the `guesses` for each mask."""
        found, model = self.trainer.measure(), self.trainer.model
        guesses = []
        for ids, position in self.masks:
            hidden = ids.clone()
            hidden[position] = self.tokenizer.mask_token_id
            best = model(hidden[None].to(model.device)).logits[0, position].float().softmax(-1).topk(GUESSES)
            tokens = self.tokenizer.convert_ids_to_tokens(best.indices.tolist())
            guesses.append([f"{token} {share:.2f}" for token, share in zip(tokens, best.values.tolist())])
        return found | {"guesses": guesses}

    def examples(self) -> list[tuple[str, str]]:
        """The text around each mask, with [MASK] in it, and the hidden word."""
        shown = []
        for ids, position in self.masks:
            texts = [self.tokenizer.decode(part) for part in (ids[1:position], ids[position], ids[position + 1 :])]
            shown.append((f"{texts[0]} {self.tokenizer.mask_token} {texts[2]}", texts[1]))
        return shown


def write_report(settings: DomainSettings, looks: Looks, before: dict, after: dict, output: Path) -> str:
    """Write `report.md`, `report.json`, `log.json` and `curves.png`.

    Args:
        before, after: what `looks.look` returned.

    Returns:
        The Markdown.
    """
    state, data = looks.trainer.state, looks.trainer.data
    texts = {"domain": ("", data.held_out), "general": ("replay_", data.replay_held_out)}
    rows = [
        [name, f"{sum(held_out.documents.shard_sizes):,}"]
        + [f"{look[f'{prefix}{metric}']:.{digits}f}" for metric, digits in METRICS.items() for look in (before, after)]
        for name, (prefix, held_out) in texts.items()
        if held_out is not None
    ]
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    fell = after["loss"] < before["loss"]
    replayed = f"{settings.replay_share:.0%} of the micro-batches from {settings.general}"
    lines = [
        "# Adapted to a domain",
        "",
        f"{settings.model} on {settings.domain}: {data.manifest.documents:,} windows, {data.manifest.tokens:,} "
        f"tokens; {replayed if settings.replay_share else 'nothing replayed'}. Best of {len(evaluations)} evaluations "
        f"at step {state.best_global_step:,}; training ended at step {state.global_step:,} of {state.max_steps:,}. "
        f"By then the model had seen the domain {state.epoch:.1f} times."
        + ("" if fell else " **The domain's loss did not fall: lower `learning_rate`, or give more text.**"),
        "",
        *markdown_table(["Held out", "Windows", *(f"{metric} {at}" for metric in METRICS for at in TIMES)], rows),
        "",
        "Losses are in nats per masked token. Whole documents are held out, before training. Documents longer than "
        "the model's input are cut into windows, and each window counts.",
        "" if settings.general else "Forgetting was not measured: no general text was given.",
    ]
    content = {"before": before, "after": after, "best_step": state.best_global_step, "steps": state.global_step}
    if settings.new_words:
        words = json.loads((output / "start" / WORDS).read_text(encoding="utf-8"))
        content |= {"new_words": words}
        lines += [
            f"{settings.new_words:,} words are new, such as {', '.join(words['words'][:10])}: the domain has "
            f"{words['with_new_words']:,} pieces with them, and {words['pieces']:,} without. Both models here have "
            "them: losses of a model without them are over other tokens.",
            "",
        ]
    cell = [("`" + text.replace("`", "'").replace("|", "\\|") + "`", hidden) for text, hidden in looks.examples()]
    examples = zip(cell, before["guesses"], after["guesses"])
    lines += ["## Two hidden words", ""]
    lines += markdown_table(
        ["Text", "Hidden", *TIMES], [[*shown, *(", ".join(guesses) for guesses in both)] for shown, *both in examples]
    )
    text = "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"
    first = {"step": 0} | {f"eval_{name}": value for name, value in before.items() if name != "guesses"}
    log = [first, *state.log_history]
    write_json(output / "log.json", log)
    plot_curves(log, output / "curves.png")
    write_json(output / "report.json", content | {"settings": looks.trainer.run_settings})
    write_text(output / "report.md", text)
    return text

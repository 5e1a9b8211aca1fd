"""The steps of examples/shrink.py: a model is cut, and then distilled from the model that it was cut from."""

from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch.nn import functional as F

from neobert_hf.common.atomic_writes import atomic_folder, write_json, write_text
from neobert_hf.common.fingerprints import checkpoint_fingerprint, tokenizer_fingerprint, value_checksum
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.common.settings import (
    LocalPath,
    NotNegative,
    PathOrId,
    Positive,
    Range,
)
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.pretraining.adapting import load_masked_lm, read_start
from neobert_hf.pretraining.arguments import DataArguments, ModelArguments, PretrainingArguments
from neobert_hf.pretraining.raw_text import RawTextSettings
from neobert_hf.pretraining.recipe import checkpoint_settings, read_data
from neobert_hf.pretraining.shards import read_manifest
from neobert_hf.pretraining.trainer import MicroBatches, MLMTrainer, PretrainingData
from neobert_hf.training.cutting import Cut, CutSettings, cut_model


# Settings that have no meaning for text that is prepared already.
OF_RAW_TEXT = ("text_column", "text_subset", "held_out_share", "held_out_documents", "num_proc")
# This file is in the folder of the cut model.
CUT = "cut.json"
# The settings of distillation, besides those of the batches and the training arguments.
DISTILLATION = ("temperature", "states", "states_weight", "mlm_weight")
# Not logged: the distillation loss and the FLOPs of the small model alone would give meaningless values.
OF_PRETRAINING = ("perplexity", "mfu", "mfu_of_products")


@dataclass(kw_only=True)
class ShrinkSettings(RawTextSettings, CutSettings):
    """Which model is made smaller, how small, and how it is distilled."""

    model: PathOrId = field(metadata={"help": "the large masked language model of NeoBERT: path or Hub id"})
    text: PathOrId | None = field(
        default=None, metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})
    text_subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    train_data: LocalPath | None = field(
        default=None,
        metadata={"help": "in place of `text`: folder that prepare_data.py wrote with the model's tokenizer"},
    )
    validation_data: LocalPath | None = field(default=None, metadata={"help": "held-out folder of the same kind"})
    measured_tokens: Annotated[int, Range(8)] = field(
        default=2**14, metadata={"help": "tokens of the held-out text on which layers and units are measured"}
    )
    temperature: Positive = field(default=2.0, metadata={"help": "divides both models' logits"})
    states: Literal["cosine", "mse"] = field(
        default="cosine", metadata={"help": "distance between the last hidden states of both models"}
    )
    states_weight: NotNegative = field(
        default=0.2, metadata={"help": "weight of that distance; that of the logits is 1"}
    )
    mlm_weight: NotNegative = field(
        default=0.4, metadata={"help": "weight of the masked loss; that of the logits is 1"}
    )

    def __post_init__(self):
        RawTextSettings.__post_init__(self)
        CutSettings.__post_init__(self)

    def check_text(self) -> None:
        """Check the settings that name the text, before any work."""
        folders = (self.train_data, self.validation_data)
        if (self.text is None) == (folders == (None, None)) or (self.text is None and None in folders):
            raise ValueError(
                f"`text` is {self.text!r}, `train_data` {self.train_data!r} and `validation_data` "
                f"{self.validation_data!r}: give `text`, or both folders in its place."
            )
        defaults = {entry.name: entry.default for entry in fields(self) if entry.name in OF_RAW_TEXT}
        given = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.text is None and given:
            raise ValueError(f"`{given[0]}` is for raw text, and `train_data` is prepared already: leave it out.")


def read_teacher(
    settings: ShrinkSettings, arguments: PretrainingArguments, output: Path
) -> tuple[NeoBERTForMaskedLM, DataArguments, PretrainingData]:
    """Load the large model and the tokenised text: the prepared folders, or those made from raw text in `data/`.

    Raises:
        FileNotFoundError, ValueError: if the model, the sizes and the text do not fit together.
    """
    settings.check_text()
    teacher = load_masked_lm(settings.model).to(arguments.device).eval().requires_grad_(False)
    settings.sizes(teacher.config)
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    train, held_out = settings.train_data, settings.validation_data
    if settings.text is not None:
        text = (settings.text, settings.text_column, settings.model, teacher.config.max_length)
        # The held-out part comes first: it is small, so problems of a text show before much work is done.
        subset = settings.text_subset
        held_out = settings.prepare_part("held_out", output / "data" / "held_out", *text, subset=subset)
        train = settings.prepare_part("train", output / "data" / "train", *text, subset=subset)
    places = DataArguments(
        **settings.of_batches(),
        train_data=train,
        validation_data=held_out,
        max_length=teacher.config.max_length,
        init_from=str(output / "start"),
    )
    data = read_data(places, arguments)
    tokenizer = load_tokenizer(settings.model, teacher.config.vocab_size)
    if tokenizer_fingerprint(tokenizer) != data.manifest.tokenizer_fingerprint:
        raise ValueError(
            f"{train} was prepared with another tokenizer than that of {settings.model}: prepare the "
            "text with the model's tokenizer."
        )
    return teacher, places, data


def held_out_batches(held_out: MicroBatches, tokens: int | None = None) -> list[dict]:
    """The held-out text as masked batches; with `tokens`, evenly spread batches with about that many tokens."""
    keys = held_out.sampler.batches
    if tokens is not None:
        size = sum(len(row["input_ids"]) for row in held_out.documents.__getitems__(keys[0]))
        keys = keys[:: max(1, len(keys) * size // tokens)]
    return [held_out.collator(held_out.documents.__getitems__(each)) for each in keys]


@torch.no_grad()
def masked_loss(model: NeoBERTForMaskedLM, batches: list[dict]) -> float:
    """The mean loss, in nats per masked token."""
    total, labels = 0.0, 0
    for batch in batches:
        batch = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}
        # With a divisor of 1, the loss is the sum over the labels.
        total += model(**batch, num_items_in_batch=1).loss.item()
        labels += (batch["labels"] != -100).sum().item()
    if not labels:
        raise ValueError("No token of the held-out text was masked: hold out more than a few words.")
    return total / labels


def make_start(
    settings: ShrinkSettings, teacher: NeoBERTForMaskedLM, places: DataArguments, data: PretrainingData, output: Path
) -> tuple[Cut, dict[str, float]]:
    """Write the cut model to `start/`, unless it is there already.

    Returns:
        What was cut, and the held-out loss of the `large` and of the `cut` model.

    Raises:
        ValueError: if `start/` was made with other settings.
    """
    start, sizes = output / "start", settings.sizes(teacher.config)
    masks = ("mlm_probability", "mask_replace_prob", "random_replace_prob", "micro_batch_tokens", "measured_tokens")
    made_of = {"model": checkpoint_fingerprint(settings.model), **sizes}
    made_of |= {name: getattr(settings, name) for name in masks}
    made_of |= {"held_out": value_checksum(read_manifest(places.validation_data).shards)}
    if not (start / CUT).is_file():
        print(f"measuring the layers of {settings.model} on {settings.measured_tokens:,} tokens", flush=True)
        model = load_masked_lm(settings.model).to(teacher.device).eval()
        measure = partial(masked_loss, model, held_out_batches(data.held_out, settings.measured_tokens))
        cut = cut_model(model, sizes, "masked loss", measure)
        batches = held_out_batches(data.held_out)
        losses = {"large": masked_loss(teacher, batches), "cut": masked_loss(model, batches)}
        with atomic_folder(start) as partial_folder:
            model.save_pretrained(partial_folder)
            data.tokenizer.save_pretrained(partial_folder)
            write_json(partial_folder / CUT, {"made_of": made_of, "cut": asdict(cut), "losses": losses})
    stored = read_start(start / CUT, made_of)
    return Cut(**stored["cut"]), stored["losses"]


def distillation_settings(
    settings: ShrinkSettings, places: DataArguments, arguments: PretrainingArguments, data: PretrainingData
) -> dict:
    """All settings that the weights depend on. Models are compared by their content, not by their path."""
    own = {name: getattr(settings, name) for name in DISTILLATION}
    own |= {"init_from": checkpoint_fingerprint(places.init_from), "teacher": checkpoint_fingerprint(settings.model)}
    return checkpoint_settings(ModelArguments(), places, arguments, data.manifests) | own


class Distiller(MLMTrainer):
    """Trains a small model to predict what a large model predicts for the same masked tokens.

    The loss has three terms. The first is the Kullback-Leibler divergence between both models' predictions, with logits
    divided by a temperature, times the temperature squared (Hinton et al. 2015, arXiv 1503.02531). The others are the
    distance between the last hidden states on all tokens and the masked loss, each with its weight (DistilBERT, Sanh et
    al. 2019, arXiv 1910.01108).

    Args:
        teacher: the large model, in eval mode and without gradients.
        settings: of the distillation.
        stored: the settings that checkpoints store. For the other arguments, see `MLMTrainer`.
    """

    def __init__(
        self,
        model: NeoBERTForMaskedLM,
        args: PretrainingArguments,
        data: PretrainingData,
        stored: dict,
        teacher: NeoBERTForMaskedLM,
        settings: ShrinkSettings,
    ):
        super().__init__(model, args, data, stored)
        self.teacher, self.distillation = teacher, settings

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        settings, temperature = self.distillation, self.distillation.temperature
        masked, outputs = super().compute_loss(model, inputs | {"output_hidden_states": True}, True, num_items_in_batch)
        labelled = (inputs["labels"] != -100).flatten()
        with torch.no_grad():
            read = {name: value for name, value in inputs.items() if name != "labels"}
            taught = self.teacher.model(**read).last_hidden_state
            taught_logits = self.teacher.decoder(taught.flatten(0, 1)[labelled])
        logits = [F.log_softmax(each.float() / temperature, -1) for each in (outputs.logits, taught_logits)]
        divergence = F.kl_div(*logits, reduction="sum", log_target=True) * temperature**2 / num_items_in_batch
        states, taught = outputs.hidden_states[-1].float(), taught.float()
        if settings.states == "cosine":
            distance = 1 - F.cosine_similarity(states, taught, dim=-1)
        else:
            distance = (states - taught).square().mean(-1)
        real = inputs["input_ids"] != self.processing_class.pad_token_id
        # Weight a micro-batch by its labels, as the other two terms do, however many micro-batches make a step.
        distance = (distance * real).sum() / real.sum() * len(outputs.logits) / num_items_in_batch
        loss = divergence + settings.states_weight * distance + settings.mlm_weight * masked
        return (loss, outputs) if return_outputs else loss

    def _throughput(self, loss: float) -> dict[str, float]:
        return {name: value for name, value in super()._throughput(loss).items() if name not in OF_PRETRAINING}


def write_report(settings: ShrinkSettings, trainer: Distiller, cut: Cut, losses: dict[str, float], output: Path) -> str:
    """Write `report.md`, `report.json`, `log.json` and `shrink.png`.

    Args:
        losses: what `make_start` returned.

    Returns:
        The Markdown.
    """
    # Loaded again: Accelerate has wrapped the trained model in autocast, and the other two losses are in float32.
    after = load_masked_lm(str(output / "model")).to(trainer.teacher.device).eval()
    after = masked_loss(after, held_out_batches(trainer.data.held_out))
    losses = losses | {"distilled": after}
    parameters = {"large": trainer.teacher.num_parameters(), "small": trainer.model.num_parameters()}
    sizes = [parameters["large"], parameters["small"], parameters["small"]]
    rows = [[name, f"{size:,}", f"{loss:.3f}"] for size, (name, loss) in zip(sizes, losses.items())]
    head = ["Model", "Parameters", "Held-out masked loss"]
    dropped = len(cut.rounds)
    lines = [
        "# A smaller model",
        "",
        f"{settings.model} without {dropped} of its {dropped + len(cut.layers)} layers, and with {cut.widths[1]:,} of "
        f"the {cut.widths[0]:,} units of each MLP: {parameters['small'] / parameters['large']:.1%} of its parameters. "
        f"Distilled for {trainer.state.global_step:,} steps of {settings.global_batch_tokens:,} tokens."
        + (
            ""
            if round(after, 3) < round(losses["cut"], 3)
            else " **The loss did not fall: lower `learning_rate`, or train longer.**"
        ),
        "",
        *markdown_table(head, rows),
        "",
        "Losses are in nats per masked token, in float32. What to cut was chosen on a part of the same held-out text.",
        "",
        "## What was cut",
        "",
        *cut.lines(),
    ]
    text = "\n".join(lines) + "\n"
    log = [{"step": 0, "eval_loss": losses["cut"]}, *trainer.state.log_history]
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in log if "eval_loss" in entry]
    large = [(step, losses["large"]) for step in (0, trainer.state.global_step)]
    curves = [Line(evaluated, "small", {"marker": "o"}), Line(large, "large", {"linestyle": "--"})]
    labels = {"xlabel": "step", "ylabel": "masked loss (nats)", "title": "held-out text"}
    plot_lines(output / "shrink.png", [cut.panel(), Panel(curves, labels)])
    write_json(output / "log.json", log)
    content = {"losses": losses, "parameters": parameters, "cut": asdict(cut), "steps": trainer.state.global_step}
    write_json(output / "report.json", content | {"settings": trainer.run_settings})
    write_text(output / "report.md", text)
    return text

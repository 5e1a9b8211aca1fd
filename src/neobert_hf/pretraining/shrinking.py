"""The steps of examples/shrink.py: a model is cut, and learns from the one that it was cut out of."""

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


# Settings that say nothing of a text that is prepared already.
OF_RAW_TEXT = ("text_column", "text_subset", "held_out_share", "held_out_documents", "num_proc")
# In the folder of the cut model.
CUT = "cut.json"
# What distillation is, beside the batches and the arguments of training.
DISTILLATION = ("temperature", "states", "states_weight", "mlm_weight")
# What the loss of distillation and the FLOPs of the small model alone would say nothing about.
OF_PRETRAINING = ("perplexity", "mfu", "mfu_of_products")


@dataclass(kw_only=True)
class ShrinkSettings(RawTextSettings, CutSettings):
    """Which model becomes smaller, how small, and how it is distilled."""

    model: PathOrId = field(metadata={"help": "the large masked language model of NeoBERT: path or Hub id"})
    text: PathOrId | None = field(
        default=None, metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"}
    )
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})
    text_subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    train_data: LocalPath | None = field(
        default=None, metadata={"help": "in place of `text`: what prepare_data.py wrote with the model's tokenizer"}
    )
    validation_data: LocalPath | None = field(default=None, metadata={"help": "held-out folder of the same kind"})
    measured_tokens: Annotated[int, Range(8)] = field(
        default=2**14, metadata={"help": "of the held-out text, on which layers and units are measured"}
    )
    temperature: Positive = field(default=2.0, metadata={"help": "of both models' logits"})
    states: Literal["cosine", "mse"] = field(
        default="cosine", metadata={"help": "distance of the last states to the large model's"}
    )
    states_weight: NotNegative = field(default=0.2, metadata={"help": "of that distance; the logits have 1"})
    mlm_weight: NotNegative = field(default=0.4, metadata={"help": "of the masked loss; the logits have 1"})

    def __post_init__(self):
        RawTextSettings.__post_init__(self)
        CutSettings.__post_init__(self)

    def check_text(self) -> None:
        """Raise what is wrong with the names of the text, before any work."""
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
    """The large model, and the text in its tokens: the prepared folders, or what is made of raw text in `data/`.

    Raises:
        FileNotFoundError, ValueError: if the model, the sizes and the text do not go together.
    """
    settings.check_text()
    teacher = load_masked_lm(settings.model).to(arguments.device).eval().requires_grad_(False)
    settings.sizes(teacher.config)
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    train, held_out = settings.train_data, settings.validation_data
    if settings.text is not None:
        text = (settings.text, settings.text_column, settings.model, teacher.config.max_length)
        # What is held out is little: all that may be wrong with a text shows before much work is done.
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
            "text with the model's."
        )
    return teacher, places, data


def held_out_batches(held_out: MicroBatches, tokens: int | None = None) -> list[dict]:
    """The held-out text as masked batches; with `tokens` about so many of them, from batches spread evenly."""
    keys = held_out.sampler.batches
    if tokens is not None:
        size = sum(len(row["input_ids"]) for row in held_out.documents.__getitems__(keys[0]))
        keys = keys[:: max(1, len(keys) * size // tokens)]
    return [held_out.collator(held_out.documents.__getitems__(each)) for each in keys]


@torch.no_grad()
def masked_loss(model: NeoBERTForMaskedLM, batches: list[dict]) -> float:
    """In nats a masked token."""
    total, labels = 0.0, 0
    for batch in batches:
        batch = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}
        # The sum over the labels.
        total += model(**batch, num_items_in_batch=1).loss.item()
        labels += (batch["labels"] != -100).sum().item()
    if not labels:
        raise ValueError("No token of the held-out text was masked: hold out more than a few words.")
    return total / labels


def make_start(
    settings: ShrinkSettings, teacher: NeoBERTForMaskedLM, places: DataArguments, data: PretrainingData, output: Path
) -> tuple[Cut, dict[str, float]]:
    """Write `start/`, the cut model, unless it is there.

    Returns:
        What was cut, and the held-out loss of the `large` and of the `cut` model.

    Raises:
        ValueError: if `start/` is of other settings.
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
    """All settings that the weights depend on. Of the models, the content counts."""
    own = {name: getattr(settings, name) for name in DISTILLATION}
    own |= {"init_from": checkpoint_fingerprint(places.init_from), "teacher": checkpoint_fingerprint(settings.model)}
    return checkpoint_settings(ModelArguments(), places, arguments, data.manifests) | own


class Distiller(MLMTrainer):
    """Trains a small model to say what a large one says of the same masked tokens.

    The loss is the Kullback-Leibler divergence of its logits from the large model's, both over a temperature, times the
    temperature squared (Hinton et al. 2015, arXiv 1503.02531); plus the distance of the last states on all tokens, and
    the masked loss, each with its weight (DistilBERT, Sanh et al. 2019, arXiv 1910.01108).

    Args:
        teacher: the large model, in eval mode and without gradients.
        settings: of distillation. What checkpoints store of it is in `stored`; for more, see `MLMTrainer`.
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
        # A micro-batch counts by its labels, as in the other two, whatever number of them makes a step.
        distance = (distance * real).sum() / real.sum() * len(outputs.logits) / num_items_in_batch
        loss = divergence + settings.states_weight * distance + settings.mlm_weight * masked
        return (loss, outputs) if return_outputs else loss

    def _throughput(self, loss: float) -> dict[str, float]:
        return {name: value for name, value in super()._throughput(loss).items() if name not in OF_PRETRAINING}


def write_report(settings: ShrinkSettings, trainer: Distiller, cut: Cut, losses: dict[str, float], output: Path) -> str:
    """Write `report.md`, `report.json`, `log.json` and `shrink.png`.

    Args:
        losses: what `make_start` gave.

    Returns:
        The Markdown.
    """
    # Loaded anew: Accelerate has wrapped the trained one in autocast, and the other two losses are of float32.
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
        "Losses are nats a masked token, in float32. What was cut was chosen on a part of the same held-out text.",
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

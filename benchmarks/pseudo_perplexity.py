"""How well a small NeoBERT works beyond its training length.

    python benchmarks/pretraining.py --bf16 true
    python benchmarks/pseudo_perplexity.py

The models are those of both stages of pretraining.py, 256 and 1,024 tokens. Every measurement is the recipe
`pseudo_perplexity`; interrupted, the same command goes on.
"""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from datasets import Dataset
from matplotlib.figure import Figure
from runner import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Settings,
    difference,
    draw_lines,
    new_figure,
    run_benchmark,
    table,
)

from neobert_hf.evaluation.pseudo_perplexity import pseudo_perplexity


# Factors relative to the training length of each stage, up to 8 times 256.
ROPE = {"short": ["native", "yarn:2", "yarn:4", "yarn:8", "linear:8", "dynamic:8"], "long": ["native", "yarn:2"]}
STAGES = {"short": "stage_1", "long": "stage_2"}
BASE = "short"
SHOWN = {
    "short, yarn:8": ("YaRN, factor 8", BLUE),
    "long": ("trained on 1,024 tokens", GREEN),
    "long, yarn:2": ("and with YaRN, factor 2", ORANGE),
}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
# Documents of at least the longest length, and positions of each that are scored at each length.
DOCUMENTS, SAMPLE = 16, 4


@dataclass(kw_only=True)
class PerplexitySettings(Settings):
    source: str = field(
        default="data/benchmark/text/validation.parquet",
        metadata={"help": "Parquet file with a column `text`", "path": True},
    )
    models: str = field(
        default="runs/pretraining_benchmark",
        metadata={"help": "folder with stage_1/model and stage_2/model; losses and logs go there, too"},
    )


def measure(settings: PerplexitySettings) -> dict[str, dict[str, list[float]]]:
    """By curve and length, the mean loss of each document, in the same order in all curves."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, ropes in ROPE.items():
        output = Path(settings.models) / "pseudo_perplexity" / name
        documents = {"source": settings.source, "min_tokens": max(LENGTHS), "max_documents": DOCUMENTS}
        pseudo_perplexity(
            models=f"{name}={settings.models}/{STAGES[name]}/model",
            output_dir=output,
            rope=ropes,
            lengths=list(LENGTHS),
            sample=SAMPLE,
            device="cpu",
            **documents,
        )
        for row in Dataset.from_parquet(str(output / "scores.parquet")).sort(["cut", "document"]):
            curve = name if row["rope"] == "native" else f"{name}, {row['rope']}"
            found.setdefault(curve, {}).setdefault(str(row["cut"]), []).append(row["mean_loss"])
    return found


def plot(found: dict[str, dict[str, list[float]]]) -> Figure:
    lines = {"no scaling": ([(int(length), 0.0) for length in found[BASE]], GREY)}
    for curve, (label, color) in SHOWN.items():
        gains = {length: fmean(losses) - fmean(found[BASE][length]) for length, losses in found[curve].items()}
        lines[label] = ([(int(length), gain) for length, gain in gains.items()], color)
    title = "At eight times the length of its training, YaRN helps as much as more training"
    figure, axes = new_figure(title, "Loss of masked tokens, nats, above that of a model of 256 tokens as it is")
    axes.set_xscale("log", base=2)
    draw_lines(axes, lines)
    axes.set_xticks(list(map(int, found[BASE])), [f"{int(length):,}" for length in found[BASE]])
    axes.set_xlabel("tokens of the document", loc="left", color=GREY)
    return figure


def page(found: dict[str, dict[str, list[float]]]) -> list[str]:
    lengths = list(found[BASE])
    rows = [
        [curve, *(difference(found[curve][length], found[BASE][length], 2) for length in lengths)]
        for curve in found
        if curve != BASE
    ]
    return [
        "# With YaRN a model reads eight times its training length",
        "![Loss against length, with and without YaRN](pseudo_perplexity.png)",
        "`short` is the model of the first stage of [pretraining](pretraining.md), 256 tokens, and `long` that of the "
        f"second, 1,024. The first tokens of {len(next(iter(found[BASE].values())))} documents of "
        f"{max(map(int, lengths)):,} tokens or more, the same at every length; of each, {SAMPLE} random "
        "positions are scored, the same in all curves. A cell is the mean loss in nats above that of `short`, and its "
        "95% interval over the documents; below 0 is better.",
        table(["", *(f"{int(length):,}" for length in lengths)], rows),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("pseudo_perplexity", measure, page, plot, ("datasets",), PerplexitySettings, args)


if __name__ == "__main__":
    main()

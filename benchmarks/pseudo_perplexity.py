"""How well a small NeoBERT works beyond its training length.

    python benchmarks/pretraining.py --bf16 true
    python benchmarks/pseudo_perplexity.py

The models are those of both stages of pretraining.py, 256 and 1,024 tokens. Every measurement is
`examples/pseudo_perplexity.py`; interrupted, the same command goes on.
"""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
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
    run_script,
    set_title,
    table,
)

from neobert_hf.common.files import write_png


# Factors relative to the training length of each stage, up to 8 times 256.
ROPE = {"short": "native yarn:2 yarn:4 yarn:8 linear:8 dynamic:8", "long": "native yarn:2"}
STAGES = {"short": "stage_1", "long": "stage_2"}
BASE = "short"
SHOWN = {
    "short, yarn:8": ("YaRN, factor 8", BLUE),
    "long": ("trained on 1,024 tokens", GREEN),
    "long, yarn:2": ("and with YaRN, factor 2", ORANGE),
}


@dataclass(kw_only=True)
class PerplexitySettings(Settings):
    source: str = field(
        default="data/benchmark/text/validation.parquet",
        metadata={"help": "Parquet file with a column `text`", "path": True},
    )
    models: str = field(
        default="runs/pretraining_benchmark", metadata={"help": "folder with stage_1/model and stage_2/model"}
    )
    lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024, 2048], metadata={"help": "in tokens"})
    documents: int = field(default=16, metadata={"help": "documents of at least the longest length"})
    sample: int = field(default=4, metadata={"help": "positions of each document at each length"})
    output_dir: str = field(default="runs/pseudo_perplexity_benchmark", metadata={"help": "losses and logs"})


def measure(settings: PerplexitySettings) -> dict[str, dict[str, list[float]]]:
    """By curve and length, the mean loss of each document, in the same order in all curves."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, ropes in ROPE.items():
        output = Path(settings.output_dir) / name
        flags = (
            f"--models {name}={settings.models}/{STAGES[name]}/model --source {settings.source} --rope {ropes} "
            f"--sample {settings.sample} --lengths {' '.join(map(str, settings.lengths))} --device cpu "
            f"--min_tokens {max(settings.lengths)} --max_documents {settings.documents} --output_dir {output}"
        )
        run_script("pseudo_perplexity.py", flags, output.with_suffix(".txt"))
        for row in Dataset.from_parquet(str(output / "scores.parquet")).sort(["cut", "document"]):
            curve = name if row["rope"] == "native" else f"{name}, {row['rope']}"
            found.setdefault(curve, {}).setdefault(str(row["cut"]), []).append(row["mean_loss"])
    return found


def plot(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    lines = {"no scaling": ([(int(length), 0.0) for length in found[BASE]], GREY)}
    for curve, (label, color) in SHOWN.items():
        points = []
        for length, losses in found[curve].items():
            gains = [loss - base for loss, base in zip(losses, found[BASE][length])]
            points.append((int(length), sum(gains) / len(gains)))
        lines[label] = (points, color)
    figure, (axes,) = new_figure(size=(7.6, 3.9))
    axes.set_xscale("log", base=2)
    draw_lines(axes, lines, "")
    axes.set_xticks(list(map(int, found[BASE])), [f"{int(length):,}" for length in found[BASE]])
    axes.set_xlabel("tokens of the document", loc="left", color=GREY)
    title = "At eight times the length of its training, YaRN helps as much as more training"
    set_title(axes, title, "Loss of masked tokens, nats, above that of a model of 256 tokens as it is")
    write_png(file, figure)


def page(stored: dict, folder: Path) -> list[str]:
    found, settings = stored["found"], stored["settings"]
    plot(found, folder / "pseudo_perplexity.png")
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
        f"{max(map(int, lengths)):,} tokens or more, the same at every length; of each, {settings['sample']} random "
        "positions are scored, the same in all curves. A cell is the mean loss in nats above that of `short`, and its "
        "95% interval over the documents; below 0 is better.",
        table(["", *(f"{int(length):,}" for length in lengths)], rows),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("pseudo_perplexity", PerplexitySettings, measure, page, ("datasets",), args)


if __name__ == "__main__":
    main()

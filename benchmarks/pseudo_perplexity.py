"""How well a small NeoBERT works beyond its training length. Rewrites benchmarks/results/pseudo_perplexity.md.

    python benchmarks/pseudo_perplexity.py --data ../shared/data

The models are those of both stages of benchmarks/pretraining.py, 256 and 1,024 tokens. Every measurement is
`examples/pseudo_perplexity.py`; interrupted, the same command goes on.
"""

from dataclasses import dataclass, field
from pathlib import Path

from circumstances import circumstances
from datasets import Dataset, concatenate_datasets
from pretraining import run

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.report import markdown_table, mean_interval
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.pseudo_perplexity.report import curve_name, curves, plot, table


# Factors relative to the training length of each stage, up to 8 times 256.
ROPE = {"short": "native yarn:2 yarn:4 yarn:8 linear:8 dynamic:8", "long": "native yarn:2"}


@dataclass
class BenchmarkArguments:
    data: str = field(metadata={"help": "folder with long_articles.parquet and text/validation.parquet"})
    short: str = field(
        default="runs/pretraining_benchmark/stage_1/model", metadata={"help": "model of the first stage"}
    )
    long: str = field(default="runs/pretraining_benchmark/stage_2/model", metadata={"help": "model of the second"})
    lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024, 2048], metadata={"help": "in tokens"})
    documents: int = field(default=48, metadata={"help": "documents of at least the longest length, drawn with seed 0"})
    sample: int = field(default=4, metadata={"help": "positions of each document at each length"})
    output_dir: str = field(default="runs/pseudo_perplexity_benchmark", metadata={"help": "losses and logs"})
    results: str = field(default="benchmarks/results", metadata={"help": "folder of the report"})


def write_documents(data: Path, file: Path) -> None:
    """Shuffle both sources together, so that even a few documents include both."""
    file.parent.mkdir(parents=True, exist_ok=True)
    sources = [Dataset.from_parquet(str(data / name)) for name in ("long_articles.parquet", "text/validation.parquet")]
    texts = concatenate_datasets([source.select_columns("text") for source in sources])
    texts.shuffle(seed=0).to_parquet(file)


def measure(settings: BenchmarkArguments, name: str, model: str) -> list[dict]:
    output = Path(settings.output_dir)
    flags = (
        f"--models {name}={model} --source {output}/documents.parquet --rope {ROPE[name]} --sample {settings.sample} "
        f"--lengths {' '.join(map(str, settings.lengths))} --min_tokens {max(settings.lengths)} "
        f"--max_documents {settings.documents} --output_dir {output / name} --device cpu"
    )
    run("pseudo_perplexity.py", flags, output / f"{name}.txt")
    return Dataset.from_parquet(str(output / name / "scores.parquet")).to_list()


def difference_table(scores: list[dict], lengths: list[int]) -> list[str]:
    """Mean loss against the short model's own RoPE, on the same positions of the same documents."""
    losses: dict[str, dict[int, dict[int, float]]] = {}
    for row in scores:
        losses.setdefault(curve_name(row), {}).setdefault(row["cut"], {})[row["document"]] = row["mean_loss"]
    base, *others = losses
    rows = []
    for name in others:
        cells = [name]
        for length in lengths:
            pairs = [loss - losses[base][length][document] for document, loss in losses[name][length].items()]
            mean, low, _ = mean_interval(pairs)
            cells.append(f"{mean:+.2f} ± {mean - low:.2f}")
        rows.append(cells)
    return markdown_table([f"nats against {base}", *(f"{length:,}" for length in lengths)], rows)


def report(settings: BenchmarkArguments, scores: list[dict]) -> str:
    sections = (
        "# Pseudo-perplexity of a small NeoBERT against length",
        "![pseudo-perplexity](pseudo_perplexity.png)",
        circumstances("pseudo_perplexity", "datasets"),
        f"It runs `examples/pseudo_perplexity.py` with `--rope {ROPE['short']}` for the model of the first stage of "
        f"[pretraining.md](pretraining.md) (256 tokens) and `--rope {ROPE['long']}` for the model of the second "
        "stage (1,024).",
        f"The first tokens of {len({row['document'] for row in scores})} documents of {max(settings.lengths):,} tokens "
        "or more (encyclopedia articles, and held-out documents of the training sources), the same at every length. Of "
        f"each, {settings.sample} random positions are scored, the same for all curves at a length. Geometric mean "
        "over documents:",
        table(curves(scores)).rstrip(),
        "Documents differ a lot, so the intervals of single points (in the JSON file) are wide. The next table "
        "compares mean losses on the same positions, with a 95% interval over documents (below 0 is better):",
        "\n".join(difference_table(scores, settings.lengths)),
    )
    return "\n\n".join(sections) + "\n"


def main() -> None:
    (settings,) = parse_config(BenchmarkArguments)
    write_documents(Path(settings.data), Path(settings.output_dir) / "documents.parquet")
    scores = [row for name in ROPE for row in measure(settings, name, getattr(settings, name))]
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)
    plot(curves(scores), results / "pseudo_perplexity.png")
    write_json(results / "pseudo_perplexity.json", {"curves": curves(scores), "scores": scores})
    write_text(results / "pseudo_perplexity.md", report(settings, scores))


if __name__ == "__main__":
    main()

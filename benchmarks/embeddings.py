"""What pretraining, and a contrastive stage on raw text, are worth for retrieval. Writes results/embeddings.md.

    python examples/make_pairs.py --source ../shared/data/text/train.parquet --output data/text_pairs.parquet
    python benchmarks/embeddings.py --data ../shared/data --text_pairs data/text_pairs.parquet \\
        --starts NeoBERT=runs/small/model BERT=runs/bert/model --others vectors=runs/static_vectors

Each start, and random weights as well, is scored as it is and after fine-tuning on pairs. With `--text_pairs` it is
also scored after a contrastive stage on text, alone and before fine-tuning on pairs. All get the same search: every
learning rate is tried with the first seed, the rate is chosen on held-out pairs that are not tested on, and then the
other seeds run with it. An interrupted command goes on when it is run again, even on another machine: see
stored_runs.py.
"""

import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from circumstances import AS_TOLD, circumstances
from embedding_report import (
    SIMILARITY,
    TESTS,
    EmbeddingBenchmarkSettings,
    describe_pairs,
    development_mean,
    gain_cell,
    interval,
    train_once,
)
from embedding_scores import KEYWORD_WEIGHT, TestData, bm25_alone, evaluate, load_model, split_pairs
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pretraining import save_random
from stored_runs import StoredRuns

from neobert_hf.common.files import write_json, write_png, write_text
from neobert_hf.common.fingerprints import file_checksum, model_fingerprint
from neobert_hf.common.report import markdown_table, mean_interval
from neobert_hf.common.settings import parse_config


RANDOM, BM25 = "random", "BM25"
COLUMNS = {
    "test FOLDOC": "FOLDOC",
    "test FOLDOC and words": "FOLDOC, with BM25",
    "test WordNet": "WordNet",
    "test WordNet and words": "WordNet, with BM25",
    "similarity": "similarity of news",
}
PLAIN, PAIRS, BOTH = "as it is", "fine-tuned on pairs", "contrastive stage, then pairs"
CONTRASTIVE = "contrastive stage alone"
STAGES = {PLAIN: (), CONTRASTIVE: ("contrastive",), PAIRS: ("pairs",), BOTH: ("contrastive", "pairs")}
CONFIGS = {"contrastive": "contrastive.yaml", "pairs": "small.yaml"}


@dataclass(kw_only=True)
class EmbeddingBenchmarkArguments(EmbeddingBenchmarkSettings):
    starts: list[str] = field(metadata={"help": "NAME=FOLDER of each pretrained model"})
    text_pairs: str | None = field(
        default=None, metadata={"help": "Parquet file that make_pairs.py wrote; no contrastive stage if unset"}
    )
    others: list[str] = field(
        default_factory=list, metadata={"help": "NAME=FOLDER of Sentence Transformers models to score as they are"}
    )
    output_dir: str = field(default="runs/embeddings_benchmark", metadata={"help": "data, runs and logs"})
    learning_rates: list[float] = field(
        default_factory=lambda: [5e-4, 2e-3], metadata={"help": "tried in both stages, by all starts"}
    )
    contrastive: str = field(default="--max_steps 500", metadata={"help": "further flags of the contrastive stage"})
    pairs: str = field(default="--max_steps 300", metadata={"help": "further flags of fine-tuning on pairs"})


@dataclass
class Benchmark:
    """All trainings and scores of one command.

    Args:
        descriptions: YAML files of the pairs of each stage.
    """

    settings: EmbeddingBenchmarkArguments
    tests: TestData
    descriptions: dict[str, Path]
    runs: StoredRuns

    @property
    def output(self) -> Path:
        return Path(self.settings.output_dir)

    def start(self, name: str, folder: Path, seed: int) -> Path:
        """A pretrained model, or random weights of this seed in its architecture."""
        if name != RANDOM:
            return folder
        random = self.output / f"random_{seed}" / "model"
        if not random.exists():
            save_random(folder, random, seed)
        return random

    def flags(self, stage: str, rate: float) -> str:
        """The flags of a stage, without the seed and without those that name files."""
        own = {"contrastive": self.settings.contrastive, "pairs": self.settings.pairs}[stage]
        return f"--max_length 64 --learning_rate {rate:g} {own} {self.settings.limit}".strip()

    def train(self, model: Path, output: Path, stage: str, rate: float, seed: int) -> Path:
        """Fine-tune unless it is done already, and return the folder of the model."""
        flags = f"--datasets {self.descriptions[stage]} --model {model} --seed {seed} {self.flags(stage, rate)}"
        return train_once("finetune_embeddings.py", CONFIGS[stage], output, flags) / "model"

    def train_and_score(self, name: str, folder: Path, stages: list[tuple[str, float]], seed: int) -> dict[str, float]:
        """Scores after some stages, each with its learning rate."""
        fingerprint = model_fingerprint(str(folder))[:8]

        def train_all() -> dict[str, float]:
            model, place = self.start(name, folder, seed), self.output / f"{name}-{fingerprint}"
            for stage, rate in stages:
                place = place / f"{stage}_{rate:g}_{seed}"
                model = self.train(model, place, stage, rate, seed)
            return evaluate(load_model(model), self.tests)

        start = f"{'random weights' if name == RANDOM else 'weights'} of {fingerprint}"
        parts = [start, *(f"{CONFIGS[stage]} {self.flags(stage, rate)}" for stage, rate in stages), f"seed {seed}"]
        if any(stage == "contrastive" for stage, _ in stages):
            parts.append(f"texts of {file_checksum(Path(self.settings.text_pairs))[:8]}")
        parts += [f"{self.settings.test_rows} test rows"] * (self.settings.test_rows is not None)
        return self.runs.result("; ".join(parts), train_all)

    def search(self, name: str, folder: Path, stages: list[tuple[str, float]], stage: str) -> float:
        """The learning rate of one more stage that is best on development pairs, with the first seed."""
        found = {}
        for rate in self.settings.learning_rates:
            scores = self.train_and_score(name, folder, [*stages, (stage, rate)], 0)
            found[rate] = development_mean(scores)
        return max(found, key=found.get)

    def run_all(self, name: str, folder: Path) -> dict[str, dict]:
        """Learning rates, and scores of each seed, by way of training."""
        results = {}
        for title, stages in STAGES.items():
            if not set(stages) <= set(self.descriptions):
                continue
            chosen: list[tuple[str, float]] = []
            for stage in stages:
                chosen.append((stage, self.search(name, folder, chosen, stage)))
            seeds = range(self.settings.seeds if chosen or name == RANDOM else 1)
            scores = [self.train_and_score(name, folder, chosen, seed) for seed in seeds]
            results[title] = {"rates": [rate for _, rate in chosen], "scores": scores}
            mean = statistics.mean(one["test FOLDOC"] for one in scores)
            print(f"{name}, {title}: FOLDOC {mean:.3f}", flush=True)
        return results


def scores_table(results: dict[str, dict]) -> list[str]:
    rows = []
    for (name, ways), title in itertools.product(results.items(), STAGES):
        if title in ways:
            rates = ", ".join(f"{rate:g}" for rate in ways[title]["rates"]) or "-"
            scores = ways[title]["scores"]
            cells = [interval([one[key] for one in scores]) if key in scores[0] else "-" for key in COLUMNS]
            rows.append([name, title, rates, *cells])
    return markdown_table(["start", "training", "rates", *COLUMNS.values()], rows)


def gains_table(results: dict[str, dict], starts: list[str]) -> list[str]:
    """Gains, seed by seed, of the first start over the others, and of a contrastive stage over fine-tuning alone."""
    others = [*starts[1:], RANDOM]
    comparisons = [((starts[0], way), (other, way)) for way in (CONTRASTIVE, PAIRS, BOTH) for other in others]
    comparisons += [((name, BOTH), (name, PAIRS)) for name in [*starts, RANDOM]]
    comparisons = [pair for pair in comparisons if all(way in results[name] for name, way in pair)]
    rows = []
    for better, worse in comparisons:
        scores = [results[name][way]["scores"] for name, way in (better, worse)]
        # Runs of earlier versions have no scores for search with BM25.
        cells = [gain_cell(*scores, key) if all(key in one[0] for one in scores) else "-" for key in COLUMNS]
        rows.append([f"{', '.join(better)}, against {', '.join(worse)}", *cells])
    return markdown_table(["", *COLUMNS.values()], rows)


def plot(results: dict[str, dict], file: Path) -> None:
    """One panel per test, one group of bars per start, with the 95% interval over the seeds; BM25 alone is a line."""
    figure = Figure(figsize=(18, 4.2), layout="constrained")
    alone = results[BM25][PLAIN]["scores"][0]
    colors = {title: f"C{number}" for number, title in enumerate(STAGES)}
    width = 0.84 / len(STAGES)
    for axes, key in zip(figure.subplots(1, len(COLUMNS)), COLUMNS):
        measured = {
            name: [title for title in STAGES if title in ways and key in ways[title]["scores"][0]]
            for name, ways in results.items()
            if name != BM25
        }
        names = [name for name, ways in measured.items() if ways]
        if (test := key.removesuffix(" and words")) in alone:
            axes.axhline(alone[test], color="black", linestyle="--", linewidth=1)
        for place, name in enumerate(names):
            ways = measured[name]
            for number, title in enumerate(ways):
                mean, lower, _ = mean_interval([one[key] for one in results[name][title]["scores"]])
                error = 0 if lower != lower else mean - lower
                at = place + width * (number - (len(ways) - 1) / 2)
                axes.bar(at, mean, 0.93 * width, yerr=error, color=colors[title])
        axes.set_xticks(range(len(names)), names)
        axes.set_title(("" if key == "similarity" else "nDCG@10, ") + COLUMNS[key])
    shown = [title for title in STAGES if any(title in ways for ways in results.values())]
    patches = [Patch(color=colors[title], label=title) for title in shown]
    patches.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label="BM25 alone"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))
    write_png(file, figure)


def report(settings: EmbeddingBenchmarkArguments, results: dict[str, dict], starts: list[str], runs: StoredRuns) -> str:
    contrastive = f"Contrastive stage: `configs/embeddings/contrastive.yaml` with `{settings.contrastive}`. "
    contrastive = contrastive if settings.text_pairs else "No contrastive stage was run. "
    others = [f"`{other.split('=', 1)[0]}` (`{other.split('=', 1)[1]}`)" for other in settings.others]
    others = (
        f" Scored without training: {', '.join(others)}; `static_vectors.py` makes word vectors from the text."
        if others
        else ""
    )
    sections = (
        "# What pretraining and a contrastive stage are worth for retrieval",
        "![scores](embeddings.png)",
        circumstances("embeddings", "sentence-transformers", "lancedb", precision=AS_TOLD, runs=runs.circumstances()),
        f"{TESTS} `with BM25`: the cosine + {KEYWORD_WEIGHT} x BM25 / the query's highest BM25, by "
        f"which `semantic_search.py query --keyword_weight {KEYWORD_WEIGHT}` ranks. {SIMILARITY}{others}",
        f"{contrastive}Pairs: `configs/embeddings/small.yaml` with `{settings.pairs}`. Texts are cut at 64 tokens in "
        f"training and 128 in tests. Learning rates {', '.join(f'{rate:g}' for rate in settings.learning_rates)} are "
        f"tried by all starts, in each stage, and chosen on other pairs; {settings.seeds} seeds; intervals are 95% by "
        "Student's t, and gains are computed seed by seed.",
        "\n".join(gains_table(results, starts)),
        "\n".join(scores_table(results)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(EmbeddingBenchmarkArguments, args=args)
    starts = dict(start.split("=", 1) for start in settings.starts)
    first = Path(next(iter(starts.values())))

    # 1. Pairs to train on, and others to test on
    split = Path(settings.output_dir) / "data"
    tests = split_pairs(Path(settings.data), split, settings.test_rows)
    files = {"pairs": "small_datasets.yaml"} | ({"contrastive": "text_pairs.yaml"} if settings.text_pairs else {})
    descriptions = {
        stage: describe_pairs(name, settings.data, split, settings.text_pairs) for stage, name in files.items()
    }
    runs = StoredRuns(Path(settings.results) / "single_runs" / "embeddings.json")
    benchmark = Benchmark(settings, tests, descriptions, runs)

    # 2. Trainings and scores
    jobs = {name: Path(folder) for name, folder in starts.items()} | {RANDOM: first}
    with ThreadPoolExecutor(settings.processes) as executor:
        results = dict(zip(jobs, executor.map(benchmark.run_all, jobs, jobs.values())))
    for name, folder in (other.split("=", 1) for other in settings.others):
        results[name] = {PLAIN: {"rates": [], "scores": [evaluate(load_model(Path(folder)), tests)]}}
    results[BM25] = {PLAIN: {"rates": [], "scores": [bm25_alone(tests)]}}

    # 3. Report
    folder = Path(settings.results)
    folder.mkdir(parents=True, exist_ok=True)
    plot(results, folder / "embeddings.png")
    write_json(folder / "embeddings.json", {"settings": asdict(settings), "results": results})
    write_text(folder / "embeddings.md", report(settings, results, list(starts), runs))


if __name__ == "__main__":
    main()

"""Does a context help? Contextual embeddings against a bi-encoder at equal compute. Writes results/contextual.md.

    python benchmarks/contextual.py --data ../shared/data --model runs/embeddings/model

Both start from the same fine-tuned encoder and train on the same pairs. They get the same search: every learning rate
is tried with the first seed, the rate is chosen on held-out pairs that are not tested on, and then the other seeds run
with it. The contextual model is then tested with the context of the corpus that is searched, with no context, with the
context of another corpus, and with its own context in another order. Every number is kept in a file of its own, so an
interrupted command goes on when it is run again.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from circumstances import circumstances
from datasets import Dataset
from embedding_report import (
    TESTS,
    EmbeddingBenchmarkSettings,
    describe_pairs,
    development_mean,
    gain_cell,
    interval,
    train_once,
)
from embedding_scores import Retrieval, TestData, dense_scores, load_model, ndcg_at_10, split_pairs
from matplotlib.figure import Figure
from sentence_transformers import SentenceTransformer
from transformers import set_seed

from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.common.fingerprints import model_files_fingerprint, value_checksum
from neobert_hf.common.report import markdown_table, mean_interval
from neobert_hf.common.settings import Count, Positive, parse_config
from neobert_hf.embeddings.contextual import build_contextual_encoder, embed_context
from neobert_hf.embeddings.models import build_encoder


START, BI_ENCODER = "the start, as it is", "bi-encoder"
UNTRAINED = "own context, before training"
OWN, NULL, OTHER, SHUFFLED = "own context", "no context", "another corpus's context", "own context, shuffled"
COLUMNS = {"test FOLDOC": "FOLDOC", "test WordNet": "WordNet"}
# The second of each pair is subtracted from the first.
COMPARISONS = [(OWN, BI_ENCODER), (OWN, NULL), (OWN, OTHER), (OWN, SHUFFLED), (NULL, BI_ENCODER), (BI_ENCODER, START)]
COMPARISONS += [(UNTRAINED, START), (OWN, UNTRAINED)]
# The value of the contextual recipe.
SOFT_PROMPTS = 8
# Costs of a step: a forward pass counts as one, a backward pass as two. Cached gradients need one more forward pass.
PASSES, CACHED_PASSES = 3, 4
MAX_LENGTH = 64


@dataclass(kw_only=True)
class ContextualBenchmarkArguments(EmbeddingBenchmarkSettings):
    model: str = field(metadata={"help": "folder of the fine-tuned encoder that both start from"})
    output_dir: str = field(default="runs/contextual_benchmark", metadata={"help": "data, runs and logs"})
    learning_rates: list[Positive] = field(
        default_factory=lambda: [1e-4, 3e-4, 1e-3], metadata={"help": "tried by both"}
    )
    steps: Count = field(
        default=300, metadata={"help": "steps of the contextual model; the bi-encoder gets equal compute"}
    )
    batch_size: Count = field(default=64, metadata={"help": "rows of a batch, which is one cluster"})
    context_size: Count = field(default=64, metadata={"help": "documents in a context"})


@dataclass
class Benchmark:
    """All trainings and scores of one command.

    Args:
        datasets: YAML file of the pairs to train on.
    """

    settings: ContextualBenchmarkArguments
    tests: TestData
    datasets: Path

    @property
    def output(self) -> Path:
        return Path(self.settings.output_dir)

    @cached_property
    def tokens(self) -> float:
        """The mean number of tokens of queries and documents in training, averaged over the sets of pairs."""
        encoder = build_encoder(self.settings.model, MAX_LENGTH)
        means = []
        for file in sorted((self.output / "data").glob("*.parquet")):
            rows = Dataset.from_parquet(str(file))
            texts = [text for row in islice(rows, 500) for text in (row["query"], row["positive"])]
            ids = encoder.tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
            means.append(sum(map(len, ids)) / len(ids))
        return sum(means) / len(means)

    @property
    def costs(self) -> float:
        """The compute of a step of the contextual model, in steps of the bi-encoder, by the tokens that are read."""
        size, rows = self.settings.context_size, self.settings.batch_size
        read = size * self.tokens + 2 * rows * (size + SOFT_PROMPTS + self.tokens)
        return CACHED_PASSES * read / (PASSES * 2 * rows * self.tokens)

    @property
    def equal_steps(self) -> int:
        """Steps of the bi-encoder that cost as much compute as those of the contextual model."""
        return round(self.settings.steps * self.costs)

    def train(self, way: str, rate: float, seed: int) -> Path:
        """Train unless it is done already, and return the folder of the run, whose name depends on flags and start."""
        settings = self.settings
        script, config, own = {
            OWN: (
                "train_contextual.py",
                "contextual_small.yaml",
                f"--max_steps {settings.steps} --context_size {settings.context_size}",
            ),
            BI_ENCODER: (
                "finetune_embeddings.py",
                "small.yaml",
                f"--max_steps {self.equal_steps} --max_negatives 0",
            ),
        }[way]
        flags = (
            f"--max_length {MAX_LENGTH} --per_device_train_batch_size {settings.batch_size} --learning_rate {rate} "
            f"--seed {seed} {own} {settings.limit}"
        )
        identity = [config, flags, settings.test_rows, model_files_fingerprint(settings.model)]
        folder = self.output.resolve() / value_checksum(identity)
        return train_once(script, config, folder, f"--datasets {self.datasets} --model {settings.model} {flags}")

    def score(self, model: SentenceTransformer, folder: Path, context: str | None = None) -> dict[str, float]:
        """nDCG@10 of every retrieval with this context, each kept in a file."""
        scores = {}
        for part, retrievals in (("development", self.tests.development), ("test", self.tests.test)):
            for name, data in retrievals.items():
                (other,) = (retrieval for key, retrieval in retrievals.items() if key != name)

                def compute(data: Retrieval = data, other: Retrieval = other) -> float:
                    return ndcg_at_10(dense_scores(model, data, **given(model, context, data, other)))

                scores[f"{part} {name}"] = stored(folder / f"{part} {name}, {context or 'no stages'}.json", compute)
        return scores

    def run_start(self) -> list[dict[str, float]]:
        model = load_model(Path(self.settings.model))
        identity = [self.settings.test_rows, model_files_fingerprint(self.settings.model)]
        # The same scores for every seed, to be compared with each.
        return [self.score(model, self.output / f"start_{value_checksum(identity)}")] * self.settings.seeds

    def run_untrained(self) -> list[dict[str, float]]:
        """The start with a context that it has not learned to read, by seed of the new layers."""
        settings, scores = self.settings, []
        sizes = {"context_size": settings.context_size, "soft_prompts": SOFT_PROMPTS}
        identity = value_checksum([settings.test_rows, model_files_fingerprint(settings.model), sizes])
        for seed in range(settings.seeds):
            set_seed(seed)
            model = build_contextual_encoder(settings.model, MAX_LENGTH, **sizes)
            scores.append(self.score(model.eval(), self.output / f"untrained_{identity}_{seed}", OWN))
        return scores

    def run_way(self, way: str) -> dict:
        """The best learning rate and, for every seed, the scores by context and the last `context_cosine`."""
        context = OWN if way == OWN else None

        def load_and_score(rate: float, seed: int) -> tuple[Path, SentenceTransformer, dict[str, float]]:
            folder = self.train(way, rate, seed)
            model = load_model(folder / "model")
            return folder, model, self.score(model, folder, context)

        found = {rate: development_mean(load_and_score(rate, 0)[2]) for rate in self.settings.learning_rates}
        result = {"rate": max(found, key=found.get), "scores": {}, "cosines": []}
        for seed in range(self.settings.seeds):
            folder, model, scores = load_and_score(result["rate"], seed)
            result["scores"].setdefault(way, []).append(scores)
            for other in (NULL, OTHER, SHUFFLED) if way == OWN else ():
                result["scores"].setdefault(other, []).append(self.score(model, folder, other))
            log = json.loads((folder / "log.json").read_text())
            result["cosines"] += [entry["context_cosine"] for entry in log if "context_cosine" in entry][-1:]
            print(f"{way}, seed {seed}: {scores}", flush=True)
        return result


def stored(file: Path, compute: Callable[[], float]) -> float:
    """A number from its file, or computed and written there."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"ndcg_at_10": compute()})
    return json.loads(file.read_text())["ndcg_at_10"]


def given(model: SentenceTransformer, kind: str | None, data: Retrieval, other: Retrieval) -> dict[str, torch.Tensor]:
    """Further arguments of `encode`: the context, if there is one."""
    if kind is None:
        return {}
    context = embed_context(model, (other if kind == OTHER else data).documents, seed=0)
    if kind == SHUFFLED:
        context = context[torch.randperm(len(context), generator=torch.Generator().manual_seed(0))]
    return {"dataset_embeddings": context[:0] if kind == NULL else context}


def scores_table(results: dict[str, list[dict]]) -> list[str]:
    rows = [
        [name, *(interval([one[key] for one in (scores if name != START else scores[:1])]) for key in COLUMNS)]
        for name, scores in results.items()
    ]
    return markdown_table(["", *COLUMNS.values()], rows)


def gains_table(results: dict[str, list[dict]]) -> list[str]:
    rows = [
        [f"{better}, against {worse}", *(gain_cell(results[better], results[worse], key) for key in COLUMNS)]
        for better, worse in COMPARISONS
    ]
    return markdown_table(["", *COLUMNS.values()], rows)


def plot(results: dict[str, list[dict]], file: Path) -> None:
    """One panel per test, with the 95% interval over the seeds."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    names = list(results)[::-1]
    for axes, (key, title) in zip(figure.subplots(1, len(COLUMNS), sharey=True), COLUMNS.items()):
        found = [mean_interval([one[key] for one in results[name]]) for name in names]
        errors = [0 if lower != lower else mean - lower for mean, lower, _ in found]
        axes.barh(names, [mean for mean, *_ in found], xerr=errors, capsize=3)
        axes.set_xlabel(f"nDCG@10, {title}")
    write_png(file, figure)


def report(benchmark: Benchmark, ways: dict[str, dict], results: dict[str, list[dict]]) -> str:
    settings, costs = benchmark.settings, benchmark.costs
    cosines = ", ".join(f"{cosine:.3f}" for cosine in ways[OWN]["cosines"])
    sections = (
        "# Contextual embeddings against a bi-encoder, at equal compute",
        "![scores](contextual.png)",
        circumstances("contextual", "sentence-transformers"),
        TESTS,
        "Both start from the model of the command. Contextual: `configs/embeddings/contextual_small.yaml`, "
        f"{settings.steps:,} steps of {settings.batch_size} pairs, {settings.context_size} documents in a context. "
        f"Bi-encoder: `configs/embeddings/small.yaml`, {benchmark.equal_steps:,} steps of as many pairs. A text "
        f"has {benchmark.tokens:.0f} tokens on average, so a step of the contextual model costs as much as {costs:.1f} "
        "steps of the bi-encoder, counted in tokens that are read and passes over them.",
        f"Learning rates {', '.join(f'{rate:g}' for rate in settings.learning_rates)} are tried by both and chosen on "
        f"other pairs: {ways[OWN]['rate']:g} for the contextual model and {ways[BI_ENCODER]['rate']:g} for the "
        f"bi-encoder. {settings.seeds} seeds; intervals are 95% by Student's t, and gains are computed seed by seed.",
        f"Mean cosine of a context's vectors at the end of training, by seed: {cosines}. Near 1, the first stage has "
        "collapsed, and it makes no difference which corpus is given.",
        "\n".join(gains_table(results)),
        "\n".join(scores_table(results)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(ContextualBenchmarkArguments, args=args)
    given = asdict(settings)
    settings.model = str(Path(settings.model).resolve())

    # 1. Pairs to train on, and others to test on
    split = Path(settings.output_dir) / "data"
    tests = split_pairs(Path(settings.data), split, settings.test_rows)
    benchmark = Benchmark(settings, tests, describe_pairs("small_datasets.yaml", settings.data, split))

    # 2. Trainings and scores
    results = {START: benchmark.run_start(), UNTRAINED: benchmark.run_untrained()}
    with ThreadPoolExecutor(settings.processes) as executor:
        ways = dict(zip((BI_ENCODER, OWN), executor.map(benchmark.run_way, (BI_ENCODER, OWN))))
    results |= ways[BI_ENCODER]["scores"] | ways[OWN]["scores"]

    # 3. Report
    folder = Path(settings.results)
    folder.mkdir(parents=True, exist_ok=True)
    plot(results, folder / "contextual.png")
    values = {"settings": given, "costs": benchmark.costs, "ways": ways, "results": results}
    write_json(folder / "contextual.json", values)
    write_text(folder / "contextual.md", report(benchmark, ways, results))


if __name__ == "__main__":
    main()

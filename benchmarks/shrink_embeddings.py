"""Is a smaller embedding model better cut out of a large one, or trained from scratch? Rewrites
benchmarks/results/shrink_embeddings.md and shrink_embeddings.png.

    python benchmarks/shrink_embeddings.py --data ../shared/data

The large model is the start, fine-tuned on pairs. For each size, examples/shrink_embeddings.py cuts layers and units
out of it. The cut model is tested as it is, and after training to reproduce the embeddings of the large model
(`distilled`) or on the pairs. Random weights of the same size are trained on the pairs. All get the same number of
floating-point operations and the same search: every learning rate is tried with the first seed, the rate is chosen on
held-out pairs that are not tested on, and then the other seeds run with it. The cost of the large model is not counted.
An interrupted command goes on when it is run again, even on another machine: see stored_runs.py. Run nothing else on
the machine while the command starts, since latencies are measured then.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from circumstances import AS_TOLD, circumstances
from embedding_report import (
    COLUMNS,
    SIMILARITY,
    TESTS,
    EmbeddingBenchmarkSettings,
    describe_pairs,
    development_mean,
    interval,
    train_once,
)
from embedding_scores import TestData, evaluate, load_model, split_pairs
from pretraining import run
from shrink import LENGTH, TEXTS, latency, smaller
from stored_runs import StoredRuns
from transformers import AutoTokenizer, set_seed

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.atomic_writes import write_text
from neobert_hf.common.fingerprints import checkpoint_fingerprint
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import Count, LocalPath, Positive, parse_config
from neobert_hf.pretraining.flops import training_flops


# How many times as many layers the large model has, and how many times as wide an MLP.
SIZES = {"1/2 MLP": (1, 2), "1/2 layers": (2, 1), "1/2 layers, 1/4 MLP": (2, 4), "1/4 layers": (4, 1)}
DISTILLED, CUT, RANDOM = "cut, then distilled", "cut, then trained on pairs", "random weights, trained on pairs"
ONLY_CUT = "only cut"
WAYS = (DISTILLED, CUT, RANDOM)
# Tokens of a text, on average.
MEAN_LENGTH = 30


@dataclass(kw_only=True)
class EmbeddingShrinkBenchmark(EmbeddingBenchmarkSettings):
    start: LocalPath = field(default="benchmarks/models/small", metadata={"help": "folder of a pretrained model"})
    output_dir: LocalPath = field(default="runs/shrink_embeddings_benchmark", metadata={"help": "data, runs and logs"})
    sizes: list[str] = field(default_factory=lambda: list(SIZES), metadata={"help": f"some of {'; '.join(SIZES)}"})
    learning_rates: list[Positive] = field(
        default_factory=lambda: [6e-5, 2.5e-4, 1e-3, 4e-3], metadata={"help": "tried by all"}
    )
    large: str = field(
        default="--learning_rate 1e-3 --max_steps 900",
        metadata={"help": "further flags of the training of the large model"},
    )
    steps: Count = field(default=150, metadata={"help": "steps of distillation; the other ways get equal compute"})

    def __post_init__(self):
        super().__post_init__()
        if unknown := [size for size in self.sizes if size not in SIZES]:
            raise ValueError(f"`sizes` has {unknown[0]!r}; there are {', '.join(map(repr, SIZES))}.")


def as_name(text: str) -> str:
    """As the name of a folder."""
    return "_".join(text.replace("/", " ").replace(",", "").split())


@dataclass
class Benchmark:
    """All trainings and scores of one command.

    Args:
        config: of the start.
        datasets: YAML file of the pairs.
    """

    settings: EmbeddingShrinkBenchmark
    config: NeoBERTConfig
    tests: TestData
    datasets: Path
    runs: StoredRuns

    @property
    def output(self) -> Path:
        return Path(self.settings.output_dir)

    def config_of(self, size: str) -> NeoBERTConfig:
        return smaller(self.config, *SIZES[size])

    def steps_of(self, size: str, way: str) -> int:
        """The steps that cost as much as distillation, where running the large model costs a third of training it."""
        of_large, of_small = (training_flops(each, 1, MEAN_LENGTH, 0) for each in (self.config, self.config_of(size)))
        share = 1 if way == DISTILLED else (of_small + of_large / 3) / of_small
        return round(share * self.settings.steps)

    def train(self, model: Path, folder: Path, flags: str) -> Path:
        """Fine-tune unless it is done already, and return the folder of the model."""
        flags = f"--datasets {self.datasets} --model {model} --max_length 64 {flags} {self.settings.limit}"
        return train_once("finetune_embeddings.py", "small.yaml", folder, flags) / "model"

    def large(self) -> Path:
        return self.train(Path(self.settings.start), self.output / "large", self.settings.large)

    def cut(self, size: str) -> Path:
        """The cut model, without further training."""
        config, folder = self.config_of(size), self.output / f"cut_{as_name(size)}"
        if not (folder / "report.md").exists():
            texts = self.output / "data" / "foldoc.parquet"
            flags = f"--model {self.large()} --texts {texts} --column positive"
            if config.num_hidden_layers < self.config.num_hidden_layers:
                flags += f" --num_hidden_layers {config.num_hidden_layers}"
            if config.intermediate_size < self.config.intermediate_size:
                flags += f" --intermediate_size {config.intermediate_size}"
            run("shrink_embeddings.py", f"{flags} --output_dir {folder}", self.output / "cut.txt", threads=1)
        return folder / "model"

    def random(self, size: str, seed: int) -> Path:
        folder = self.output / f"random_{as_name(size)}_{seed}"
        if not (folder / "tokenizer_config.json").exists():
            set_seed(seed)
            NeoBERTModel(self.config_of(size)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.settings.start).save_pretrained(folder)
        return folder

    def scores(self, size: str, way: str, rate: float, seed: int) -> dict[str, float]:
        flags = f"--learning_rate {rate:g} --max_steps {self.steps_of(size, way)} --seed {seed}"

        def train_and_score() -> dict[str, float]:
            folder = self.output / as_name(f"{size} {way} {rate:g} {seed}")
            own = ""
            if way == DISTILLED:
                own = f"--teacher {self.large()} --distillation mse --teacher_dir {self.output}/teacher"
            start = self.random(size, seed) if way == RANDOM else self.cut(size)
            model = self.train(start, folder, f"{flags} {own}")
            return evaluate(load_model(model), self.tests)

        return self.runs.result(self.name_of(size, way, flags), train_and_score)

    def name_of(self, *told: str) -> str:
        """The name of a run: what differs between runs, and what all runs of a command share."""
        settings = self.settings
        rows = settings.test_rows and f"{settings.test_rows} test rows"
        told = (checkpoint_fingerprint(settings.start)[:8], f"large: {settings.large}", *told, settings.limit, rows)
        return "; ".join(filter(None, told))

    def run_way(self, size: str, way: str) -> dict:
        """The best learning rate, and the scores of every seed with it."""
        rates = self.settings.learning_rates
        rate = max(rates, key=lambda rate: development_mean(self.scores(size, way, rate, 0)))
        return {"rate": rate, "scores": [self.scores(size, way, rate, seed) for seed in range(self.settings.seeds)]}

    def run_cut(self, size: str) -> dict[str, float]:
        return self.runs.result(self.name_of(size, ONLY_CUT), lambda: evaluate(load_model(self.cut(size)), self.tests))

    def run_large(self) -> dict[str, float]:
        return self.runs.result(self.name_of(), lambda: evaluate(load_model(self.large()), self.tests))

    def run_all(self) -> dict[tuple[str, str], dict]:
        """Results by size and way. For each size, one run that needs the cut model comes first, alone."""
        cut = {(size, ONLY_CUT): {"rate": None, "scores": [self.run_cut(size)]} for size in self.settings.sizes}
        for size in self.settings.sizes:
            self.scores(size, DISTILLED, self.settings.learning_rates[0], 0)
        jobs = list(itertools.product(self.settings.sizes, WAYS))
        with ThreadPoolExecutor(self.settings.processes) as executor:
            return cut | dict(zip(jobs, executor.map(lambda job: self.run_way(*job), jobs)))


def report(benchmark: Benchmark, large: dict[str, float], found: dict, milliseconds: dict[str, float]) -> None:
    settings = benchmark.settings
    rows = [["large", f"{milliseconds['large']:.2f}", "", "", *(f"{large[key]:.3f}" for key in COLUMNS)]]
    for size, way in itertools.product(settings.sizes, (ONLY_CUT, *WAYS)):
        one = found[size, way]
        cells = [interval([scores[key] for scores in one["scores"]]) for key in COLUMNS]
        trained = ["", ""] if way == ONLY_CUT else [f"{benchmark.steps_of(size, way):,}", f"{one['rate']:g}"]
        rows.append([f"{size}: {way}", f"{milliseconds[size]:.2f}", *trained, *cells])
    text = [
        "# A smaller embedding model: cut out of a large one, or trained from scratch",
        "",
        "![Retrieval over the latency, by where the small model comes from](shrink_embeddings.png)",
        "",
        circumstances(
            "shrink_embeddings", "sentence-transformers", precision=AS_TOLD, runs=benchmark.runs.circumstances()
        ),
        "",
        f"{TESTS} {SIMILARITY}",
        "",
        f"The large model is fine-tuned on pairs: `configs/embeddings/small.yaml` with `{settings.large}`. The "
        f"time is the median of the encoder in ms for {TEXTS} x {LENGTH} tokens. For each size, the steps of all ways "
        "cost the same number of floating-point operations. Learning rates "
        f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)} are tried by all ways and chosen on other "
        f"pairs; means of {settings.seeds} seeds with 95% intervals (Student's t).",
        "",
        *markdown_table(["", "ms", "steps", "rate", *COLUMNS.values()], rows),
    ]
    panels = []
    for key in ("test FOLDOC", "test WordNet"):
        lines = [
            Line(
                sorted(
                    (milliseconds[size], mean_interval([each[key] for each in one["scores"]])[0])
                    for (size, of_way), one in found.items()
                    if of_way == way
                ),
                way,
                {"marker": "o"},
            )
            for way in (*WAYS, ONLY_CUT)
        ]
        lines.append(Line([(milliseconds["large"], large[key])], "large", {"marker": "*", "markersize": 9}))
        labels = {"xlabel": f"ms for {TEXTS} x {LENGTH} tokens", "ylabel": "nDCG@10", "title": COLUMNS[key]}
        panels.append(Panel(lines, labels))
    results = Path(settings.results)
    plot_lines(results / "shrink_embeddings.png", panels)
    write_text(results / "shrink_embeddings.md", "\n".join(text) + "\n")


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(EmbeddingShrinkBenchmark, args=args)
    output, results = Path(settings.output_dir), Path(settings.results)
    output.mkdir(parents=True, exist_ok=True)
    tests = split_pairs(Path(settings.data), output / "data", settings.test_rows)
    datasets = describe_pairs("small_datasets.yaml", settings.data, output / "data")
    runs = StoredRuns(results / "single_runs" / "shrink_embeddings.json")
    benchmark = Benchmark(settings, NeoBERTConfig.from_pretrained(settings.start), tests, datasets, runs)

    # Before training, which warms the machine up.
    configs = {"large": benchmark.config} | {size: benchmark.config_of(size) for size in settings.sizes}
    milliseconds = {name: latency(config, output) for name, config in configs.items()}
    large, found = benchmark.run_large(), benchmark.run_all()
    results.mkdir(parents=True, exist_ok=True)
    report(benchmark, large, found, milliseconds)


if __name__ == "__main__":
    main()

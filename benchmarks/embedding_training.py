"""What each way of training adds to plain fine-tuning on pairs. Writes benchmarks/results/embedding_training.md.

    python benchmarks/embedding_training.py --data ../shared/data --start runs/small/model

Every recipe starts from the same model and trains on the same pairs for as many steps, and gets the same search: every
learning rate with the first seed, the rate chosen on held-out pairs that are not tested on, then the other seeds. The
model that mines and guides is the plain one of the first seed. The teacher is a reranker that is trained from the same
start on the same pairs, so that nothing but the way of training differs; `--teacher` takes another one. Interrupted,
the same command goes on, on another machine as well: see stored_runs.py.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from circumstances import circumstances
from embedding_report import (
    COLUMNS,
    SIMILARITY,
    TESTS,
    describe_pairs,
    development_mean,
    gain_cell,
    gain_interval,
    interval,
)
from embedding_scores import TestData, evaluate, load_model, split_pairs
from matplotlib.figure import Figure
from pretraining import ROOT, run
from stored_runs import StoredRuns

from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.common.fingerprints import model_files_fingerprint, value_checksum
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import Count, Positive, check_ranges, parse_config


TRAIN = "finetune_embeddings.py"
PLAIN, MINED, TAUGHT = "plain", "mined negatives", "distillation"
MINER = "--miner {helper} --negatives 4"
# Flags beside those of the plain recipe. A teacher compares the documents of a row, so it needs mined negatives.
RECIPES = {
    PLAIN: "",
    MINED: MINER,
    "guide": "--guide {helper}",
    "mined negatives and guide": MINER + " --guide {helper}",
    TAUGHT: MINER + " --teacher {teacher} --distillation kl --contrastive_weight 1 --teacher_dir {teacher_dir}",
    "distillation alone": MINER + " --teacher {teacher} --distillation kl --teacher_dir {teacher_dir}",
    "LoRA": "--lora_rank 16",
}


@dataclass
class TrainingBenchmarkArguments:
    data: str = field(metadata={"help": "folder with pairs/ and the test sets"})
    start: str = field(metadata={"help": "folder of the model that every recipe starts from"})
    teacher: str | None = field(default=None, metadata={"help": "reranker or embedding model; one is trained if unset"})
    recipes: list[str] = field(default_factory=lambda: list(RECIPES), metadata={"help": "run these, and the plain one"})
    output_dir: str = field(default="runs/embedding_training_benchmark", metadata={"help": "data, runs and logs"})
    results: str = field(default="benchmarks/results", metadata={"help": "where the report goes"})
    learning_rates: list[Positive] = field(
        default_factory=lambda: [5e-4, 2e-3, 8e-3], metadata={"help": "tried by all; LoRA wants larger ones"}
    )
    seeds: Count = field(default=5, metadata={"help": "of the data order, dropout and adapters"})
    processes: Count = field(default=2, metadata={"help": "runs at a time, of one thread each"})
    pairs: str = field(default="--max_steps 300", metadata={"help": "further flags of every recipe"})
    reranker: str = field(default="--max_steps 600", metadata={"help": "further flags of the teacher's training"})
    limit: str = field(default="", metadata={"help": "further flags of every training, for a trial"})
    test_rows: Count | None = field(default=None, metadata={"help": "rows to develop and to test on, for a trial"})

    def __post_init__(self):
        check_ranges(self)
        for name in self.recipes:
            if name not in RECIPES:
                raise ValueError(f"`recipes` has {name!r}; there are {', '.join(map(repr, RECIPES))}.")


@dataclass
class Benchmark:
    """All trainings and scores of one command.

    Args:
        datasets: YAML file of the pairs to train on.
    """

    settings: TrainingBenchmarkArguments
    tests: TestData
    datasets: Path
    runs: StoredRuns
    lock: Lock = field(default_factory=Lock)

    @property
    def output(self) -> Path:
        return Path(self.settings.output_dir).resolve()

    def train(self, script: str, config: str, flags: str, *helpers: str) -> Path:
        """Train unless that is done, and return the folder of the run, whose name tells its flags and its start.

        Args:
            helpers: folders of models that the flags name.
        """
        flags = (
            f"--config {ROOT}/configs/embeddings/{config} --datasets {self.datasets} --model {self.settings.start} "
            f"--max_length 64 --eval_strategy no --save_steps 200 --report_to none {flags} {self.settings.limit}"
        )
        used = [self.settings.start, *helpers]
        folder = self.output / value_checksum([flags, *map(model_files_fingerprint, used)])
        if not (folder / "log.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            # The same for all runs: mined once.
            (self.output / "mined").mkdir(exist_ok=True)
            if not (folder / "mined").exists():
                (folder / "mined").symlink_to(self.output / "mined")
            run(script, f"{flags} --output_dir {folder}", folder / "output.txt", threads=1)
        return folder

    def flags(self, rate: float, seed: int) -> str:
        return f"--learning_rate {rate:g} --seed {seed} {self.settings.pairs}"

    def scores(self, recipe: str, rate: float, seed: int) -> dict[str, float]:
        def train_and_score() -> dict[str, float]:
            helpers = self.helpers_of(recipe)
            flags = f"{self.flags(rate, seed)} {RECIPES[recipe].format_map(helpers)}"
            used = [helpers[name] for name in ("helper", "teacher") if name in helpers]
            return evaluate(load_model(self.train(TRAIN, "small.yaml", flags, *used) / "model"), self.tests)

        settings = self.settings
        told = [model_files_fingerprint(settings.start), f"{self.flags(rate, seed)} {RECIPES[recipe]}".strip()]
        if "{helper}" in RECIPES[recipe]:
            told.append(f"helper: the best of {settings.learning_rates}")
        if "{teacher}" in RECIPES[recipe]:
            told.append(f"teacher: {settings.teacher or settings.reranker}")
        told += [settings.limit] * bool(settings.limit) + [f"{settings.test_rows} test rows"] * bool(settings.test_rows)
        return self.runs.result("; ".join(told), train_and_score)

    def best_rate(self, recipe: str) -> float:
        """By the first seed, on the development pairs."""
        return max(self.settings.learning_rates, key=lambda rate: development_mean(self.scores(recipe, rate, 0)))

    def run_recipe(self, recipe: str) -> dict:
        """The best learning rate, and the scores of every seed with it."""
        rate = self.best_rate(recipe)
        scores = [self.scores(recipe, rate, seed) for seed in range(self.settings.seeds)]
        print(f"{recipe}: FOLDOC {statistics.mean(one['test FOLDOC'] for one in scores):.3f}", flush=True)
        return {"rate": rate, "scores": scores}

    def helpers_of(self, recipe: str) -> dict[str, str]:
        """Folders for the braces in a recipe, made when a run that is not stored first needs them.

        The miner and guide is the plain model of the first seed. The teacher is a reranker from the same start, with
        the documents that the plain model confuses as wrong ones.
        """
        if "{" not in RECIPES[recipe]:
            return {}
        with self.lock:
            plain = self.train(TRAIN, "small.yaml", f"{self.flags(self.best_rate(PLAIN), 0)} ")
            found = {"helper": str(plain / "model")}
            if "{teacher}" in RECIPES[recipe]:
                found |= {"teacher": self.settings.teacher, "teacher_dir": str(self.output / "teacher")}
                if found["teacher"] is None:
                    flags = f"{MINER.format_map(found)} --seed 0 {self.settings.reranker}"
                    teacher = self.train("train_reranker.py", "reranker.yaml", flags, found["helper"])
                    found["teacher"] = str(teacher / "model")
            return found

    def run_all(self) -> dict[str, dict]:
        results = {PLAIN: self.run_recipe(PLAIN)}
        others = [name for name in RECIPES if name in self.settings.recipes and name != PLAIN]
        with ThreadPoolExecutor(self.settings.processes) as executor:
            return results | dict(zip(others, executor.map(self.run_recipe, others)))


def comparisons(results: dict[str, dict]) -> list[tuple[str, str]]:
    """Each recipe with the plain one, and distillation with what it is added to."""
    found = [(name, PLAIN) for name in results if name != PLAIN]
    return found + [(TAUGHT, MINED)] * (MINED in results and TAUGHT in results)


def gains_table(results: dict[str, dict]) -> list[str]:
    rows = []
    for better, worse in comparisons(results):
        scores = [results[name]["scores"] for name in (better, worse)]
        cells = [gain_cell(*scores, key) for key in COLUMNS]
        rows.append([f"{better}, against {worse}", *cells])
    return markdown_table(["", *COLUMNS.values()], rows)


def scores_table(results: dict[str, dict]) -> list[str]:
    rows = [
        [name, f"`{RECIPES[name]}`" if RECIPES[name] else "-", f"{result['rate']:g}"]
        + [interval([one[key] for one in result["scores"]]) for key in COLUMNS]
        for name, result in results.items()
    ]
    return markdown_table(["recipe", "flags", "rate", *COLUMNS.values()], rows)


def plot(results: dict[str, dict], file: Path) -> None:
    """One panel a test: what each recipe adds to the plain one, with the 95% interval."""
    figure = Figure(figsize=(13, 1.2 + 0.4 * len(results)), layout="constrained")
    names = [name for name in results if name != PLAIN][::-1]
    for axes, (key, title) in zip(figure.subplots(1, len(COLUMNS), sharey=True), COLUMNS.items()):
        found = [gain_interval(results[name]["scores"], results[PLAIN]["scores"], key) for name in names]
        axes.barh(names, [mean for mean, *_ in found], xerr=[mean - lower for mean, lower, _ in found], capsize=3)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel(("" if key == "similarity" else "nDCG@10, ") + title + f", above {PLAIN}")
    write_png(file, figure)


def report(settings: TrainingBenchmarkArguments, results: dict[str, dict], runs: StoredRuns) -> str:
    teacher = settings.teacher or f"a reranker, `configs/embeddings/reranker.yaml` with `{settings.reranker}`"
    sections = (
        "# What each way of training embeddings adds",
        "![what each recipe adds to the plain one](embedding_training.png)",
        circumstances("embedding_training", "sentence-transformers", "peft", runs=runs.circumstances()),
        f"{TESTS} {SIMILARITY}",
        f"Every recipe is `configs/embeddings/small.yaml` with `{settings.pairs}` and the flags of the second table, "
        f"from one start. Miner and guide: the plain model of the first seed. Teacher: {teacher}. Rates "
        f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)} are tried by all and chosen on other pairs; "
        f"{settings.seeds} seeds; intervals are 95% by Student's t, and gains are taken seed by seed.",
        "\n".join(gains_table(results)),
        "\n".join(scores_table(results)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(TrainingBenchmarkArguments, args=args)
    settings.start = str(Path(settings.start).resolve())

    # 1. Pairs to train on, and others to test on
    output = Path(settings.output_dir)
    tests = split_pairs(Path(settings.data), output / "data", settings.test_rows)
    folder = Path(settings.results)
    runs = StoredRuns(folder / "single_runs" / "embedding_training.json")
    benchmark = Benchmark(settings, tests, describe_pairs("small_datasets.yaml", settings.data, output / "data"), runs)

    # 2. Trainings and scores
    results = benchmark.run_all()

    # 3. Report
    folder.mkdir(parents=True, exist_ok=True)
    plot(results, folder / "embedding_training.png")
    write_json(folder / "embedding_training.json", {"settings": asdict(settings), "results": results})
    write_text(folder / "embedding_training.md", report(settings, results, runs))


if __name__ == "__main__":
    main()

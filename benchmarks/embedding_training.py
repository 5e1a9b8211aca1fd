"""What each way of training adds to plain fine-tuning on pairs. Writes benchmarks/results/embedding_training.md.

    python benchmarks/embedding_training.py --data ../shared/data --start runs/small/model

As in retrieval_from_documents.py, the start is first fine-tuned on pairs, once. Then every recipe goes on from that
model, on the same pairs for the same number of steps. All get the same search: every learning rate is tried with the
first seed, the rate is chosen on held-out pairs that are not tested on, and then the other seeds run with it. The model
that all recipes go on from is also the miner and the guide. The teacher, which checks mined negatives, is a
reranker that is trained from the start on the same pairs; `--teacher` replaces it. The teacher of embeddings is the
start, fine-tuned for longer, and can be the guide. A recipe with other
instructions goes on from a start that was fine-tuned with these instructions. An interrupted command goes on when it is
run again, even on another machine: see stored_runs.py.
"""

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

import yaml
from circumstances import AS_TOLD, circumstances
from embedding_report import (
    COLUMNS,
    SIMILARITY,
    TESTS,
    EmbeddingBenchmarkSettings,
    describe_pairs,
    development_mean,
    gain_cell,
    gain_interval,
    interval,
    train_once,
)
from embedding_scores import TestData, evaluate, load_model, split_pairs
from matplotlib.figure import Figure
from stored_runs import StoredRuns

from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.common.fingerprints import model_files_fingerprint, value_checksum
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import Positive, parse_config


TRAIN = "finetune_embeddings.py"
PLAIN, MINED = "plain", "mined negatives"
MINER = "--miner {helper} --negatives 4"
DATASETS = "--datasets "
# Flags beside those of the plain recipe. Stored runs are looked up by these texts.
RECIPES = {
    PLAIN: "",
    MINED: MINER,
    "mined negatives, margin of 0.2": MINER + " --relative_margin 0.2",
    # Four mined negatives per row leave 21 of 64 pairs in a batch, since its number of texts stays the same.
    "mined negatives, larger batches": MINER + " --per_device_train_batch_size 192",
    "larger batches": "--per_device_train_batch_size 192",
    "larger batches, as many pairs": "--per_device_train_batch_size 192 --max_steps 34",
    "mined negatives, checked by a reranker": MINER + " --cross_encoder {teacher}",
    "guide": "--guide {helper}",
    "guide by the teacher of embeddings": "--guide {embedding_teacher}",
    "mined negatives and guide": MINER + " --guide {helper}",
    "LoRA": "--lora_rank 16",
    "no instruction": DATASETS + "{no_instruction}",
    "instructions for queries and documents": DATASETS + "{both_instructions}",
    "instruction, special tokens behind it": DATASETS + "{special_tokens}",
}


@dataclass(kw_only=True)
class TrainingBenchmarkArguments(EmbeddingBenchmarkSettings):
    start: str = field(metadata={"help": "folder of a pretrained model"})
    teacher: str | None = field(default=None, metadata={"help": "reranker; if unset, one is trained"})
    recipes: list[str] = field(default_factory=lambda: list(RECIPES), metadata={"help": "run these, and the plain one"})
    output_dir: str = field(default="runs/embedding_training_benchmark", metadata={"help": "data, runs and logs"})
    learning_rates: list[Positive] = field(
        default_factory=lambda: [2.5e-4, 1e-3, 4e-3], metadata={"help": "tried by all recipes; LoRA needs larger ones"}
    )
    first: str = field(
        default="--learning_rate 1e-3 --max_steps 300",
        metadata={"help": "further flags of the training that all recipes go on from"},
    )
    pairs: str = field(default="--max_steps 100", metadata={"help": "further flags of every recipe"})
    reranker: str = field(default="--max_steps 600", metadata={"help": "further flags of the teacher's training"})
    embedding_teacher: str = field(
        default="--learning_rate 1e-3 --max_steps 900",
        metadata={"help": "further flags of the training of the teacher of embeddings"},
    )

    def __post_init__(self):
        super().__post_init__()
        for name in self.recipes:
            if name not in RECIPES:
                raise ValueError(f"`recipes` has {name!r}; there are {', '.join(map(repr, RECIPES))}.")


@dataclass
class Benchmark:
    """All trainings and scores of one command.

    Args:
        datasets: YAML file of the pairs to train on.
        variants: YAML files with other instructions, as `describe_variants` returns them.
    """

    settings: TrainingBenchmarkArguments
    tests: TestData
    datasets: Path
    variants: dict[str, Path]
    runs: StoredRuns
    lock: Lock = field(default_factory=Lock)

    @property
    def output(self) -> Path:
        return Path(self.settings.output_dir).resolve()

    def train(self, script: str, config: str, flags: str, start: str, *helpers: str) -> Path:
        """Train unless it is done already, and return the folder of the run, whose name depends on flags and start.

        Args:
            helpers: folders of models that the flags name.
        """
        flags = f"--datasets {self.datasets} --model {Path(start).resolve()} {flags} {self.settings.limit}"
        folder = self.output / value_checksum([config, flags, *map(model_files_fingerprint, (start, *helpers))])
        if not (folder / "log.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            # A folder for all runs, so that negatives are mined once.
            (self.output / "mined").mkdir(exist_ok=True)
            if not (folder / "mined").exists():
                (folder / "mined").symlink_to(self.output / "mined")
        return train_once(script, config, folder, f"--max_length 64 {flags}")

    def fine_tuned(self, *flags: str) -> str:
        """The folder of the start, fine-tuned on pairs with these flags."""
        with self.lock:
            return str(self.train(TRAIN, "small.yaml", " ".join(filter(None, flags)), self.settings.start) / "model")

    def first_model(self, recipe: str = PLAIN) -> str:
        """The folder of the model that a recipe goes on from: the same for all, unless a recipe has other datasets."""
        flags = RECIPES[recipe] if RECIPES[recipe].startswith(DATASETS) else ""
        return self.fine_tuned(self.settings.first, flags.format_map(self.variants))

    def flags(self, rate: float, seed: int) -> str:
        return f"--learning_rate {rate:g} --seed {seed} {self.settings.pairs}"

    def scores(self, recipe: str, rate: float, seed: int) -> dict[str, float]:
        template, settings = RECIPES[recipe], self.settings

        def train_and_score() -> dict[str, float]:
            helper = self.first_model(recipe)
            teachers = {name: make() for name, make in self.teachers().items() if f"{{{name}}}" in template}
            names = {"helper": helper} | teachers | self.variants
            flags = f"{self.flags(rate, seed)} {template.format_map(names)}"
            folder = self.train(TRAIN, "small.yaml", flags, helper, *teachers.values())
            return evaluate(load_model(folder / "model"), self.tests)

        told = [f"{self.flags(rate, seed)} {template}".strip()]
        if "{teacher}" in template:
            told.append(f"teacher: {settings.teacher or settings.reranker}")
        if "{embedding_teacher}" in template:
            told.append(f"teacher: {settings.embedding_teacher}")
        if template.startswith(DATASETS):
            told.append("these datasets before as well")
        return self.runs.result(self.name_of(*told), train_and_score)

    def name_of(self, *told: str) -> str:
        """The name of a run: what differs between runs, and what all runs of a command share."""
        settings = self.settings
        told = (model_files_fingerprint(settings.start), f"after {settings.first}", *told, settings.limit)
        rows = settings.test_rows and f"{settings.test_rows} test rows"
        return "; ".join(filter(None, [*told, rows]))

    def best_rate(self, recipe: str) -> float:
        """The best rate of the first seed, on the development pairs."""
        return max(self.settings.learning_rates, key=lambda rate: development_mean(self.scores(recipe, rate, 0)))

    def run_recipe(self, recipe: str) -> dict:
        """The best learning rate, and the scores of every seed with it."""
        rate = self.best_rate(recipe)
        scores = [self.scores(recipe, rate, seed) for seed in range(self.settings.seeds)]
        print(f"{recipe}: FOLDOC {statistics.mean(one['test FOLDOC'] for one in scores):.3f}", flush=True)
        return {"rate": rate, "scores": scores}

    def teachers(self) -> dict[str, Callable[[], str]]:
        """Functions that return the folder of a teacher, by its name in the flags of a recipe."""
        return {
            "teacher": self.reranker,
            "embedding_teacher": lambda: self.fine_tuned(self.settings.embedding_teacher),
        }

    def reranker(self) -> str:
        """The folder of a reranker that is trained from the start, with hard negatives of the miner."""
        if self.settings.teacher is not None:
            return self.settings.teacher
        miner = self.first_model()
        flags = f"{MINER.format(helper=miner)} --seed 0 {self.settings.reranker}"
        with self.lock:
            return str(self.train("train_reranker.py", "reranker.yaml", flags, self.settings.start, miner) / "model")

    def run_first(self) -> dict[str, float]:
        """The scores of the model that every recipe goes on from."""
        return self.runs.result(self.name_of(), lambda: evaluate(load_model(Path(self.first_model())), self.tests))

    def run_all(self) -> dict[str, dict]:
        results = {PLAIN: self.run_recipe(PLAIN)}
        others = [name for name in RECIPES if name in self.settings.recipes and name != PLAIN]
        with ThreadPoolExecutor(self.settings.processes) as executor:
            return results | dict(zip(others, executor.map(self.run_recipe, others)))


def describe_variants(plain: Path) -> dict[str, Path]:
    """Write descriptions of the same pairs with other instructions, and return their paths, by variant.

    `both_instructions` are made as in the released evaluation: the same sentence, followed by what the text is.
    """
    written = {}
    for name in ("no_instruction", "both_instructions", "special_tokens"):
        content = yaml.safe_load(plain.read_text())
        for entry in content["train"].values():
            asked = entry["instruction"]
            if name == "no_instruction":
                entry["instruction"] = ""
            if name == "both_instructions":
                entry |= {"instruction": f"{asked} Query:", "document_instruction": f"{asked} Document:"}
        if name == "special_tokens":
            content["separator"] = name
        written[name] = plain.with_name(f"{name}.yaml")
        write_text(written[name], yaml.safe_dump(content, sort_keys=False))
    return written


def comparisons(results: dict[str, dict]) -> list[tuple[str, str]]:
    """Each recipe with the plain one, and recipes that add something to mined negatives also with mined negatives."""
    found = [(name, PLAIN) for name in results if name != PLAIN]
    return found + [(name, MINED) for name in results if RECIPES[name].startswith(MINER + " ") and MINED in results]


def gains_table(results: dict[str, dict]) -> list[str]:
    rows = []
    for better, worse in comparisons(results):
        scores = [results[name]["scores"] for name in (better, worse)]
        cells = [gain_cell(*scores, key) for key in COLUMNS]
        rows.append([f"{better}, against {worse}", *cells])
    return markdown_table(["", *COLUMNS.values()], rows)


def scores_table(before: dict[str, float], results: dict[str, dict]) -> list[str]:
    rows = [["before", "-", "-", *(f"{before[key]:.3f}" for key in COLUMNS)]]
    rows += [
        [name, f"`{RECIPES[name]}`" if RECIPES[name] else "-", f"{result['rate']:g}"]
        + [interval([one[key] for one in result["scores"]]) for key in COLUMNS]
        for name, result in results.items()
    ]
    return markdown_table(["recipe", "flags", "rate", *COLUMNS.values()], rows)


def plot(results: dict[str, dict], file: Path) -> None:
    """One panel per test: what each recipe adds to the plain one, with the 95% interval."""
    figure = Figure(figsize=(13, 1.2 + 0.4 * len(results)), layout="constrained")
    names = [name for name in results if name != PLAIN][::-1]
    for axes, (key, title) in zip(figure.subplots(1, len(COLUMNS), sharey=True), COLUMNS.items()):
        found = [gain_interval(results[name]["scores"], results[PLAIN]["scores"], key) for name in names]
        axes.barh(names, [mean for mean, *_ in found], xerr=[mean - lower for mean, lower, _ in found], capsize=3)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(("" if key == "similarity" else "nDCG@10, ") + title + f", above {PLAIN}")
    write_png(file, figure)


def report(
    settings: TrainingBenchmarkArguments, before: dict[str, float], results: dict[str, dict], runs: StoredRuns
) -> str:
    teacher = ""
    if any("{teacher}" in RECIPES[name] for name in results):
        made = f"a reranker, `configs/embeddings/reranker.yaml` with `{settings.reranker}`"
        teacher = f"Teacher, which checks mined negatives: {settings.teacher or made}. "
    if any("{embedding_teacher}" in RECIPES[name] for name in results):
        teacher += f"Teacher of embeddings: the start fine-tuned with `{settings.embedding_teacher}`. "
    if any(RECIPES[name].startswith(DATASETS) for name in results):
        teacher += (
            "Recipes with other `--datasets` have other instructions; their start was fine-tuned with these, too. "
        )
    sections = (
        "# What each way of training embeddings adds",
        "![what each recipe adds to the plain one](embedding_training.png)",
        circumstances(
            "embedding_training", "sentence-transformers", "peft", precision=AS_TOLD, runs=runs.circumstances()
        ),
        f"{TESTS} {SIMILARITY}",
        f"The pretrained model is fine-tuned once: `configs/embeddings/small.yaml` with `{settings.first}`. Every "
        f"recipe goes on from this model (`before`) with `{settings.pairs}` and the flags of the second table. The "
        f"same model is the miner and the guide. {teacher}Learning rates "
        f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)} are tried by all recipes and chosen on other "
        f"pairs; {settings.seeds} seeds; intervals are 95% by Student's t, and gains are computed seed by seed.",
        "\n".join(gains_table(results)),
        "\n".join(scores_table(before, results)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(TrainingBenchmarkArguments, args=args)

    # 1. Pairs to train on, and others to test on
    output = Path(settings.output_dir)
    tests = split_pairs(Path(settings.data), output / "data", settings.test_rows)
    folder = Path(settings.results)
    runs = StoredRuns(folder / "single_runs" / "embedding_training.json")
    datasets = describe_pairs("small_datasets.yaml", settings.data, output / "data")
    benchmark = Benchmark(settings, tests, datasets, describe_variants(datasets), runs)

    # 2. Trainings and scores
    before, results = benchmark.run_first(), benchmark.run_all()

    # 3. Report
    folder.mkdir(parents=True, exist_ok=True)
    plot(results, folder / "embedding_training.png")
    write_json(folder / "embedding_training.json", {"settings": asdict(settings), "before": before, "results": results})
    write_text(folder / "embedding_training.md", report(settings, before, results, runs))


if __name__ == "__main__":
    main()

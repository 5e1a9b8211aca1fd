"""Which small model to pretrain on a CPU: sizes, rates, vocabularies, optimizers and masks at equal compute.

    python benchmarks/scaling_small.py --text ../shared/data/text --labels ../shared/data

Every run is `examples/pretrain.py` with `configs/pretrain/small.yaml` and a few flags. It gets as many tokens as the
compute of its round allows. The sizes of the last round are then fine-tuned on few labels, as in worth.py. Rewrites
benchmarks/results/scaling_small.md. After an interruption the same command resumes, also on another machine: see
stored_runs.py.
"""

import itertools
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from circumstances import circumstances
from datasets import disable_progress_bars
from embedding_report import interval
from pretraining import ROOT, run
from stored_runs import StoredRuns
from worth import KINDS, Benchmark, WorthArguments, gain_cells, gains, read_tasks

from neobert_hf import NeoBERTConfig
from neobert_hf.common.atomic_writes import write_text
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.common.settings import Count, Positive, check_ranges, parse_config
from neobert_hf.pretraining.flops import training_flops
from neobert_hf.pretraining.shards import load_shards, load_tokenizer


STEP_TOKENS = 2048
# Tokens of a window, on average: documents are split at 256, and many end earlier.
MEAN_LENGTH = 180
# Layers, width, heads, and range of the linear layers' initial weights. With the published range of 0.02, narrow models
# start slowly.
SIZES = {"2 x 128": (2, 128, 2, 0.1), "4 x 192": (4, 192, 3, 0.08), "6 x 256": (6, 256, 4, 0.06)}
# The size of configs/pretrain/small.yaml, whose loss is in pretraining.md and whose worth is in worth.md.
SMALL = "4 x 192"
VOCABULARIES = (4096, 8192)
BERT_MASKS, PAPER_MASKS = (0.8, 0.1), (1.0, 0.0)
# Numbers of labelled rows by task of worth.py, and the settings with which that page has been made.
LABELLED_ROWS = {"tags": (100, 300), "sections": (100, 300)}
WORTH_SETTINGS = {"search_seeds": 1}


@dataclass(frozen=True)
class Candidate:
    """A model and how it is trained.

    Args:
        compute: floating-point operations of the whole training.
        masks: shares of the tokens to predict that become [MASK], and that become a random token.
        tied_range: if set, the decoder shares the embeddings' weights, whose initial values are within +- this. If
            None, the decoder has its own weights, and the embeddings' initial values are within +- 1.
    """

    compute: float
    size: str = SMALL
    vocabulary: int = 8192
    optimizer: str = "muon"
    rate: float = 2e-3
    masks: tuple[float, float] = BERT_MASKS
    tied_range: float | None = None

    @property
    def name(self) -> str:
        masks = "bert" if self.masks == BERT_MASKS else "paper"
        size = self.size.replace(" ", "")
        tied = "" if self.tied_range is None else f"_tied{self.tied_range:g}"
        return f"{self.compute:.1e}_{size}_{self.vocabulary}_{self.optimizer}_{self.rate:g}_{masks}{tied}"

    @property
    def config(self) -> NeoBERTConfig:
        layers, width, heads, _ = SIZES[self.size]
        return NeoBERTConfig(
            vocab_size=self.vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )

    @property
    def flops_of_a_step(self) -> float:
        return STEP_TOKENS * training_flops(self.config, 1, MEAN_LENGTH, 0.2)

    @property
    def steps(self) -> int:
        return round(self.compute / self.flops_of_a_step)

    def flags(self, data: Path) -> str:
        layers, width, heads, init_range = SIZES[self.size]
        folder = data / str(self.vocabulary)
        return (
            f"--config {ROOT}/configs/pretrain/small.yaml --train_data {folder}/train "
            f"--validation_data {folder}/validation --hidden_size {width} --num_hidden_layers {layers} "
            f"--num_attention_heads {heads} --intermediate_size {4 * width} --decoder_init_range {init_range} "
            f"--tie_word_embeddings {self.tied_range is not None} --embedding_init_range {self.tied_range or 1.0} "
            f"--warmup_steps 0.05 --optimizer {self.optimizer} --learning_rate {self.rate} "
            f"--mask_replace_prob {self.masks[0]} --random_replace_prob {self.masks[1]} "
            f"--micro_batch_tokens {STEP_TOKENS} "
            f"--global_batch_tokens {STEP_TOKENS} --max_steps {self.steps} --eval_steps {max(1, self.steps // 5)} "
            f"--save_steps 500 --logging_steps {max(1, self.steps // 50)} --report_to none --bf16 true --use_cpu true"
        )


def first_round(compute: float) -> list[Candidate]:
    """Sizes x vocabularies x rates with Muon and BERT's masks, then other settings with the middle size."""
    grid = itertools.product(SIZES, VOCABULARIES, (1e-3, 2e-3))
    return [
        *(Candidate(compute, size, vocabulary, "muon", rate) for size, vocabulary, rate in grid),
        *(Candidate(compute, optimizer="adamw", rate=rate) for rate in (1e-3, 2e-3)),
        Candidate(compute, rate=4e-3),
        Candidate(compute, masks=PAPER_MASKS),
        *(Candidate(compute, rate=rate, tied_range=0.1) for rate in (2e-3, 4e-3, 8e-3)),
        Candidate(compute, rate=4e-3, tied_range=0.5),
    ]


def second_round(compute: float) -> list[Candidate]:
    """The settings of configs/pretrain/small.yaml in every size, since the best size depends on the compute."""
    return [Candidate(compute, size=size, rate=4e-3, tied_range=0.5) for size in SIZES]


def last_round(compute: float) -> list[Candidate]:
    """The other sizes with the compute of configs/pretrain/small.yaml."""
    return [Candidate(compute, size=size, rate=4e-3, tied_range=0.5) for size in SIZES if size != SMALL]


def small_model(compute: float, results: Path) -> dict[Candidate, list[tuple[float, float]]]:
    """The loss curve of configs/pretrain/small.yaml from pretraining.py, whose warm-up is 2% instead of 5%."""
    file, small = results / "pretraining.json", Candidate(compute, rate=4e-3, tied_range=0.5)
    if not file.exists():
        return {}
    stage, *_ = json.loads(file.read_text())["stages"].values()
    return {small: [(one["step"] * small.flops_of_a_step, one["eval_loss"]) for one in stage if "eval_loss" in one]}


def worth_of_small_model(results: Path) -> dict[str, dict[int, dict]]:
    """By task and number of rows, what worth.py has measured of its first start: the model of small.yaml."""
    scores = json.loads((results / "worth.json").read_text())["scores"]
    return {
        task: {rows: next(iter(scores[task][str(rows)].values())) for rows in numbers}
        for task, numbers in LABELLED_ROWS.items()
    }


@dataclass
class SweepArguments:
    text: str = field(metadata={"help": "folder with train.parquet and validation.parquet"})
    labels: str = field(metadata={"help": "folder with pos_brown/ and classification_debian_sections/"})
    output_dir: str = field(default="runs/scaling_small", metadata={"help": "data, runs and logs"})
    processes: Count = field(default=1, metadata={"help": "runs at a time, of one thread each"})
    compute: Positive = field(default=1.5e13, metadata={"help": "floating-point operations of a run"})
    more_compute: Positive = field(default=6e13, metadata={"help": "of each size, in a second round"})
    most_compute: Positive = field(default=2.3e14, metadata={"help": "of each size, in a third round"})
    results: str = field(default="benchmarks/results", metadata={"help": "where the report goes"})
    limit: str = field(default="", metadata={"help": "further flags of every run, for a trial"})

    def __post_init__(self):
        check_ranges(self)


def prepare(text: Path, data: Path, vocabulary: int) -> None:
    folder = data / str(vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    if not (folder / "tokenizer").exists():
        flags = f"--source {text}/train.parquet --vocab_size {vocabulary} --output_dir {folder}/tokenizer"
        run("train_tokenizer.py", flags, log, threads=1)
    for name, flags in (
        ("train", f"--source {text}/train.parquet --max_length 256 --long_documents split"),
        ("validation", f"--source {text}/validation.parquet --max_length 256"),
    ):
        flags += (
            f" --tokenizer {folder}/tokenizer --output_dir {folder}/{name} --documents_per_shard 10000 --num_proc 1"
        )
        run("prepare_data.py", flags, log, threads=1)


def train(candidate: Candidate, output: Path, limit: str) -> list[tuple[float, float]]:
    """Train, unless this has been done. Returns the compute so far and the held-out loss at each evaluation."""
    folder = output / candidate.name
    if not (folder / "log.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = f"{candidate.flags(output / 'data')} {limit} --output_dir {folder}"
        run("pretrain.py", flags, folder / "output.txt", threads=1)
    log = json.loads((folder / "log.json").read_text())
    return [(entry["step"] * candidate.flops_of_a_step, entry["eval_loss"]) for entry in log if "eval_loss" in entry]


def measure_worth(candidates: list[Candidate], settings: SweepArguments, runs: StoredRuns) -> dict[str, dict]:
    """By size, task and number of rows: what worth.py measures of a start."""
    output = Path(settings.output_dir)
    options = WorthArguments(settings.labels, starts=[], output_dir=str(output / "worth"), **WORTH_SETTINGS)
    benchmark = Benchmark(options, StoredRuns(output / "worth.json"))
    tasks = {task.name: task for task in read_tasks(options)}

    def measure(candidate: Candidate, task: str, rows: int) -> dict:
        def train_and_measure() -> dict:
            # The loss may be stored, but its model's weights be on another machine.
            train(candidate, output, settings.limit)
            return benchmark.run_start(candidate.size, output / candidate.name / "model", tasks[task], rows)

        return runs.result(f"worth of {candidate.name}, {task}, {rows} rows", train_and_measure)

    return {
        candidate.size: {
            task: {rows: measure(candidate, task, rows) for rows in numbers} for task, numbers in LABELLED_ROWS.items()
        }
        for candidate in candidates
    }


def characters_of_a_token(folder: Path) -> float:
    """Characters per token of held-out text, since losses per token are not comparable between vocabularies."""
    tokenizer, documents = load_tokenizer(folder), load_shards(folder)["input_ids"]
    texts = tokenizer.batch_decode(documents[:], skip_special_tokens=True)
    return sum(map(len, texts)) / sum(len(ids) - 2 for ids in documents)


def loss_panels(curves: dict[Candidate, list[tuple[float, float]]], losses: dict[Candidate, float]) -> list[Panel]:
    """Held-out loss against compute, with one panel per round and one curve per size, that of its best run."""
    panels = []
    for compute in sorted({candidate.compute for candidate in curves}):
        lines = []
        for size in SIZES:
            runs = [one for one in curves if (one.size, one.compute, one.masks) == (size, compute, BERT_MASKS)]
            if runs:
                best = min(runs, key=losses.get)
                lines.append(Line(curves[best], f"{size}, {best.vocabulary:,} entries", {"marker": "o"}))
        labels = {"xlabel": "floating-point operations", "ylabel": "held-out masked loss (nats a token)"}
        panels.append(Panel(lines, labels | {"xscale": "log", "title": f"runs of {compute:.1e}"}))
    return panels


def worth_panels(worths: dict[str, dict]) -> list[Panel]:
    """Accuracy after fine-tuning against the number of labelled rows: one panel per task, one curve per size."""
    panels = []
    for task, numbers in LABELLED_ROWS.items():
        lines = []
        for size in SIZES:
            points = [(rows, 100 * statistics.mean(worths[size][task][rows]["fine-tuned"])) for rows in numbers]
            lines.append(Line(points, size, {"marker": "o"}))
        labels = {"xlabel": "labelled rows", "ylabel": f"{task} (% right)", "xscale": "log", "title": "fine-tuned"}
        panels.append(Panel(lines, labels))
    return panels


def worth_table(worths: dict[str, dict]) -> list[str]:
    """Accuracy of each size in percent, and what the size of small.yaml gains over the others, seed by seed."""
    others = [size for size in SIZES if size != SMALL]
    lines = []
    for (task, numbers), kind in itertools.product(LABELLED_ROWS.items(), KINDS):
        for rows in numbers:
            entries = {size: worths[size][task][rows] for size in SIZES}
            cells = [interval([100 * share for share in entries[size][kind]], 1) for size in SIZES]
            cells += [": ".join(gain_cells(gains(entries, kind, SMALL, other))) for other in others]
            lines.append([task, f"{rows:,}", kind, *cells])
    head = ["task", "rows", "", *SIZES, *(f"{SMALL} - {other}: better?" for other in others)]
    return markdown_table(head, lines)


def report(curves: dict[Candidate, list], losses: dict[Candidate, float], worths: dict, runs: StoredRuns) -> str:
    rows = []
    for candidate in sorted(curves, key=lambda one: (one.compute, losses[one])):
        masks = "BERT's" if candidate.masks == BERT_MASKS else "paper's"
        tokens = f"{candidate.steps * STEP_TOKENS / 1e6:.1f}"
        decoder = f"shared, +- {candidate.tied_range:g}" if candidate.tied_range else "its own"
        settings = [f"{candidate.vocabulary:,}", candidate.optimizer, f"{candidate.rate:g}", masks, decoder, tokens]
        found = [f"{curves[candidate][-1][1]:.3f}", f"{losses[candidate]:.4f}"]
        rows.append([f"{candidate.compute:.1e}", candidate.size, *settings, *found])
    head = ["FLOP", "layers x width", "vocabulary", "optimizer", "rate", "masks", "decoder", "million tokens"]
    sections = (
        "# Which small model to pretrain on a CPU",
        "![held-out loss against compute](scaling_small.png)",
        circumstances("scaling_small", precision="one thread a run, bfloat16 autocast", runs=runs.circumstances()),
        "All runs of a round have the same compute, not the same number of steps. Losses per token are comparable "
        "between runs with the same vocabulary; the last column, divided by the characters of a token, is comparable "
        "between all. The two kinds of masks are not equally hard to fill, so their losses cannot be compared. With "
        f"the most compute, {SMALL} is `configs/pretrain/small.yaml` of `pretraining.md`.",
        "\n".join(markdown_table([*head, "nats a token", "nats a character"], rows)),
        "What the models with the most compute are worth when labels are few: parts of speech and Debian sections, "
        "accuracy in percent, measured as in `worth.md`, from which the column of 4 x 192 is. The same learning rates "
        "and heads are tried with every size. Means of 5 seeds with 95% intervals by Student's t; gains are computed "
        "seed by seed.",
        "\n".join(worth_table(worths)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(SweepArguments, args=args)
    disable_progress_bars()
    output, results = Path(settings.output_dir), Path(settings.results)

    # 1. Data, once for each vocabulary
    for vocabulary in VOCABULARIES:
        prepare(Path(settings.text), output / "data", vocabulary)
    characters = {size: characters_of_a_token(output / "data" / str(size) / "validation") for size in VOCABULARIES}

    # 2. Three rounds of training
    results.mkdir(parents=True, exist_ok=True)
    runs, curves = StoredRuns(results / "single_runs" / "scaling_small.json"), {}

    def train_all(candidates: list[Candidate]) -> None:
        def curve(candidate: Candidate) -> list[tuple[float, float]]:
            return runs.result(candidate.name, lambda: train(candidate, output, settings.limit))

        with ThreadPoolExecutor(settings.processes) as executor:
            curves.update(zip(candidates, executor.map(curve, candidates)))

    train_all(first_round(settings.compute))
    train_all(second_round(settings.more_compute))
    train_all(last_round(settings.most_compute))
    curves |= small_model(settings.most_compute, results)
    losses = {one: points[-1][1] / characters[one.vocabulary] for one, points in curves.items()}

    # 3. Fine-tuning of the last round's models on few labels
    worths = measure_worth(last_round(settings.most_compute), settings, runs)
    worths[SMALL] = worth_of_small_model(results)

    # 4. Report
    plot_lines(results / "scaling_small.png", loss_panels(curves, losses) + worth_panels(worths), columns=3)
    write_text(results / "scaling_small.md", report(curves, losses, worths, runs))


if __name__ == "__main__":
    main()

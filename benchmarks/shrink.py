"""Is a smaller model better cut out of a large one, or trained from scratch? Rewrites benchmarks/results/shrink.md and
shrink.png.

    python benchmarks/shrink.py --text ../shared/data/text

For each size, examples/shrink.py makes a model out of the large one, and examples/pretrain.py trains one of the same
size from random weights for as many floating-point operations. Both get the same search: every learning rate with the
first seed, then the other seeds with the best one. The cost of the large model is not counted, since it exists already.
An interrupted command goes on when it is run again, even on another machine: see stored_runs.py. Run nothing else on
the machine while the command starts, since latencies are measured then.
"""

import itertools
import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from circumstances import LOSS_AS_TOLD, circumstances
from pretraining import ROOT, run
from stored_runs import StoredRuns

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.fingerprints import checkpoint_fingerprint
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import Count, LocalPath, Positive, Range, check_ranges, parse_config
from neobert_hf.pretraining.flops import training_flops


DISTILLED, SCRATCH = "distilled", "scratch"
LABELS = {DISTILLED: "cut and distilled", SCRATCH: "from random weights"}
WAYS = (DISTILLED, SCRATCH)
# How many times as many layers the large model has, and how many times as wide an MLP.
SIZES = {
    "1/2 MLP": (1, 2),
    "1/2 layers": (2, 1),
    "1/2 layers, 1/2 MLP": (2, 2),
    "1/2 layers, 1/4 MLP": (2, 4),
    "1/4 layers": (4, 1),
}
# Number of documents, from the first, on which losses are measured: about 130,000 tokens of the shared text.
VALIDATION_DOCUMENTS = 60
# Tokens of a window, on average, and the share of them that is predicted; as in benchmarks/scaling_small.py.
MEAN_LENGTH, PREDICTED = 180, 0.2
MEASURED_TOKENS = 16384
# Latency: texts at a time, tokens of each, and number of repetitions.
TEXTS, LENGTH, REPEATS = 1, 128, 50


@dataclass
class ShrinkBenchmark:
    text: LocalPath = field(metadata={"help": "folder with train.parquet and validation.parquet"})
    model: LocalPath = field(default="benchmarks/models/small", metadata={"help": "folder of the large model"})
    output_dir: LocalPath = field(default="runs/shrink_benchmark", metadata={"help": "folder of data, runs and logs"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    seeds: Annotated[int, Range(2)] = field(default=3, metadata={"help": "runs of each way and size"})
    steps: Count = field(default=2000, metadata={"help": "steps of distillation"})
    global_batch_tokens: Count = field(default=2048, metadata={"help": "tokens of a step, in both ways"})
    training: str = field(
        default="--optimizer muon --warmup_steps 0.02 --micro_batch_tokens 2048 "
        "--mask_replace_prob 0.8 --random_replace_prob 0.1 --bf16 false",
        metadata={"help": "further flags of both ways"},
    )
    learning_rates: list[Positive] = field(
        default_factory=lambda: [1e-3, 4e-3, 8e-3], metadata={"help": "tried by both, with the first seed"}
    )
    processes: Count = field(default=2, metadata={"help": "runs at a time, of one thread each"})

    def __post_init__(self):
        check_ranges(self)


def sizes_of(config: NeoBERTConfig) -> dict[str, NeoBERTConfig]:
    """The architectures by name, the whole one first."""
    return {"large": config} | {name: smaller(config, *shares) for name, shares in SIZES.items()}


def smaller(config: NeoBERTConfig, layers: int, mlp: int) -> NeoBERTConfig:
    """The architecture with the number of layers divided by `layers`, and the width of MLPs divided by `mlp`."""
    sizes = {"num_hidden_layers": config.num_hidden_layers // layers}
    sizes |= {"intermediate_size": config.intermediate_size // mlp}
    return NeoBERTConfig(**config.to_dict() | sizes)


def prepare(settings: ShrinkBenchmark, data: Path, max_length: int) -> None:
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        flags = f"--source {settings.text}/{name}.parquet --tokenizer {settings.model} --max_length {max_length}"
        flags += f" --long_documents split --output_dir {data}/{name} --documents_per_shard 1000 --num_proc 2"
        if name == "validation":
            flags += f" --max_documents {VALIDATION_DOCUMENTS}"
        run("prepare_data.py", flags, data / "log.txt")


def latency(config: NeoBERTConfig, folder: Path) -> float:
    """Milliseconds of a forward pass of the encoder, without its decoder; kept in a file of the folder."""
    file = folder / f"latency_{config.num_hidden_layers}_{config.intermediate_size}.json"
    if not file.exists():
        torch.manual_seed(0)
        model, seconds = NeoBERTModel(config).eval(), []
        ids = torch.randint(5, config.vocab_size, (TEXTS, min(LENGTH, config.max_length)))
        for _ in range(REPEATS + 10):
            start = time.perf_counter()
            with torch.no_grad():
                model(ids)
            seconds.append(time.perf_counter() - start)
        write_json(file, 1000 * statistics.median(seconds[10:]))
    return json.loads(file.read_text())


def scratch_steps(settings: ShrinkBenchmark, large: NeoBERTConfig, small: NeoBERTConfig) -> int:
    """Steps from random weights that cost as much as measuring and distillation."""
    of_large, of_small = (training_flops(config, 1, MEAN_LENGTH, PREDICTED) for config in (large, small))
    # The large model only runs forward: a third of a training step.
    distilling = settings.steps * settings.global_batch_tokens * (of_small + of_large / 3)
    dropped = range(small.num_hidden_layers + 1, large.num_hidden_layers + 1)
    measuring = (sum(dropped) + 2) * MEASURED_TOKENS * of_large / 3
    return round((distilling + measuring) / (settings.global_batch_tokens * of_small))


def run_way(
    settings: ShrinkBenchmark,
    output: Path,
    configs: dict[str, NeoBERTConfig],
    name: str,
    way: str,
    rate: float,
    seed: int,
) -> dict:
    """The held-out loss of one size; for a distilled model also the losses of the large and the cut model."""
    config, folder = configs[name], output / "_".join(re.findall(r"\w+", f"{name} {rate:g} {seed}"))
    folder.mkdir(exist_ok=True)
    common = f"--train_data {output}/data/train --validation_data {output}/data/validation --use_cpu true --seed {seed}"
    common += f" --report_to none --global_batch_tokens {settings.global_batch_tokens} {settings.training}"
    common += f" --learning_rate {rate:g} --num_hidden_layers {config.num_hidden_layers}"
    common += f" --intermediate_size {config.intermediate_size}"
    if way == DISTILLED:
        if not (folder / DISTILLED / "report.json").exists():
            flags = f"--config {ROOT}/configs/adapt/shrink.yaml --model {settings.model} {common}"
            flags += f" --max_steps {settings.steps} --eval_steps {settings.steps} --measured_tokens {MEASURED_TOKENS}"
            run("shrink.py", f"{flags} --output_dir {folder}/{DISTILLED}", folder / "log.txt", threads=1)
        report = json.loads((folder / DISTILLED / "report.json").read_text())
        losses = report["losses"]
        parameters = {f"{model} parameters": count for model, count in report["parameters"].items()}
        return {"loss": losses["distilled"], "large": losses["large"], "cut": losses["cut"]} | parameters
    if not (folder / SCRATCH / "log.json").exists():
        steps = scratch_steps(settings, configs["large"], config)
        flags = f"--config {ROOT}/configs/pretrain/small.yaml {common} --hidden_size {config.hidden_size}"
        flags += f" --num_attention_heads {config.num_attention_heads} --max_length {config.max_length}"
        flags += f" --tie_word_embeddings {config.tie_word_embeddings} --max_steps {steps} --eval_steps {steps}"
        run("pretrain.py", f"{flags} --save_steps 0.1 --output_dir {folder}/{SCRATCH}", folder / "log.txt", threads=1)
    log = json.loads((folder / SCRATCH / "log.json").read_text())
    return {"loss": next(entry["eval_loss"] for entry in reversed(log) if "eval_loss" in entry)}


def run_all(settings: ShrinkBenchmark, runs: StoredRuns, output: Path, configs: dict[str, NeoBERTConfig]) -> dict:
    """By size and way: the best learning rate with the first seed, and the results of every seed with it."""

    def result(name: str, way: str, rate: float, seed: int) -> dict:
        told = [checkpoint_fingerprint(settings.model)[:8], name, way]
        told += [f"{settings.steps} x {settings.global_batch_tokens}", settings.training, f"rate {rate:g}"]
        work = partial(run_way, settings, output, configs, name, way, rate, seed)
        return runs.result("; ".join([*told, f"seed {seed}"]), work)

    def best_rate(name: str, way: str) -> float:
        return min(settings.learning_rates, key=lambda rate: result(name, way, rate, 0)["loss"])

    jobs = list(itertools.product(SIZES, WAYS))
    with ThreadPoolExecutor(settings.processes) as executor:
        rates = dict(zip(jobs, executor.map(lambda job: best_rate(*job), jobs)))
        # All runs of a seed come before those of the next one, so that a command with fewer seeds has all its runs.
        more = [(*job, rates[job], seed) for seed in range(settings.seeds) for job in jobs]
        found = list(executor.map(lambda one: result(*one), more))
    return {
        job: {"rate": rates[job], "runs": [one for one, (*of, _, _) in zip(found, more) if tuple(of) == job]}
        for job in jobs
    }


def report(
    settings: ShrinkBenchmark, runs: StoredRuns, found: dict, milliseconds: dict, configs: dict[str, NeoBERTConfig]
) -> None:
    lines = {way: [] for way in WAYS}
    first = found[next(iter(SIZES)), DISTILLED]["runs"][0]
    large = f"{first['large']:.3f}"
    rows = [["large", f"{first['large parameters']:,}", f"{milliseconds['large']:.2f}", "", large, large, ""]]
    for name in SIZES:
        steps = f"{settings.steps:,} / {scratch_steps(settings, configs['large'], configs[name]):,}"
        one = found[name, DISTILLED]["runs"][0]
        cells = [f"{one['small parameters']:,}", f"{milliseconds[name]:.2f}", steps, f"{one['cut']:.3f}"]
        for way, points in lines.items():
            mean, lower, upper = mean_interval([each["loss"] for each in found[name, way]["runs"]])
            points.append((milliseconds[name], mean))
            cells.append(f"{mean:.3f} ({lower:.3f} to {upper:.3f}), rate {found[name, way]['rate']:g}")
        rows.append([name, *cells])
    text = [
        "# A smaller model: cut out of a large one, or trained from scratch",
        "",
        circumstances("shrink", precision=LOSS_AS_TOLD, runs=runs.circumstances()),
        "",
        f"Masked loss in nats on held-out text, mean of {settings.seeds} seeds with 95% intervals (Student's t); "
        f"median time of the encoder in ms for {TEXTS} x {LENGTH} tokens. The steps are those of distillation, and "
        "those from random weights that cost as many floating-point operations; the training of the large model is not "
        f"counted. Learning rates {', '.join(f'{rate:g}' for rate in settings.learning_rates)} are tried by both, and "
        "chosen by the loss of the first seed.",
        "",
        *markdown_table(["", "Parameters", "ms", "Steps", "Cut only", "Distilled", "From random weights"], rows),
        "",
        "![Held-out loss over the latency, distilled and from random weights](shrink.png)",
    ]
    drawn = [Line(sorted(points), LABELS[way], {"marker": "o"}) for way, points in lines.items()]
    drawn.append(Line([(milliseconds["large"], first["large"])], "large", {"marker": "*", "markersize": 9}))
    labels = {"xlabel": f"ms for {TEXTS} x {LENGTH} tokens", "ylabel": "held-out masked loss (nats)"}
    results = Path(settings.results)
    plot_lines(results / "shrink.png", [Panel(drawn, labels)])
    write_text(results / "shrink.md", "\n".join(text) + "\n")


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(ShrinkBenchmark, args=args)
    output = Path(settings.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    configs = sizes_of(NeoBERTConfig.from_pretrained(settings.model))
    prepare(settings, output / "data", configs["large"].max_length)
    # Before training, which warms the machine up.
    milliseconds = {name: latency(config, output) for name, config in configs.items()}
    runs = StoredRuns(Path(settings.results) / "single_runs" / "shrink.json")
    found = run_all(settings, runs, output, configs)
    report(settings, runs, found, milliseconds, configs)


if __name__ == "__main__":
    main()

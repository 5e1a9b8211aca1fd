"""Is a smaller model better cut out of a large one, or trained from nothing? Rewrites benchmarks/results/shrink.md and
shrink.png.

    python benchmarks/shrink.py --text ../shared/data/text

For each size, examples/shrink.py makes a model out of the large one, and examples/pretrain.py trains one of the same
size from random weights for as many floating-point operations. What the large model cost is not counted: it is there.
Interrupted, the same command goes on, on another machine as well: see stored_runs.py. Leave the machine alone while it
starts: latencies are measured then.
"""

import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from circumstances import AS_TOLD, circumstances
from pretraining import ROOT, run
from stored_runs import StoredRuns

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.fingerprints import checkpoint_fingerprint
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import Count, LocalPath, Range, check_ranges, parse_config
from neobert_hf.pretraining.flops import training_flops


# Of the layers and of the MLP's width, what is kept.
SIZES = {"1/2 MLP": (1, 2), "1/2 layers": (2, 1), "1/2 layers, 1/2 MLP": (2, 2), "1/4 layers": (4, 1)}
# Documents, the first ones, on which losses are measured: some 130,000 tokens of the shared text.
VALIDATION_DOCUMENTS = 60
# Tokens of a window, on average, and the share of them that is predicted; as in benchmarks/scaling_small.py.
MEAN_LENGTH, PREDICTED = 180, 0.2
MEASURED_TOKENS = 16384
# Latency: texts, tokens of each, and how often.
TEXTS, LENGTH, REPEATS = 1, 128, 50


@dataclass
class ShrinkBenchmark:
    text: LocalPath = field(metadata={"help": "folder with train.parquet and validation.parquet"})
    model: LocalPath = field(default="benchmarks/models/small", metadata={"help": "folder of the large model"})
    output_dir: LocalPath = field(default="runs/shrink_benchmark", metadata={"help": "folder of data, runs and logs"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    seeds: Annotated[int, Range(2)] = field(default=3, metadata={"help": "runs of each way and size"})
    steps: Count = field(default=2000, metadata={"help": "of distillation"})
    global_batch_tokens: Count = field(default=2048, metadata={"help": "of a step, in both ways"})
    training: str = field(
        default="--optimizer muon --learning_rate 4e-3 --warmup_steps 0.02 --micro_batch_tokens 2048 "
        "--mask_replace_prob 0.8 --random_replace_prob 0.1 --bf16 false",
        metadata={"help": "further flags of both ways"},
    )
    distilling: str = field(default="", metadata={"help": "further flags of distillation"})
    pretraining: str = field(default="", metadata={"help": "further flags of training from nothing"})

    def __post_init__(self):
        check_ranges(self)


def sizes_of(config: NeoBERTConfig) -> dict[str, NeoBERTConfig]:
    """The architectures by name, the whole one first."""
    found = {"large": config}
    for name, (layers, mlp) in SIZES.items():
        sizes = {"num_hidden_layers": config.num_hidden_layers // layers}
        sizes |= {"intermediate_size": config.intermediate_size // mlp}
        found[name] = NeoBERTConfig(**config.to_dict() | sizes)
    return found


def prepare(settings: ShrinkBenchmark, data: Path, max_length: int) -> None:
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        flags = f"--source {settings.text}/{name}.parquet --tokenizer {settings.model} --max_length {max_length}"
        flags += f" --long_documents split --output_dir {data}/{name} --documents_per_shard 1000 --num_proc 2"
        if name == "validation":
            flags += f" --max_documents {VALIDATION_DOCUMENTS}"
        run("prepare_data.py", flags, data / "log.txt")


def latency(config: NeoBERTConfig, file: Path) -> float:
    """Milliseconds of a forward pass of the encoder, without its decoder; kept in a file."""
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
    """Steps from random weights that cost what measuring and distillation do."""
    of_large, of_small = (training_flops(config, 1, MEAN_LENGTH, PREDICTED) for config in (large, small))
    # The large model only runs forward: a third of a training step.
    distilling = settings.steps * settings.global_batch_tokens * (of_small + of_large / 3)
    dropped = range(small.num_hidden_layers + 1, large.num_hidden_layers + 1)
    measuring = (sum(dropped) + 2) * MEASURED_TOKENS * of_large / 3
    return round((distilling + measuring) / (settings.global_batch_tokens * of_small))


def both_ways(settings: ShrinkBenchmark, output: Path, name: str, configs: dict[str, NeoBERTConfig], seed: int) -> dict:
    """Held-out losses of one size and seed: `large`, `cut`, `distilled` and `scratch`."""
    config, folder = configs[name], output / f"{name.replace('/', '_').replace(', ', '_').replace(' ', '_')}_{seed}"
    folder.mkdir(exist_ok=True)
    common = f"--train_data {output}/data/train --validation_data {output}/data/validation --use_cpu true --seed {seed}"
    common += f" --report_to none --global_batch_tokens {settings.global_batch_tokens} {settings.training}"
    sizes = f"--num_hidden_layers {config.num_hidden_layers} --intermediate_size {config.intermediate_size}"
    if not (folder / "distilled" / "report.json").exists():
        flags = f"--config {ROOT}/configs/adapt/shrink.yaml --model {settings.model} {sizes} {common}"
        flags += f" --max_steps {settings.steps} --measured_tokens {MEASURED_TOKENS} --output_dir {folder}/distilled"
        run("shrink.py", f"{flags} {settings.distilling}", folder / "log.txt")
    if not (folder / "scratch" / "log.json").exists():
        steps = scratch_steps(settings, configs["large"], config)
        flags = f"--config {ROOT}/configs/pretrain/small.yaml {sizes} {common} --hidden_size {config.hidden_size}"
        flags += f" --num_attention_heads {config.num_attention_heads} --max_length {config.max_length}"
        flags += f" --tie_word_embeddings {config.tie_word_embeddings} --max_steps {steps} --eval_steps {steps}"
        flags += f" --save_steps 0.1 --output_dir {folder}/scratch"
        run("pretrain.py", f"{flags} {settings.pretraining}", folder / "log.txt")
    log = json.loads((folder / "scratch" / "log.json").read_text())
    report = json.loads((folder / "distilled" / "report.json").read_text())
    scratch = next(entry["eval_loss"] for entry in reversed(log) if "eval_loss" in entry)
    return report["losses"] | {"scratch": scratch, "parameters": report["parameters"]}


def stored_ways(settings: ShrinkBenchmark, runs: StoredRuns, *job) -> dict:
    _, name, _, seed = job
    told = [checkpoint_fingerprint(settings.model)[:8], name, f"{settings.steps} x {settings.global_batch_tokens}"]
    told += filter(None, [settings.training, settings.distilling, settings.pretraining])
    return runs.result("; ".join([*told, f"seed {seed}"]), lambda: both_ways(settings, *job))


def report(
    settings: ShrinkBenchmark, runs: StoredRuns, losses: dict, milliseconds: dict, configs: dict[str, NeoBERTConfig]
) -> None:
    lines, (first, *_) = {"distilled": [], "scratch": []}, next(iter(losses.values()))
    large = f"{first['large']:.3f}"
    rows = [["large", f"{first['parameters']['large']:,}", f"{milliseconds['large']:.2f}", "", large, large, ""]]
    for name, of_seeds in losses.items():
        steps = f"{settings.steps:,} / {scratch_steps(settings, configs['large'], configs[name]):,}"
        one = of_seeds[0]
        cells = [f"{one['parameters']['small']:,}", f"{milliseconds[name]:.2f}", steps, f"{one['cut']:.3f}"]
        for way, points in lines.items():
            mean, lower, upper = mean_interval([each[way] for each in of_seeds])
            points.append((milliseconds[name], mean))
            cells.append(f"{mean:.3f} ({lower:.3f} to {upper:.3f})")
        rows.append([name, *cells])
    text = [
        "# A smaller model: out of a large one, or from nothing",
        "",
        circumstances("shrink", precision=AS_TOLD, runs=runs.circumstances()),
        "",
        f"Masked loss in nats on held-out text, mean of {settings.seeds} seeds with 95% intervals (Student's t); "
        f"median ms of the encoder for {TEXTS} x {LENGTH} tokens. Steps are those of distillation, and those from "
        "random weights that cost as many floating-point operations; the training of the large model is not counted.",
        "",
        *markdown_table(["", "Parameters", "ms", "Steps", "Cut only", "Distilled", "From random weights"], rows),
        "",
        "![Held-out loss over the latency, distilled and from random weights](shrink.png)",
    ]
    drawn = [Line(sorted(points), way, {"marker": "o"}) for way, points in lines.items()]
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
    milliseconds = {
        name: latency(config, output / f"latency_{number}.json")
        for number, (name, config) in enumerate(configs.items())
    }
    runs = StoredRuns(Path(settings.results) / "single_runs" / "shrink.json")
    losses = {name: [] for name in SIZES}
    # All sizes with one seed before the next one, so that a run with fewer seeds has them all.
    for seed, name in itertools.product(range(settings.seeds), SIZES):
        losses[name].append(stored_ways(settings, runs, output, name, configs, seed))
    report(settings, runs, losses, milliseconds, configs)


if __name__ == "__main__":
    main()

"""What a small NeoBERT learns on a CPU: both stages, and ablation pairs. Rewrites benchmarks/results/pretraining.md.

    python benchmarks/pretraining.py --text ../shared/data/text

Every run is `examples/pretrain.py` with a shipped configuration and a few flags. After an interruption the same command
resumes.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from transformers import AutoTokenizer, set_seed

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.common.settings import parse_config


ROOT = Path(__file__).parent.parent
# Waiting threads must not spin; see examples/demo.py.
ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}

BFLOAT16 = "--bf16 true --use_cpu true"

# A model of 3 million parameters, trained on 1.2 million tokens and validated only at the end.
ABLATION = (
    "--hidden_size 128 --num_hidden_layers 4 --num_attention_heads 2 --intermediate_size 512 --decoder_init_range 0.1 "
    "--micro_batch_tokens 2048 --global_batch_tokens 2048 --max_steps 600 --eval_strategy no --save_steps 600 "
    "--mask_replace_prob 1.0 --random_replace_prob 0.0 --optimizer adamw --learning_rate 2e-3 --warmup_steps 0.05 "
    "--embedding_init_range 1.0 --tie_word_embeddings false"
)
SHORT = "--train_data {data}/train_short --validation_data {data}/validation_short"
ABLATIONS = {
    "RoPE, SwiGLU, RMSNorm (M1)": "",
    "learned absolute positions": "--rope false",
    "GELU": "--hidden_act gelu",
    "LayerNorm": "--rms_norm false",
    "all three (M0's architecture)": "--rope false --hidden_act gelu --rms_norm false",
    "documents of 64 tokens, packed": SHORT + " --max_length 64",
    "documents of 64 tokens, packed naively (M6)": SHORT + " --layout naive",
}
PAIRS = [(name, 0) for name in range(5)] + [(5, 5), (6, 5)]


@dataclass
class BenchmarkArguments:
    text: str = field(metadata={"help": "folder with train.parquet and validation.parquet"})
    output_dir: str = field(default="runs/pretraining_benchmark", metadata={"help": "data, runs and logs"})
    results: str = field(default="benchmarks/results", metadata={"help": "where the report goes"})
    seeds: int = field(default=3, metadata={"help": "runs of each ablation"})
    bf16: bool = field(default=False, metadata={"help": "both stages in bfloat16 autocast, for a CPU with AVX512-BF16"})
    limit: str = field(default="", metadata={"help": "further flags of every run, for a trial"})


def run(script: str, flags: str, log: Path, threads: int = 2) -> None:
    command = [sys.executable, str(ROOT / "examples" / script), *flags.split()]
    with open(log, "a", encoding="utf-8") as output:
        environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        sys.exit(f"{' '.join(command)} ended with {code}; see {log}")


def prepare(text: Path, data: Path) -> None:
    """Make a vocabulary of 8,192 entries, and windows of 64, 256 and 1,024 tokens."""
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "tokenizer").exists():
        flags = f"--source {text}/train.parquet --vocab_size 8192 --output_dir {data}/tokenizer"
        run("train_tokenizer.py", flags, data / "log.txt")
    for name, flags in (
        ("train", f"--source {text}/train.parquet --max_length 256 --long_documents split"),
        ("train_long", f"--source {text}/train.parquet --max_length 1024 --long_documents split"),
        ("train_short", f"--source {text}/train.parquet --max_length 64 --long_documents split"),
        ("validation", f"--source {text}/validation.parquet --max_length 1024"),
        (
            "validation_short",
            f"--source {text}/validation.parquet --max_length 64 --long_documents split --max_documents 60",
        ),
    ):
        flags += f" --tokenizer {data}/tokenizer --output_dir {data}/{name} --documents_per_shard 1000"
        run("prepare_data.py", flags, data / "log.txt")


def train(output: Path, config: str, name: str, flags: str, threads: int) -> list[dict]:
    """Train, unless this has been done, and return the log."""
    folder = output / name
    if not (folder / "log.json").exists():
        flags = f"--config {ROOT}/configs/pretrain/{config} --output_dir {folder} --report_to none {flags}"
        folder.mkdir(parents=True, exist_ok=True)
        run("pretrain.py", flags, folder / "output.txt", threads)
    return json.loads((folder / "log.json").read_text())


def save_random(pretrained: Path, folder: Path, seed: int = 0) -> None:
    """Save the architecture of a model with random weights, and its tokenizer, for the fine-tuning benchmarks."""
    set_seed(seed)
    NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(pretrained)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(folder)


def run_ablations(output: Path, seeds: int, limit: str) -> dict[str, list[float]]:
    """Held-out loss of each ablation and seed. Two runs are trained at a time, with one thread each."""
    data = output / "data"
    common = f"--train_data {data}/train --validation_data {data}/validation {ABLATION}"

    def final_loss(job: tuple[int, str, int]) -> float:
        index, change, seed = job
        flags = f"{common} {change.format(data=data)} --seed {seed} {limit}"
        log = train(output, "small.yaml", f"ablation_{index}_{seed}", flags, threads=1)
        return next(entry["eval_loss"] for entry in reversed(log) if "eval_loss" in entry)

    jobs = [(index, change, seed) for seed in range(seeds) for index, change in enumerate(ABLATIONS.values())]
    with ThreadPoolExecutor(2) as executor:
        losses = list(executor.map(final_loss, jobs))
    return {name: losses[index :: len(ABLATIONS)] for index, name in enumerate(ABLATIONS)}


def ablation_table(losses: dict[str, list[float]]) -> list[str]:
    rows, names = [], list(losses)
    for index, (own, other) in enumerate(PAIRS):
        values, base = losses[names[own]], losses[names[other]]
        differences = ", ".join(f"{value - reference:+.3f}" for value, reference in zip(values, base))
        runs = ", ".join(f"{value:.3f}" for value in values)
        against = "-" if own == other else differences
        rows.append([names[index], runs, f"{statistics.mean(values):.3f}", against])
    return markdown_table(["", "held-out loss, one run a seed", "mean", "against its pair, seed by seed"], rows)


def length_table(columns: dict[str, dict]) -> list[str]:
    keys = list(dict.fromkeys(key for entry in columns.values() for key in entry if key.startswith("eval_loss_")))
    keys.sort(key=lambda key: int(key.split("_")[2]))
    rows = []
    for key in [*keys, "eval_loss"]:
        name = key.removeprefix("eval_loss_").replace("_", " ") if key != "eval_loss" else "all"
        rows.append([name, *(f"{entry[key]:.3f}" if key in entry else "" for entry in columns.values())])
    return markdown_table(["length after cutting (tokens)", *columns], rows)


def plot(stages: dict[str, list[dict]], file: Path) -> None:
    panels = []
    for name, log in stages.items():
        lines = []
        for key, label, style in (("loss", "training", {}), ("eval_loss", "held out", {"marker": "o"})):
            lines.append(Line([(entry["step"], entry[key]) for entry in log if key in entry], label, style))
        panels.append(Panel(lines, {"xlabel": "step", "ylabel": "masked loss (nats)", "title": name}))
    plot_lines(file, panels)


def report(stages: dict[str, list[dict]], losses: dict[str, list[float]], bf16: bool) -> str:
    first, second = stages.values()
    evaluations = [[entry for entry in log if "eval_loss" in entry] for log in (first, second)]
    throughput = [statistics.median(e["tokens_per_second"] for e in log if "loss" in e) for log in (first, second)]
    seen = [max(entry.get("tokens_seen", 0) for entry in log) for log in (first, second)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "datasets"))
    sections = (
        "# A small NeoBERT on a CPU",
        "![losses](pretraining.png)",
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), float32"
        f"{', both stages in bfloat16 autocast' if bf16 else ''}; Python {platform.python_version()}, {versions}. Not "
        "measured on GPU.\n\nCommand: `python benchmarks/pretraining.py --text ../shared/data/text"
        f"{' --bf16 true' if bf16 else ''}`. "
        "Text: 88 million characters of English documentation, speeches, books; 8,192 WordPiece entries.",
        "## Two stages (`configs/pretrain/small.yaml`, `small_long.yaml`)",
        f"Stage 1: {seen[0]:,} tokens, up to 256 per document, at a median of {throughput[0]:,.0f} tokens/s. Stage 2: "
        f"{seen[1]:,} tokens, up to 1,024 per document, from the 20/40/40 mixture of all documents, those of 256 "
        f"tokens or more and those of 512 or more, at {throughput[1]:,.0f} tokens/s. Masked loss in nats on 217 "
        "held-out documents, with the same masks each time:",
        "\n".join(
            length_table(
                {
                    "stage 1 at 256": evaluations[0][-1],
                    "stage 1 at 1,024": evaluations[1][0],
                    "stage 2 at 1,024": evaluations[1][-1],
                }
            )
        ),
        "## Ablation pairs",
        "3 million parameters, 600 steps of 2,048 tokens; the runs of a seed share data order, masks and test text. "
        "Each line is compared with the first line, but the last one with the line before it; positive differences are "
        "worse.",
        "\n".join(ablation_table(losses)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(BenchmarkArguments, args=args)
    output = Path(settings.output_dir)
    data = output / "data"
    prepare(Path(settings.text), data)
    precision = BFLOAT16 if settings.bf16 else ""
    common = f"--validation_data {data}/validation {precision} {settings.limit}"
    stages = {
        "stage 1: 256 tokens": train(output, "small.yaml", "stage_1", f"--train_data {data}/train {common}", 2),
        "stage 2: 1,024 tokens": train(
            output,
            "small_long.yaml",
            "stage_2",
            f"--train_data {data}/train_long --init_from {output}/stage_1 {common}",
            2,
        ),
    }
    losses = run_ablations(output, settings.seeds, settings.limit)
    results = Path(settings.results)
    plot(stages, results / "pretraining.png")
    write_json(results / "pretraining.json", {"stages": stages, "ablations": losses})
    write_text(results / "pretraining.md", report(stages, losses, settings.bf16))


if __name__ == "__main__":
    main()

"""What adapting to a domain brings and costs: kernel documentation, which pretraining did not see. Rewrites
benchmarks/results/domain.md and domain.png.

    python benchmarks/domain.py --text ../shared/data/text/train.parquet

A model is pretrained on all other text, and examples/adapt_domain.py adapts it, with five seeds for each way. Documents
are held out by their text, so those that adapting holds out of the general text were held out of pretraining, too.
Interrupted, the same command goes on.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from pretraining import ROOT, run

from neobert_hf.common.atomic_writes import atomic_write, write_text
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import Count, LocalPath, check_ranges, parse_config


WAYS = {
    "25% replay": "",
    "5% replay": "--replay_share 0.05",
    "no replay": "--replay_share 0",
    "25% replay, 500 new words": "--new_words 500",
}
HELD_OUT = "--held_out_share 0.05 --num_proc 2"


@dataclass
class DomainBenchmark:
    text: LocalPath = field(metadata={"help": "Parquet file with the columns `text` and `source`"})
    domain: str = field(default="linux-kernel-docs", metadata={"help": "the value of `source` that is the domain"})
    output_dir: LocalPath = field(default="runs/domain_benchmark", metadata={"help": "folder of data, runs and logs"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    seeds: Count = field(default=5, metadata={"help": "runs of each way"})
    pretraining: str = field(default="--max_steps 6000", metadata={"help": "further flags of pretraining"})
    adapting: str = field(
        default="--learning_rate 1e-3 --epochs 1 --global_batch_tokens 8192 --micro_batch_tokens 2048 "
        "--mask_replace_prob 0.8 --random_replace_prob 0.1",
        metadata={"help": "further flags of every adaptation"},
    )

    def __post_init__(self):
        check_ranges(self)


def divide(settings: DomainBenchmark, data: Path) -> None:
    """Write the domain and all other text as two files."""
    data.mkdir(parents=True, exist_ok=True)
    rows = load_dataset("parquet", data_files=settings.text, split="train")
    chosen = [source == settings.domain for source in rows["source"]]
    for name, wanted in (("domain", True), ("general", False)):
        part = rows.select([number for number, of_domain in enumerate(chosen) if of_domain is wanted])
        with atomic_write(data / f"{name}.parquet") as partial:
            part.to_parquet(partial)


def pretrain(settings: DomainBenchmark, output: Path) -> Path:
    """A model of configs/pretrain/small.yaml that has seen general text only; its folder."""
    data, log, model = output / "data", output / "log.txt", output / "pretraining" / "model"
    if model.exists():
        return model
    if not (data / "general.parquet").exists():
        divide(settings, data)
    general = f"--source {data}/general.parquet"
    if not (data / "tokenizer").exists():
        run("train_tokenizer.py", f"{general} --vocab_size 8192 --output_dir {data}/tokenizer", log)
    flags = f"{general} --tokenizer {data}/tokenizer --max_length 256 --long_documents split {HELD_OUT}"
    for part in ("train", "held_out"):
        run("prepare_data.py", f"{flags} --part {part} --output_dir {data}/{part}", log)
    folders = f"--train_data {data}/train --validation_data {data}/held_out --output_dir {output}/pretraining"
    flags = f"--config {ROOT}/configs/pretrain/small.yaml --use_cpu true --report_to none {settings.pretraining}"
    run("pretrain.py", f"{flags} {folders}", log)
    return model


def adapt(settings: DomainBenchmark, output: Path, model: Path, way: str, seed: int) -> dict:
    """The report of one adaptation."""
    folder = output / f"{'_'.join(way.replace(',', '').replace('%', '').split())}_{seed}"
    if not (folder / "report.json").exists():
        texts = f"--domain {output}/data/domain.parquet --general {output}/data/general.parquet {HELD_OUT}"
        flags = f"--config {ROOT}/configs/adapt/domain.yaml --model {model} {texts} --use_cpu true --bf16 false"
        flags += f" --report_to none {settings.adapting} {WAYS[way]} --seed {seed} --output_dir {folder}"
        run("adapt_domain.py", flags, output / "log.txt")
    return json.loads((folder / "report.json").read_text()) | {"log": json.loads((folder / "log.json").read_text())}


def report(settings: DomainBenchmark, reports: dict[str, list[dict]]) -> None:
    """The table of losses before and after, and the picture of both over the steps of the first seed."""
    rows = []
    for way, runs in reports.items():
        cells = [way]
        for name in ("loss", "replay_loss"):
            mean, lower, upper = mean_interval([run["after"][name] - run["before"][name] for run in runs])
            after = mean_interval([run["after"][name] for run in runs])[0]
            cells += [f"{runs[0]['before'][name]:.3f}", f"{after:.3f}", f"{mean:+.3f} ({lower:+.3f} to {upper:+.3f})"]
        rows.append([*cells, ", ".join(str(run["best_step"]) for run in runs)])
    head = ["", "domain before", "after", "change", "general before", "after", "change", "best steps"]
    text = [
        "# Adapting to a domain",
        "",
        f"Masked loss in nats on held-out documents, mean of {settings.seeds} seeds; changes with 95% intervals "
        f"(Student's t). The domain is {settings.domain}. With new words the tokens are others: compare along the row.",
        "",
        "`python benchmarks/domain.py --text ../shared/data/text/train.parquet`",
        "",
        *markdown_table(head, rows),
        "",
        "![Held-out losses over the steps of adapting](domain.png)",
    ]
    panels = []
    for name, title in (("eval_loss", "domain"), ("eval_replay_loss", "general text")):
        lines = [
            Line([(entry["step"], entry[name]) for entry in runs[0]["log"] if name in entry], way, {"marker": "o"})
            for way, runs in reports.items()
        ]
        panels.append(Panel(lines, {"xlabel": "step", "ylabel": "masked loss (nats)", "title": title}))
    results = Path(settings.results)
    plot_lines(results / "domain.png", panels)
    write_text(results / "domain.md", "\n".join(text) + "\n")


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(DomainBenchmark, args=args)
    output = Path(settings.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    model = pretrain(settings, output)
    reports = {way: [adapt(settings, output, model, way, seed) for seed in range(settings.seeds)] for way in WAYS}
    report(settings, reports)


if __name__ == "__main__":
    main()

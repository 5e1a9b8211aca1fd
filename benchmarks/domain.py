"""What adapting to a domain gains and costs: kernel documentation, which pretraining did not see. Rewrites
benchmarks/results/domain.md and domain.png.

    python benchmarks/domain.py --text ../shared/data/text/train.parquet

A model is pretrained on all other text, and examples/adapt_domain.py adapts it, with five seeds for each way. Documents
are held out by their text, so those that adapting holds out of the general text were held out of pretraining, too. The
model and the adapted ones are then fine-tuned for two tasks of the domain, which are tested on documents that none of
them has read. An interrupted command goes on when it is run again, even on another machine: see stored_runs.py.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from circumstances import LOSS_AS_TOLD, circumstances
from datasets import load_dataset
from domain_tasks import LABELLED, is_test_document, prepare_tasks, retrieval_score, tags_score, test_pairs
from embedding_scores import Retrieval, ndcg_at_10
from pretraining import ROOT, run
from stored_runs import StoredRuns

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
# The models that are fine-tuned for the tasks of the domain, and these tasks.
BEFORE, ADAPTED = "not adapted", "25% replay"
RETRIEVAL, TAGS = "text found by its heading or a sentence, nDCG@10", "words marked as code, F1"


@dataclass
class DomainBenchmark:
    text: LocalPath = field(metadata={"help": "Parquet file with the columns `text` and `source`"})
    domain: str = field(default="linux-kernel-docs", metadata={"help": "the value of `source` that is the domain"})
    output_dir: LocalPath = field(default="runs/domain_benchmark", metadata={"help": "folder of data, runs and logs"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    ways: list[str] = field(default_factory=lambda: list(WAYS), metadata={"help": f"some of {', '.join(WAYS)}"})
    seeds: Count = field(default=5, metadata={"help": "runs of each way"})
    pretraining: str = field(default="--max_steps 6000", metadata={"help": "further flags of pretraining"})
    adapting: str = field(
        default="--learning_rate 1e-3 --epochs 1 --global_batch_tokens 8192 --micro_batch_tokens 2048 "
        "--mask_replace_prob 0.8 --random_replace_prob 0.1",
        metadata={"help": "further flags of every adaptation"},
    )
    retrieval: str = field(
        default="--max_steps 200 --learning_rate 1e-3 --use_cpu true",
        metadata={"help": "further flags of fine-tuning for retrieval"},
    )
    tags: str = field(
        default="--learning_rate 1e-3 --per_device_train_batch_size 16 --num_train_epochs 15 --eval_steps 57",
        metadata={"help": "further flags of fine-tuning for tags"},
    )
    processes: Count = field(default=2, metadata={"help": "runs at a time, of one thread each"})

    def __post_init__(self):
        check_ranges(self)
        if ADAPTED not in self.ways or not set(self.ways) <= set(WAYS):
            raise ValueError(f"`ways` is {self.ways}; it must name {ADAPTED!r}, and may name others of {list(WAYS)}.")


def divide(settings: DomainBenchmark, data: Path) -> None:
    """Write all documents of the domain, those of them that models may be adapted to, and all other text."""
    data.mkdir(parents=True, exist_ok=True)
    rows = load_dataset("parquet", data_files=settings.text, split="train")
    parts = {"whole_domain": [], "domain": [], "general": []}
    for number, row in enumerate(rows):
        if row["source"] != settings.domain:
            parts["general"].append(number)
            continue
        parts["whole_domain"].append(number)
        if not is_test_document(row["text"]):
            parts["domain"].append(number)
    for name, numbers in parts.items():
        with atomic_write(data / f"{name}.parquet") as partial:
            rows.select(numbers).to_parquet(partial)


def pretrain(settings: DomainBenchmark, output: Path) -> Path:
    """The folder of a model of configs/pretrain/small.yaml that has seen general text only."""
    data, log, model = output / "data", output / "log.txt", output / "pretraining" / "model"
    if model.exists():
        return model
    general = f"--source {data}/general.parquet"
    if not (data / "tokenizer").exists():
        run("train_tokenizer.py", f"{general} --vocab_size 8192 --output_dir {data}/tokenizer", log)
    flags = f"{general} --tokenizer {data}/tokenizer --max_length 256 --long_documents split {HELD_OUT}"
    for part in ("train", "held_out"):
        run("prepare_data.py", f"{flags} --part {part} --output_dir {data}/{part}", log)
    folders = f"--train_data {data}/train --validation_data {data}/held_out --output_dir {output}/pretraining"
    flags = f"--config {ROOT}/configs/pretrain/small.yaml --use_cpu true --report_to none {settings.pretraining}"
    run("pretrain.py", f"{flags} {folders}", log, threads=1)
    return model


def folder_of(output: Path, way: str, seed: int) -> Path:
    return output / f"{'_'.join(way.replace(',', '').replace('%', '').split())}_{seed}"


def adapt(settings: DomainBenchmark, output: Path, model: Path, way: str, seed: int) -> dict:
    """The report of one adaptation."""
    folder = folder_of(output, way, seed)
    if not (folder / "report.json").exists():
        texts = f"--domain {output}/data/domain.parquet --general {output}/data/general.parquet {HELD_OUT}"
        flags = f"--config {ROOT}/configs/adapt/domain.yaml --model {model} {texts} --use_cpu true --bf16 false"
        flags += f" --report_to none {settings.adapting} {WAYS[way]} --seed {seed} --output_dir {folder}"
        run("adapt_domain.py", flags, output / "log.txt", threads=1)
    log = json.loads((folder / "log.json").read_text())
    evaluations = [entry for entry in log if "eval_loss" in entry]
    return json.loads((folder / "report.json").read_text()) | {"evaluations": evaluations}


def score_tasks(settings: DomainBenchmark, output: Path, model: Path, way: str, seed: int) -> dict[str, float]:
    """Scores, in percent, of the model or an adapted one in the tasks of the domain after fine-tuning."""
    folder, tasks = folder_of(output, way, seed), output / "tasks"
    start = model
    if way != BEFORE:
        # Not again if it was adapted on this machine. Another machine may have stored the report only.
        adapt(settings, output, model, way, seed)
        start = folder / "model"
    retrieval = retrieval_score(start, tasks, folder / "retrieval", seed, settings.retrieval)
    return {
        RETRIEVAL: 100 * retrieval,
        TAGS: 100 * tags_score(start, tasks, folder / "tags", seed, settings.tags),
    }


def task_rows(scores: dict[str, list[dict[str, float]]], pairs: Retrieval) -> list[list[str]]:
    """For each task: before and after, and the gain seed by seed."""
    rows = []
    alone = {RETRIEVAL: f"{100 * ndcg_at_10(pairs.bm25_scores):.1f}", TAGS: "-"}
    for task in (RETRIEVAL, TAGS):
        before, after = ([run[task] for run in scores[way]] for way in (BEFORE, ADAPTED))
        mean, lower, upper = mean_interval([one - other for one, other in zip(after, before)])
        cells = [f"{mean_interval(values)[0]:.1f}" for values in (before, after)]
        rows.append([task, alone[task], *cells, f"{mean:+.1f} ({lower:+.1f} to {upper:+.1f})"])
    return rows


def loss_rows(reports: dict[str, list[dict]]) -> list[list[str]]:
    """For each way: losses before and after, on the domain and on general text."""
    rows = []
    for way, runs in reports.items():
        cells = [way]
        for name in ("loss", "replay_loss"):
            mean, lower, upper = mean_interval([run["after"][name] - run["before"][name] for run in runs])
            after = mean_interval([run["after"][name] for run in runs])[0]
            cells += [f"{runs[0]['before'][name]:.3f}", f"{after:.3f}", f"{mean:+.3f} ({lower:+.3f} to {upper:+.3f})"]
        rows.append([*cells, ", ".join(str(run["best_step"]) for run in runs)])
    return rows


def report(settings: DomainBenchmark, runs: StoredRuns, reports: dict, scores: dict[str, list[dict]]) -> None:
    """Write the losses before and after, their plot over the steps of the first seed, and the scores of the tasks."""
    head = ["", "domain before", "after", "change", "general before", "after", "change", "best steps"]
    tasks = Path(settings.output_dir) / "tasks"
    pairs = test_pairs(tasks)
    text = [
        "# Adapting to a domain",
        "",
        "![Held-out losses over the steps of adapting](domain.png)",
        "",
        circumstances("domain", precision=LOSS_AS_TOLD, runs=runs.circumstances()),
        "",
        f"Masked loss in nats on held-out documents, mean of {settings.seeds} seeds; changes with 95% intervals "
        f"(Student's t). The domain is {settings.domain}."
        + (" New words change the tokens: compare losses within a row only." if len(settings.ways) > 1 else ""),
        "",
        *markdown_table(head, loss_rows(reports)),
        "",
        "## What it is worth",
        "",
        f"The model as it is, and adapted with {ADAPTED}, are fine-tuned in the same way: for retrieval on pairs that "
        f"`make_pairs.py` makes from the domain's documents, for tags on {LABELLED} sentences. Both tasks are tested "
        f"on documents that no model has read: {len(pairs.queries):,} queries among {len(pairs.documents):,} texts, "
        "and all sentences in which something is marked as code. Scores are in percent, and means of the seeds.",
        "",
        *markdown_table(["", "BM25", "before", "adapted", "gain, 95% interval"], task_rows(scores, pairs)),
    ]
    panels = []
    for name, title in (("eval_loss", "domain"), ("eval_replay_loss", "general text")):
        lines = [
            Line([(entry["step"], entry[name]) for entry in of_seeds[0]["evaluations"]], way, {"marker": "o"})
            for way, of_seeds in reports.items()
        ]
        panels.append(Panel(lines, {"xlabel": "step", "ylabel": "masked loss (nats)", "title": title}))
    results = Path(settings.results)
    plot_lines(results / "domain.png", panels)
    write_text(results / "domain.md", "\n".join(text) + "\n")


def stored_results(settings: DomainBenchmark, runs: StoredRuns, output: Path) -> tuple[dict, dict]:
    """The reports of the adaptations, and the scores in the tasks: by way, one for each seed."""
    told = [settings.domain, settings.pretraining]
    of_tasks = [*told, settings.retrieval, settings.tags]
    jobs = [(adapt, way, seed, [*told, settings.adapting]) for way in settings.ways for seed in range(settings.seeds)]
    for way in (BEFORE, ADAPTED):
        names = of_tasks if way == BEFORE else [*of_tasks, settings.adapting]
        jobs += [(score_tasks, way, seed, names) for seed in range(settings.seeds)]

    def name_of(work: Callable[..., dict], way: str, seed: int, told: list[str]) -> str:
        return "; ".join([work.__name__, *told, way, f"seed {seed}"])

    if not {name_of(*job) for job in jobs} <= set(runs.runs):
        model = pretrain(settings, output)

    def result(job: tuple) -> dict:
        work, way, seed, _ = job
        return runs.result(name_of(*job), lambda: work(settings, output, model, way, seed))

    found = {adapt: {}, score_tasks: {}}
    with ThreadPoolExecutor(settings.processes) as executor:
        # Tasks need the adapted models, so they come after all adaptations.
        for work in found:
            of_work = [job for job in jobs if job[0] is work]
            for (_, way, *_), one in zip(of_work, executor.map(result, of_work)):
                found[work].setdefault(way, []).append(one)
    return found[adapt], found[score_tasks]


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(DomainBenchmark, args=args)
    output, runs = Path(settings.output_dir), StoredRuns(Path(settings.results) / "single_runs" / "domain.json")
    output.mkdir(parents=True, exist_ok=True)
    if not (output / "data" / "general.parquet").exists():
        divide(settings, output / "data")
    prepare_tasks(output / "data" / "whole_domain.parquet", output / "tasks")
    report(settings, runs, *stored_results(settings, runs, output))


if __name__ == "__main__":
    main()

"""Longer texts: what training adds to YaRN. Rewrites benchmarks/results/length.md and length.png.

    python benchmarks/length.py --text ../shared/data/text/train.parquet

examples/extend_length.py trains the small model, which knows 256 tokens, with each new length and way of positions.
Before, and with each seed after it, it measures pseudo-perplexity and how many facts are found, at every length.
Interrupted, the same command goes on, on another machine as well: see stored_runs.py.
"""

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from circumstances import AS_TOLD, circumstances
from pretraining import ROOT, run
from stored_runs import StoredRuns

from neobert_hf.common.atomic_writes import write_text
from neobert_hf.common.fingerprints import checkpoint_fingerprint
from neobert_hf.common.report import Line, Panel, markdown_table, mean_interval, plot_lines
from neobert_hf.common.settings import Count, LocalPath, Range, check_ranges, parse_config


BEFORE, AFTER = "before", "after"
# Names in the report, and the flags of extend_length.py.
WAYS = {"YaRN": "--rope yarn", "positions as they are": "--rope native"}
MEASURES = {"found": "facts found, %", "pseudo_perplexity": "pseudo-perplexity"}


@dataclass
class LengthBenchmark:
    text: LocalPath = field(metadata={"help": "Parquet file with the column `text`"})
    model: LocalPath = field(default="benchmarks/models/small", metadata={"help": "folder of the model"})
    output_dir: LocalPath = field(default="runs/length_benchmark", metadata={"help": "folder of runs and logs"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    lengths: list[Count] = field(
        default_factory=lambda: [1024, 2048], metadata={"help": "lengths to train with, in tokens"}
    )
    seeds: Annotated[int, Range(2)] = field(default=5, metadata={"help": "trainings of each length and method"})
    native: bool = field(default=True, metadata={"help": "also train with unscaled positions"})
    processes: Count = field(default=2, metadata={"help": "parallel runs, each with one thread"})
    training: str = field(
        default="--learning_rate 3e-4 --global_batch_tokens 8192 --micro_batch_tokens 8192 --max_steps 80 "
        "--eval_steps 40 --held_out_documents 40 --measured_documents 12 --sample 8 --facts 64 --num_proc 1 "
        "--mask_replace_prob 0.8 --random_replace_prob 0.1 --bf16 true",
        metadata={"help": "further flags of every training"},
    )

    def __post_init__(self):
        check_ranges(self)


def extend(
    settings: LengthBenchmark, runs: StoredRuns, length: int, way: str, seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """By state of the model and length: `found` in percent, and `pseudo_perplexity`."""
    told = [
        checkpoint_fingerprint(settings.model)[:8],
        f"{length} tokens",
        WAYS[way],
        settings.training,
        f"seed {seed}",
    ]
    measured = runs.result("; ".join(told), lambda: train(settings, length, way, seed))
    for points in measured.values():
        for point in points.values():
            point["found"] *= 100
    return measured


def train(settings: LengthBenchmark, length: int, way: str, seed: int) -> dict:
    """What extend_length.py measures."""
    first, folder = (Path(settings.output_dir) / f"{length}_{way.split()[0].lower()}_{number}" for number in (0, seed))
    if not (folder / "report.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if seed and (first / "report.json").exists():
            # All seeds share the tokens and the measurements before training, which take 3 minutes of a core.
            for part in ("data", "lengths/before"):
                shutil.copytree(first / part, folder / part, dirs_exist_ok=True)
        flags = f"--config {ROOT}/configs/adapt/length.yaml --model {settings.model} --text {settings.text}"
        flags += f" --max_length {length} {WAYS[way]} --seed {seed} --use_cpu true --report_to none"
        flags += f" --output_dir {folder} {settings.training}"
        run("extend_length.py", flags, folder / "log.txt", threads=1)
    return json.loads((folder / "report.json").read_text())["measured"]


def states(runs: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """What is measured at one new length, by the name of the state: once before training, for each seed after it."""
    untrained = runs["YaRN"][0]
    found = {"not trained, positions as they are": [untrained[BEFORE]]}
    found["not trained, YaRN"] = [points for name, points in untrained.items() if name not in (BEFORE, AFTER)]
    return found | {f"trained, {way}": [one[AFTER] for one in of_seeds] for way, of_seeds in runs.items()}


def tables(length: int, measured: dict[str, list[dict]]) -> list[str]:
    """One table for each measure: a row for each state, a column for each length; intervals where there are seeds."""
    lengths, lines = list(measured["trained, YaRN"][0]), [f"## With {length:,} tokens", ""]
    for key, title in MEASURES.items():
        rows = []
        for state, runs in measured.items():
            cells = []
            for at in lengths:
                mean, lower, _ = mean_interval([one[at][key] for one in runs])
                cells.append(f"{mean:.1f} ± {mean - lower:.1f}" if len(runs) > 1 else f"{mean:.1f}")
            rows.append([state, *cells])
        rows.append(["trained, above YaRN alone", *(gain(measured, at, key) for at in lengths)])
        lines += [f"{title[0].upper()}{title[1:]}, by number of tokens:", ""]
        lines += [*markdown_table(["", *(f"{int(at):,}" for at in lengths)], rows), ""]
    return lines


def gain(measured: dict[str, list[dict]], at: str, key: str) -> str:
    """What training adds to YaRN at one length, with the interval of the seeds of training."""
    (alone,) = measured["not trained, YaRN"]
    mean, lower, _ = mean_interval([one[at][key] - alone[at][key] for one in measured["trained, YaRN"]])
    return f"{mean:+.1f} ± {mean - lower:.1f}" if len(measured["trained, YaRN"]) > 1 else f"{mean:+.1f}"


def plot(measured: dict[int, dict[str, list[dict]]], file: Path) -> None:
    """Facts found and pseudo-perplexity against length: one panel for each new length and measure."""
    panels = []
    for (length, by_state), (key, title) in itertools.product(measured.items(), MEASURES.items()):
        at = list(by_state["trained, YaRN"][0])
        lines = [
            Line(
                [(int(each), mean_interval([one[each][key] for one in runs])[0]) for each in at],
                state,
                {"marker": "o", "linestyle": "-" if state.startswith("trained") else "--"},
            )
            for state, runs in by_state.items()
        ]
        labels = {"xlabel": "number of tokens", "ylabel": title, "title": f"for {length:,} tokens"}
        panels.append(Panel(lines, labels, list(map(int, at))))
    plot_lines(file, panels)


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(LengthBenchmark, args=args)
    runs = StoredRuns(Path(settings.results) / "single_runs" / "length.json")
    ways = list(WAYS) if settings.native else ["YaRN"]
    jobs = list(itertools.product(settings.lengths, ways, range(settings.seeds)))
    with ThreadPoolExecutor(settings.processes) as executor:
        reports = dict(zip(jobs, executor.map(lambda job: extend(settings, runs, *job), jobs)))
    measured = {
        length: states({way: [reports[length, way, seed] for seed in range(settings.seeds)] for way in ways})
        for length in settings.lengths
    }
    text = [
        "# Reading longer texts: what training adds to YaRN",
        "",
        "![Facts found and pseudo-perplexity against length](length.png)",
        "",
        circumstances("length", precision=AS_TOLD, runs=runs.circumstances()),
        "",
        f"The small model was trained with 256 tokens. Shown are means over {settings.seeds} seeds of training with "
        "95% intervals (Student's t); without training there is one model. A fact is a statement somewhere in the text "
        "and a question at its end, with 100 words to choose from (1% by chance). Intervals show how much trainings "
        "differ, not how much another draw of facts would change the result: with 64 facts, of which a tenth is found, "
        "that is 7 points more or less. The documents that are measured are held out of this training, but in windows "
        "of 256 tokens they were part of the model's pretraining.",
        "",
        f"Each training is `extend_length.py` with `{settings.training}`.",
        "",
        *itertools.chain.from_iterable(itertools.starmap(tables, measured.items())),
    ]
    results = Path(settings.results)
    plot(measured, results / "length.png")
    write_text(results / "length.md", "\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main()

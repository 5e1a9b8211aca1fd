"""What checksums and the lock add to a checkpoint of pretraining.

    python benchmarks/checkpoints.py        # three minutes

A checkpoint of 111 million parameters with AdamW's state (1.3 GB) is written with and without checksums in turn, in the
order A B B A, and the differences between neighbours are averaged, because the speed of the disk changes more from one
minute to the next than the two variants differ. Writes benchmarks/results/checkpoints.md.
"""

import argparse
import os
import platform
import statistics
import tempfile
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from transformers.utils import logging

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.common.atomic_writes import write_text
from neobert_hf.common.locks import folder_lock
from neobert_hf.common.report import markdown_table, mean_interval
from neobert_hf.training.run_checkpoints import Progress, add_checksums, mark_complete


def build_run(layers: int) -> tuple[NeoBERTForMaskedLM, torch.optim.Optimizer]:
    model = NeoBERTForMaskedLM(NeoBERTConfig(num_hidden_layers=layers, max_length=1024))
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        state = {"exp_avg": torch.randn_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        optimizer.state[weight] = state | {"step": torch.tensor(1.0)}
    return model, optimizer


def seconds_to_save(run: tuple[NeoBERTForMaskedLM, torch.optim.Optimizer], folder: Path, checksums: bool) -> float:
    """How long training waits, as in `ResumableTrainer`: checksums are computed in parallel with the next step."""
    model, optimizer = run
    started = time.perf_counter()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    mark_complete(folder, Progress("plain", {}, {}))
    if checksums:
        thread = threading.Thread(target=add_checksums, args=(folder,))
        thread.start()
    waited = time.perf_counter() - started
    if checksums:
        thread.join()
    return waited


def seconds_of_checksums(folder: Path) -> float:
    started = time.process_time()
    add_checksums(folder)
    return time.process_time() - started


def seconds_of_a_lock(folder: Path) -> float:
    started = time.perf_counter()
    for _ in range(100):
        with folder_lock(folder):
            pass
    return (time.perf_counter() - started) / 100


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="each writes four checkpoints")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--folder", help="on the disk to measure; a temporary folder otherwise")
    parser.add_argument("--results", default="benchmarks/results")
    settings = parser.parse_args(args)
    logging.disable_progress_bar()
    run = build_run(settings.layers)

    with tempfile.TemporaryDirectory(dir=settings.folder) as name:
        folder = Path(name) / "checkpoint-1"
        for _ in range(2):
            seconds_to_save(run, folder, checksums=True)
        plain, differences = [], []
        for _ in range(settings.rounds):
            waits = []
            for checksums in (False, True, True, False):
                os.sync()
                waits.append(seconds_to_save(run, folder, checksums))
            plain += [waits[0], waits[3]]
            differences.append((waits[1] + waits[2] - waits[0] - waits[3]) / 2)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
        own = statistics.median(seconds_of_checksums(folder) for _ in range(5))
        lock = seconds_of_a_lock(Path(name))

    whole = statistics.mean(plain)
    mean, low, high = (1e3 * seconds for seconds in mean_interval(differences))
    rows = [
        ["a checkpoint without checksums, mean", f"{whole:.2f} s"],
        ["what checksums add, mean and 95% interval", f"{mean:.0f} ms ({low:.0f} to {high:.0f})"],
        ["as a share", f"{mean / whole / 10:.1f}% ({low / whole / 10:.1f} to {high / whole / 10:.1f})"],
        ["the same, of medians", f"{100 * statistics.median(differences) / statistics.median(plain):.1f}%"],
        ["the checksums themselves, beside the next step", f"{own:.2f} s of one core"],
        ["taking and releasing the lock, once a run", f"{1e3 * lock:.2f} ms"],
    ]
    title = (
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), torch {version('torch')}; "
        f"{run[0].num_parameters():,} parameters, {size:.2f} GB; {settings.rounds} rounds of four checkpoints. "
        "Command: `python benchmarks/checkpoints.py`. The script describes what is measured."
    )
    table = "\n".join(markdown_table(["", "found"], rows))
    report = "\n\n".join(["# What checksums add to a checkpoint", title, table]) + "\n"
    Path(settings.results).mkdir(parents=True, exist_ok=True)
    write_text(Path(settings.results) / "checkpoints.md", report)
    print(report)


if __name__ == "__main__":
    main()

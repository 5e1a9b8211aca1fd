"""`make gpu` on a CPU: what is begun and when, kills, errors, other code, and the page. Speeds are never asserted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gpu
import pytest
from encoders import ENCODERS
from gpu import GpuArguments, Job, Study
from gpu_report import RIVALS_GOAL, goals_table, page
from throughput import PAPER_LENGTHS

from neobert_hf.common.results import ResultError
from tests.benchmarks.test_dependencies import ONLY_TORCH
from tests.benchmarks.test_throughput import entry
from tests.helpers.models import ROOT


def settings(folder: Path, **changes) -> GpuArguments:
    return GpuArguments(**({"minutes": 1.0, "test_minutes": 0.0, "output_dir": str(folder), "layers": 1} | changes))


def job(key: str, seconds: float = 0.0, measure=lambda: {"seconds": 1.0}) -> Job:
    return Job("numbers", key, seconds, 0.0, measure)


def study_of(folder: Path, jobs: list[Job], **changes) -> Study:
    study = Study(settings(folder, **changes))
    study.jobs = lambda: jobs
    return study


def fails() -> dict:
    raise RuntimeError("no such kernel\nand a stack")


def test_nothing_begins_without_the_time_for_it(tmp_path):
    """What is cheaper goes on."""
    study = study_of(tmp_path, [job("copy"), job("long", 61.0), job("short", 5.0)])
    study.run(study.pending())
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert list(stored["numbers"]) == ["copy", "short"] and not stored["begun"]


def test_at_the_end_the_process_stops_in_the_middle_of_a_measurement(tmp_path, monkeypatch):
    """With the page of all before it; a measurement that has ended is never lost."""
    ended, stopped = [], threading.Event()
    monkeypatch.setattr(gpu.os, "_exit", lambda code: (ended.append((code, time.monotonic())), stopped.set()))
    hangs = job("hangs", 0.0, lambda: stopped.wait(300) and {"seconds": 2.5})
    study = study_of(tmp_path, [job("copy"), hangs], minutes=0.04)
    timer = gpu.stop_at_the_end(study)
    study.run(study.pending())
    timer.join()
    ((code, moment),) = ended
    assert code == 0 and -0.1 < moment - study.end < 10
    assert "| copy |" in (tmp_path / "gpu.md").read_text() and "hangs" not in (tmp_path / "gpu.md").read_text()


def test_an_error_is_kept_and_tried_again_with_other_code_only(tmp_path):
    study = study_of(tmp_path, [job("bad", measure=fails), job("copy")])
    study.run(study.pending())
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert stored["errors"]["bad"]["error"] == "RuntimeError: no such kernel" and list(stored["numbers"]) == ["copy"]
    again = study_of(tmp_path, [job("bad"), job("copy")])
    assert again.pending() == []
    again.code = "other"
    assert [found.key for found in again.pending()] == ["bad"]
    again.run(again.pending())
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert not stored["errors"] and list(stored["numbers"]) == ["copy", "bad"]


def test_a_process_that_has_lost_the_gpu_is_replaced_by_one_with_the_rest_of_the_time(tmp_path, monkeypatch):
    study, started = study_of(tmp_path, [job("bad", measure=fails)]), []
    monkeypatch.setattr(gpu.torch, "zeros", lambda *args, **kwargs: fails())
    monkeypatch.setattr(gpu.os, "execv", lambda path, words: started.append(words))
    study.run(study.pending())
    ((*_, flag, minutes),) = started
    assert flag == "--minutes" and 0.9 < float(minutes) <= 1
    assert "bad" in json.loads((tmp_path / "gpu.json").read_text())["errors"]


def test_numbers_of_other_model_files_are_measured_again_last(tmp_path):
    """Until then they stay. What a kill ended comes before them, and what was never begun first."""
    jobs = [job("rotation"), job("copy"), job("killed"), job("new")]
    study = study_of(tmp_path, jobs[:2])
    study.run(study.pending())
    study.content["begun"]["killed"] = study.code
    study.record.save()
    again = study_of(tmp_path, jobs)
    again.model_code = "other"
    assert [found.key for found in again.pending()] == ["new", "killed", "rotation"]
    again.run(again.pending())
    assert again.pending() == [] and again.content["numbers"]["rotation"]["code"] == "other"


def test_another_machine_or_version_is_refused(tmp_path, monkeypatch):
    study_of(tmp_path, []).record.save()
    monkeypatch.setattr(gpu, "machine", lambda: "another GPU")
    with pytest.raises(ResultError, match="machine: .* now"):
        study_of(tmp_path, [])


def test_without_minutes_the_page_is_written_and_nothing_measured(tmp_path, monkeypatch):
    """Also of another machine's file."""
    # Of a flag that is there twice the last one counts: so a process hands on the rest of its time.
    gpu.main(["--minutes", "9", "--output_dir", str(tmp_path), "--minutes", "0"])
    assert "Not measured on a GPU yet" in (tmp_path / "gpu.md").read_text() and not (tmp_path / "gpu.json").exists()
    study = study_of(tmp_path, [job("copy", measure=lambda: {"seconds": 1.0, "bytes": 1e12})])
    study.run(study.pending())
    monkeypatch.setattr(gpu, "machine", lambda: "another GPU")
    gpu.main(["--minutes", "0", "--output_dir", str(tmp_path)])
    assert "| copy | 1,000,000 | 1 TB/s | - |" in (tmp_path / "gpu.md").read_text()


def test_the_order_is_that_of_worth(tmp_path):
    study = Study(settings(tmp_path, models=["NeoBERT", "BERT-base", "ModernBERT-base"], lengths=[16, 32]))
    keys = [found.key for found in study.pending()]
    assert len(set(keys)) == len(keys) and keys[0] == "copy"
    order = [
        "attention as torch chooses 16",
        "rotation",
        "NeoBERT sdpa False forward 16 full",
        "ModernBERT-base sdpa False forward 16 full",
        "NeoBERT sdpa True forward 16 ragged",
        "NeoBERT sdpa False forward 32 full",
        "NeoBERT sdpa True training 16 full",
        "NeoBERT sdpa True training 32 full",
        "NeoBERT sdpa False forward 64 full",
        "profile of a block, forward",
        "BERT-base sdpa False forward 16 full",
        "rotation, compiled",
        "attention with gradients as torch chooses 16",
        "forward of 16 tokens",
    ]
    assert [keys.index(key) for key in order] == sorted(keys.index(key) for key in order)


def cell(model="NeoBERT", share=0.5, **changes) -> dict:
    """A measurement at this share of products' rate of 100 FLOP/s."""
    measured = {"rows": 4, "tokens": 400 * share, "seconds": 1.0, "flops": 100 * share, "peak_bytes": 2**30}
    return entry(model=model, **({"length": 512, "rounds": [measured]} | changes))


def content(*cells: dict, **changes) -> dict:
    fixed = {"machine": "NVIDIA H200", "dtype": "bfloat16", "torch": "2", "cuda": "13", "transformers": "5"}
    return {
        "settings": fixed,
        "date": "2026-11-23",
        "ceilings": [100.0],
        "cells": {str(number): found for number, found in enumerate(cells)},
        "tests": {},
        "numbers": {},
        "errors": {},
        "begun": {},
    } | changes


def verdicts(found: dict) -> dict[str, str]:
    entries = [entry for entry in found["cells"].values() if entry["rounds"]]
    from gpu_report import summarise

    table = goals_table(found, summarise(entries, 100.0), entries, 100.0)[2:]
    return {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1].removesuffix(" |") for line in table}


def test_goals_are_met_missed_or_not_measured():
    found = verdicts(content())
    assert set(found.values()) == {"not measured", "not installed"}
    found = verdicts(
        content(
            cell(share=0.56),
            cell(share=0.5, length=4096),
            cell(share=0.51, layout="ragged"),
            cell(share=0.4, mode="training"),
            cell("BERT-base", share=0.57),
            cell("ModernBERT-base", share=0.25, length=4096),
            cell(share=0.3, length=32768),
            numbers={"attention FlashAttention 3 512": {"seconds": 1.0, "flops": 1.0}},
        )
    )
    rate = "share of the products' rate"
    assert found[f"Forward pass, {rate}"] == "missed at 4,096; not measured at 1,024, 2,048"
    assert found["The same with FlashAttention 3"] == "missed at 512, 4,096; not measured at 1,024, 2,048"
    assert found[f"Training step, {rate}"].startswith("missed at 512; not measured at")
    assert found["Ragged batches' FLOP/s over full ones'"].startswith("met; not measured at")
    assert found[RIVALS_GOAL].startswith("missed at 512; not measured at 1,024, 2,048, 8,192; not all measured: ")
    assert found["32,768 tokens in one sequence"] == "met"
    assert found["Tokens/s over ModernBERT-base's at 4,096, `sdpa`"] == "reported"


def all_rivals() -> list[dict]:
    """Every way of the other encoders at every length that they have positions for, slower than NeoBERT."""
    found = [cell(length=length) for length in PAPER_LENGTHS]
    for name, encoder in ENCODERS.items():
        fitting = [length for length in PAPER_LENGTHS if length <= (encoder.longest or 8192)]
        ways = [(length, compiled) for length in fitting for compiled in (False, True)] * (name != "NeoBERT")
        found += [cell(name, share=0.4, length=length, compiled=compiled) for length, compiled in ways]
    return found


def test_the_other_encoders_are_beaten_only_where_all_of_them_were_measured():
    """At every length, eager and compiled, with every attention; memory that ends and an error are measured as such."""
    assert verdicts(content(*all_rivals()))[RIVALS_GOAL] == "met"
    rest = [found for found in all_rivals() if found["model"] != "BERT-large"]
    assert verdicts(content(*rest))[RIVALS_GOAL] == "not all measured: BERT-large"
    gone = ("EuroBERT-210m", 2048, True)
    rest = [found for found in all_rivals() if (found["model"], found["length"], found["compiled"]) != gone]
    assert verdicts(content(*rest))[RIVALS_GOAL] == "not all measured: EuroBERT-210m at 2,048"
    error = {"EuroBERT-210m sdpa True forward 2048 full": {"error": "no such kernel", "code": "c"}}
    assert verdicts(content(*rest, errors=error))[RIVALS_GOAL] == "met"
    flash = cell("EuroBERT-210m", share=0.4, attention="flash_attention_3")
    others = "not all measured: EuroBERT-210m"
    assert verdicts(content(*all_rivals(), flash))[RIVALS_GOAL] == others
    full = [
        found | {"rows": None, "rounds": [None]} if found["model"] == "BERT-large" else found for found in all_rivals()
    ]
    assert verdicts(content(*full))[RIVALS_GOAL] == "met"
    gone = [found for found in all_rivals() if (found["model"], found["length"]) != ("NeoBERT", 1024)]
    assert verdicts(content(*gone))[RIVALS_GOAL] == "met; not measured at 1,024"
    assert verdicts(content(cell("BERT-base", share=0.6), *all_rivals()))[RIVALS_GOAL] == "missed at 512"


def test_shares_of_the_data_sheet_stand_beside_those_of_the_products():
    text = page(content(cell(), ceilings=[100.0]) | {"settings": content()["settings"] | {"machine": "NVIDIA H200"}})
    assert "| Forward pass, share of the data sheet's rate | - | 0.00 at 512 | reported |" in text
    fast = cell() | {"rounds": [{"rows": 4, "tokens": 1000, "seconds": 1.0, "flops": 494.5e12, "peak_bytes": 0}]}
    text = page(content(fast, ceilings=[700e12]))
    assert "| Forward pass, share of the data sheet's rate | - | 0.50 at 512 | reported |" in text
    assert "| NeoBERT | 222M | 1 (71%, 50%) |" in text and "(MFU) and of the data sheet's." in text
    elsewhere = content(fast, ceilings=[700e12])
    elsewhere["settings"]["machine"] = "another"
    assert "data sheet" not in page(elsewhere) and "| NeoBERT | 222M | 1 (71%) |" in page(elsewhere)


def test_the_page_shows_what_is_there_and_what_failed():
    text = page(content())
    assert "Not measured on a GPU yet" in text and "Nothing." in text
    assert "to their end: no module" in page(content(tests={"output": "x\nno module\n\n", "finished": False}))
    outcomes = {"tests/a.py::b": "failed", "tests/a.py::c": "passed"}
    kernels = [{"name": "gemm", "calls": 2, "microseconds": 300_000.0}]
    numbers = {
        "copy": {"seconds": 1.0, "bytes": 4e12},
        "attention varlen 512": {"seconds": 1.0, "flops": 3e14},
        "profile of a block, forward": {"seconds": 1.0, "batch": "4 x 512", "kernels": kernels},
    }
    text = page(
        content(
            cell(),
            numbers=numbers,
            tests={"outcomes": outcomes, "finished": True},
            errors={"product wo": {"error": "OutOfMemoryError: x", "code": "c"}},
        )
    )
    for part in ("1 passed, 1 failed", "* Test tests/a.py::b", "* product wo: OutOfMemoryError: x", "| 4 TB/s |"):
        assert part in text
    assert "| varlen | 300 |" in text and "| 1,000,000 | gemm x2 30% |" in text and "data sheet says 989" in text


# What a process of its own runs: tiny encoders, a stand-in for the flash kernel, nothing compiled, which takes minutes.
SCRIPT = """
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from tests.benchmarks import test_throughput
from tests.helpers import flash_kernel
test_throughput.shrink_encoders()
functions = (flash_kernel.flash_attn_func, flash_kernel.flash_attn_varlen_func, None, None, None)
flash_utils._lazy_imports = lambda *args, **kwargs: functions
torch.compile = lambda function, **options: function
import gpu, throughput

gpu.transformers.PreTrainedModel._flash_attn_can_dispatch = lambda *args, **kwargs: True
throughput.backends = lambda config: ["flash_attention_3", "sdpa"]
gpu.main()
"""


def measured(file: Path) -> dict:
    stored = json.loads(file.read_text())
    return stored["numbers"] | stored["cells"] | stored["errors"]


@pytest.mark.slow
def test_killed_twice_it_loses_nothing_and_ends_with_the_page(tmp_path):
    """With SIGKILL, in a process that has the packages of a GPU image; the tests for GPUs are found, and skipped."""
    environment = ONLY_TORCH | {"PYTHONPATH": os.pathsep.join((ONLY_TORCH["PYTHONPATH"], str(ROOT)))}
    flags = f"--output_dir {tmp_path} --models NeoBERT ModernBERT-base --minutes 9 --layers 2".split()
    file, before = tmp_path / "gpu.json", {}
    for kill_at in (8, 20, None):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, *flags], cwd=ROOT, env=environment)
        deadline = time.monotonic() + 500
        while process.poll() is None:
            assert time.monotonic() < deadline
            if kill_at and file.exists() and len(measured(file)) >= kill_at:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.02)
        assert (process.returncode == 0) == (kill_at is None)
        stored = measured(file)
        assert all(stored[key] == value for key, value in before.items()) and len(stored) > len(before)
        before = stored
    stored = json.loads(file.read_text())
    assert not stored["errors"] and not stored["begun"]
    assert stored["tests"]["finished"] and set(stored["tests"]["outcomes"].values()) == {"skipped"}
    assert len(stored["tests"]["outcomes"]) > 80
    ways = {(entry["model"], entry["attention"], entry["compiled"]) for entry in stored["cells"].values()}
    assert len(ways) == 2 * 2 * 2
    text = (tmp_path / "gpu.md").read_text()
    assert "## Against the goals" in text and "## Training step, ragged batches" in text and "skipped" in text

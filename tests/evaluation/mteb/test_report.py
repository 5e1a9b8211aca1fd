"""The report: Tables 4 and 5 of the paper beside one's own models, on MTEB(eng, v1) or v2."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.mteb.local_tasks import TYPES
from neobert_hf.evaluation.mteb.recipe import MTEBSettings, benchmark_types, collect_tasks
from neobert_hf.evaluation.mteb.report import TASK_TYPES, read_published, write_report
from tests.helpers.models import ROOT
from tests.helpers.mteb_tasks import CONFIGS, INSTRUCTIONS


TABLES = [CONFIGS / "table4.yaml", CONFIGS / "table5.yaml"]


def test_the_published_rows_are_those_of_the_paper(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text().replace("<b>", "").replace("</b>", "")
    rows, counts = read_published(TABLES), Counter(benchmark_types("MTEB(eng, v1)").values())
    assert len(rows) == 13 and [counts[kind] for kind in TASK_TYPES] == [12, 11, 3, 4, 15, 10, 1]
    for name, (*types, average) in rows.items():
        digits = 2 if name.endswith("CDE") else 1
        assert "\t".join(f"{score:.{digits}f}" for score in (*types, average)) in paper, name
        # The average is that of the types, weighted by their tasks, up to rounding.
        weighted = sum(score * counts[kind] for score, kind in zip(types, TASK_TYPES)) / 56
        assert weighted == pytest.approx(average, abs=0.11), name


def write_results(folder: Path, scores: dict[str, float]) -> None:
    """Results made up, as `Evaluation` writes them."""
    folder.mkdir(exist_ok=True)
    types = benchmark_types("MTEB(eng, v1)") | benchmark_types("MTEB(eng, v2)") | benchmark_types("NanoBEIR")
    for task, score in scores.items():
        content = {"task": task, "type": types[task], "metric": "x", "score": score}
        (folder / f"{task}.json").write_text(json.dumps(content))


def test_means_of_some_tasks_are_marked_beside_the_papers_rows(tmp_path):
    types = benchmark_types("MTEB(eng, v1)")
    sts = [task for task, kind in types.items() if kind == "STS"]
    some = [task for task, kind in types.items() if kind not in ("Retrieval", "Summarization", "STS")] + ["NQ"]
    write_results(tmp_path / "a", dict.fromkeys(some, 0.25) | dict.fromkeys(sts, 0.5))
    write_results(tmp_path / "b", dict.fromkeys(sts, 0.5))
    text = write_report(tmp_path, "MTEB(eng, v1)", types, read_published(TABLES))
    # 10 tasks of 50 and 31 of 25 percent.
    assert "| **a** | 25.0 | 25.0 | 25.0 | 25.0 | 25.0 [1] | 50.0 | - | 31.1 [41] |" in text
    assert "| **b** | - | - | - | - | - | 50.0 | - | 50.0 [10] |" in text
    assert "| NeoBERT 4096 (paper) | 61.6 | 40.8 | 76.2 | 51.2 | 31.6 | 74.8 | 30.7 | 51.3 |" in text
    assert "| NeoBERT, CDE (paper) | 82.1 | 50.3 | 86.7 | 57.7 | 56.4 | 82.3 | 31.0 | 66.6 |" in text


def test_the_report_of_the_second_version_counts_its_tasks(tmp_path):
    types = benchmark_types("MTEB(eng, v2)")
    write_results(tmp_path / "a", dict.fromkeys(types, 0.25))
    lines = write_report(tmp_path, "MTEB(eng, v2)", types, {}).splitlines()
    counts = [int(cell.split("(")[1].strip(") ")) for cell in lines[2].split("|")[2:-1]]
    assert counts == [8, 8, 3, 2, 10, 9, 1, 41] and lines[4] == "| **a** |" + " 25.0 |" * 8


def test_another_benchmark_has_columns_of_its_types(tmp_path):
    types = benchmark_types("NanoBEIR")
    write_results(tmp_path / "a", dict.fromkeys(types, 0.25))
    lines = write_report(tmp_path, "NanoBEIR", types, {}).splitlines()
    assert lines[2] == "| Model | Retriev. (13) | Avg. (13) |" and lines[4] == "| **a** | 25.0 | 25.0 |"


def test_configurations_are_the_papers_and_those_of_the_second_version():
    first, second, local = (
        parse_config(MTEBSettings, args=["--config", str(CONFIGS / f"{name}.yaml"), "--model", "m"])[0]
        for name in ("eng_v1", "eng_v2", "local")
    )
    assert (first.benchmark, first.dtype, first.max_length) == ("MTEB(eng, v1)", "float16", 1024)
    assert [ROOT / file for file in first.published] == TABLES and second.published == []
    some = [task.metadata.type for task in collect_tasks(replace(first, tasks=["STS", "NQ"]))[0]]
    assert sorted(some) == ["Retrieval", *["STS"] * 10]
    tasks, instructions = collect_tasks(second)
    assert len(tasks) == 41 and instructions.keys() == {task.metadata.name for task in tasks}
    assert {entry["query"] for entry in instructions.values()} <= set(INSTRUCTIONS.values())
    example = yaml.safe_load((ROOT / local.local_tasks).read_text())
    assert local.benchmark is None and [entry["type"] for entry in example.values()] == list(TYPES)

"""What all benchmarks share: runs that are stored, pages that are made again, the process in the middle."""

import json

import pytest
from runner import Settings, StoredRuns, middle_process, processor, run_benchmark


def test_a_run_is_made_once(tmp_path):
    made = []

    def run():
        made.append(1)
        return {"scores": (1, 2.5)}

    file = tmp_path / "runs" / "a.json"
    first, again = (StoredRuns(file).result("weights of 1; seed 0", run) for _ in range(2))
    assert first == again == {"scores": [1, 2.5]} and len(made) == 1
    StoredRuns(file).result("weights of 1; seed 1", run)
    assert len(made) == 2 and set(json.loads(file.read_text())) == {f"weights of 1; seed {seed}" for seed in (0, 1)}


def test_days_and_processors_are_those_of_the_runs_that_were_used(tmp_path):
    stored = {name: {"found": 1, "date": "2026-01-02", "processor": f"CPU {name}"} for name in ("old", "other")}
    (tmp_path / "a.json").write_text(json.dumps(stored))
    runs = StoredRuns(tmp_path / "a.json")
    runs.result("old", lambda: 2)
    runs.result("new", lambda: 2)
    assert "2026-01-02 (CPU old)" in runs.places() and f"({processor()})" in runs.places()
    assert "CPU other" not in runs.places()


def test_a_page_is_made_again_without_measuring(tmp_path):
    def page(stored: dict, folder) -> list[str]:
        return ["# Title", f"found {stored['found']}", stored["made"]["command"]]

    run_benchmark("one", Settings, lambda settings: [1, 2], page, args=["--results", str(tmp_path)])
    text = (tmp_path / "one.md").read_text()
    assert text.startswith("# Title\n\nfound [1, 2]\n\npython benchmarks/one.py --results ")
    (tmp_path / "one.md").unlink()
    flags = ["--results", str(tmp_path), "--page_only", "true"]
    run_benchmark("one", Settings, lambda settings: 1 / 0, page, args=flags)
    assert (tmp_path / "one.md").read_text() == text


def rows_of_process(first: list[dict], *others: list[dict]) -> list[dict]:
    """Measures something else in each process: what is left of a file's lines."""
    from pathlib import Path

    file = Path("shares.txt")
    share, *left = file.read_text().split()
    file.write_text(" ".join(left))
    return [{"share": float(share), "name": first}]


@pytest.mark.slow
def test_the_process_in_the_middle_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shares.txt").write_text("0.9 0.7 0.8")
    (row,) = middle_process(3, "share", rows_of_process, "a")
    assert row == {"share": 0.8, "name": "a", "by_process": [0.7, 0.8, 0.9]}

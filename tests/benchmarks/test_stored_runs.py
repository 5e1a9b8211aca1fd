"""What a results file holds is not run again, and the page says when and where it was run."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from circumstances import circumstances, processor
from stored_runs import StoredRuns


def test_a_run_is_made_once_and_told_as_a_file_tells_it(tmp_path):
    file, made = tmp_path / "runs" / "a.json", []

    def run():
        made.append(1)
        return {"scores": (1, 2.5)}

    first = StoredRuns(file).result("weights of 1; seed 0", run)
    again = StoredRuns(file).result("weights of 1; seed 0", run)
    assert first == again == {"scores": [1, 2.5]} and len(made) == 1
    StoredRuns(file).result("weights of 1; seed 1", run)
    assert len(made) == 2 and set(json.loads(file.read_text())) == {f"weights of 1; seed {seed}" for seed in (0, 1)}


def test_a_run_that_fails_is_not_stored_and_those_before_it_are(tmp_path):
    runs = StoredRuns(tmp_path / "a.json")
    runs.result("one", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        runs.result("two", lambda: 1 / 0)
    assert set(json.loads((tmp_path / "a.json").read_text())) == {"one"} and "two" not in runs.runs


def test_threads_lose_nothing(tmp_path):
    runs = StoredRuns(tmp_path / "a.json")
    with ThreadPoolExecutor(8) as executor:
        found = list(executor.map(lambda number: runs.result(str(number), lambda: number), range(64)))
    assert found == list(range(64)) and len(StoredRuns(tmp_path / "a.json").runs) == 64


def test_the_page_names_days_and_processors_of_the_runs_that_it_is_made_of(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps({name: {"found": 1, "date": "2026-01-02", "processor": f"CPU {name}"} for name in ("old", "other")})
    )
    runs = StoredRuns(tmp_path / "a.json")
    runs.result("old", lambda: 2)
    runs.result("new", lambda: 2)
    said = circumstances("worth", runs=runs.circumstances())
    assert "2026-01-02 (CPU old)" in said and f"({processor()})" in said and "CPU other" not in said

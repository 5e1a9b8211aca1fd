"""What all benchmarks share: runs that are stored, and pages that are made again."""

import json

from runner import Settings, StoredRuns, processor, run_benchmark


def test_a_run_is_made_once(tmp_path):
    """And the days and processors that are told are those of the runs that were used."""
    file, made = tmp_path / "runs" / "a.json", []
    file.parent.mkdir()
    stored = {name: {"found": 1, "date": "2026-01-02", "processor": f"CPU {name}"} for name in ("old", "other")}
    file.write_text(json.dumps(stored))

    def run():
        made.append(1)
        return {"scores": (1, 2.5)}

    first, again = (StoredRuns(file).result("new", run) for _ in range(2))
    assert first == again == {"scores": [1, 2.5]} and len(made) == 1
    runs = StoredRuns(file)
    assert runs.result("old", run) == 1 and runs.result("new", run) == first and len(made) == 1
    assert "2026-01-02 (CPU old)" in runs.places() and f"({processor()})" in runs.places()
    assert "CPU other" not in runs.places()


def test_a_page_is_made_again_without_measuring(tmp_path):
    def page(stored: dict, folder) -> list[str]:
        return ["# Title", f"found {stored['found']}"]

    run_benchmark("one", Settings, lambda settings: [1, 2], page, args=["--results", str(tmp_path)])
    text = (tmp_path / "one.md").read_text()
    assert text.startswith("# Title\n\nfound [1, 2]\n\n") and "python benchmarks/one.py --results " in text
    (tmp_path / "one.md").unlink()
    flags = ["--results", str(tmp_path), "--page_only", "true"]
    run_benchmark("one", Settings, lambda settings: 1 / 0, page, args=flags)
    assert (tmp_path / "one.md").read_text() == text

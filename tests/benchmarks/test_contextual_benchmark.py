"""benchmarks/contextual.py, at the smallest size."""

import json

import pytest

from tests.benchmarks.test_benchmarks import made_pairs


pytestmark = pytest.mark.usefixtures("forked_scripts")


@pytest.mark.slow
def test_a_context_is_compared_with_none_and_others(tmp_path):
    """Both ways with two seeds, of few steps; what is there is not computed again."""
    from contextual import COMPARISONS, NULL, OTHER, OWN, SHUFFLED, main

    data, start, _ = made_pairs(tmp_path)
    flags = f"--data {data} --model {start} --results {tmp_path} --output_dir {tmp_path}/runs --learning_rates 1e-3"
    flags += " --seeds 2 --test_rows 10 --steps 2 --batch_size 4 --context_size 4"
    command = [*flags.split(), "--limit", "--logging_steps 1 --use_cpu true"]
    main(command)
    values = json.loads((tmp_path / "contextual.json").read_text())
    # Context and texts of 4 rows, cached; by hand for texts of 32 tokens and more: 4 (4 t + 8 (12 + t)) / (3 * 8 t).
    assert 2 < values["costs"] < 2.6
    results = values["results"]
    assert {name for pair in COMPARISONS for name in pair} == results.keys()
    assert all(len(scores) == 2 and len(scores[0]) == 4 for scores in results.values())
    # A permutation changes nothing but roundings.
    for own, shuffled in zip(results[OWN], results[SHUFFLED]):
        assert shuffled == pytest.approx(own, abs=0.05)
    assert len({json.dumps(results[name]) for name in (OWN, NULL, OTHER)}) == 3
    report = (tmp_path / "contextual.md").read_text()
    assert "own context, against bi-encoder" in report and "nan" not in report
    assert (tmp_path / "contextual.png").stat().st_size > 10_000
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*.json")}
    # Four trainings; a file for each number of the start, of two untrained ones, of two bi-encoders, of two models with
    # four contexts.
    assert len([file for file in files if file.name == "log.json"]) == 4
    assert len([file for file in files if file.name.startswith(("test ", "development "))]) == 4 * (1 + 2 + 2 + 2 * 4)
    main(command)
    assert files == {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*.json")}

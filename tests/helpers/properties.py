"""Property tests: the same random values in every run."""

from hypothesis import settings


def reproducible(examples: int):
    """Derandomised, so that a failure in CI is one here; without a time limit, which a busy machine would break."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)

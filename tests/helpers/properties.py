"""Property tests: the same random values in every run, and numbers that nobody means among them."""

import math

from hypothesis import settings
from hypothesis import strategies as st


def reproducible(examples: int):
    """Derandomised, so that a failure in CI is one here; without a time limit, which a busy machine would break."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


# What a file, a command line or a caller may hold where a number belongs.
NOT_MEANT = [math.nan, math.inf, -math.inf, -1, 0, -0.5, 1e-300, 1e300, 2**40, 10**400, True, "1"]
any_number = st.one_of(
    st.integers(1, 8), st.floats(0, 1), st.floats(1, 4), st.sampled_from(NOT_MEANT), st.floats(), st.integers(9, 40)
)

"""What the reports of recipes and benchmarks have in common."""

from collections.abc import Sequence
from typing import Any


def markdown_table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table; cells are written with `str`."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows)]

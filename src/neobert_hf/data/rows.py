"""A row of a table: what a cell must hold is asked of the row, and every error names the file and the row."""

import math
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


# White space, control characters, and characters without a width, such as the zero-width space.
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}
# A list of texts or numbers, as Python and NumPy print it.
LIST_AS_TEXT = re.compile(r"""\[\s*(['"].*['"]|-?[0-9][-+0-9.,eE\s]*)\s*\]""", re.DOTALL)


def is_empty(text: str | None) -> bool:
    """Whether nothing of a text is visible: only white space, or characters without a width."""
    return not text or all(unicodedata.category(character) in INVISIBLE for character in text)


def is_number(cell: Any) -> bool:
    """Whether a cell holds a number, also one that is written as text."""
    try:
        return math.isfinite(float(cell))
    except (TypeError, ValueError):
        return False


# The source of a row of a table in memory.
TABLE = "the table"


class NoColumnError(ValueError):
    """A table is sound, but lacks a column that was asked for."""


def no_column(name: str, found: Iterable[str]) -> str:
    names = ", ".join(map(repr, found)) or "none"
    return f"has no column {name!r}; it has {names}. The setting with this value (`column`?) must name one of these."


@dataclass
class Row:
    """A row of a table: its cells by column, and where it stands.

    Args:
        source: the file, or the dataset of the Hub.
        index: the number of the row in its source, from 0.
        cells: strings, numbers, lists, dictionaries or None, by column.

    Example:

    ```python
    >>> row = Row("pairs.csv", 3, {"question": "Why?", "score": "0.5"})
    >>> row.text("question"), row.number("score"), row.place
    ('Why?', 0.5, 'pairs.csv, row 3')
    ```
    """

    source: str
    index: int
    cells: dict[str, Any]

    @property
    def place(self) -> str:
        """File and row, for a message."""
        return f"row {self.index:,} of the table" if self.source == TABLE else f"{self.source}, row {self.index:,}"

    def cell(self, column: str) -> Any:
        """What a column holds, as it is; ValueError if there is no such column."""
        if column not in self.cells:
            advice = " If other rows have it, fill it here, or drop the row." if self.index else ""
            raise NoColumnError(f"{self.place} {no_column(column, self.cells)}{advice}")
        return self.cells[column]

    def text(self, column: str) -> str:
        """The text in a column; ValueError if it is empty. A number becomes text."""
        return self._filled(column, self.cell(column))

    def text_or_none(self, column: str) -> str | None:
        """The text in a column, which may be empty; None if it is missing."""
        return self.as_text(column, self.cell(column))

    def texts(self, column: str) -> list[str]:
        """The texts in a column that holds lists; ValueError if there is none, or one is empty."""
        cell = self.cell(column)
        if not isinstance(cell, list) or not cell:
            raise ValueError(f"{self.place}: {column!r} is {cell!r:.60}; it must be a list of one text or more.")
        return [self._filled(column, one) for one in cell]

    def number(self, column: str) -> float:
        """The number in a column, also if it is written as text; ValueError if there is none, or it is not finite."""
        cell = self.cell(column)
        try:
            number = float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{self.place}: {column!r} is {cell!r:.60}; it must be a number. Correct it.")
        return number

    def label(self, column: str) -> str:
        """The name of the class in a column, or its number as text; ValueError if there is none."""
        return self.text(column).strip()

    def labels(self, column: str, separator: str | None = None) -> list[str]:
        """The labels or tags in a column: a list, or a text in which a separator stands between them."""
        cell = self.cell(column)
        if separator is not None and not isinstance(cell, list):
            parts = (self.text_or_none(column) or "").split(separator)
            return [part.strip() for part in parts if not is_empty(part)]
        if not isinstance(cell, list):
            raise ValueError(f"{self.place}: {column!r} is {cell!r:.60}; it must be a list of labels.")
        return [self._filled(column, one).strip() for one in cell]

    def _filled(self, column: str, cell: Any) -> str:
        text = self.as_text(column, cell)
        if is_empty(text):
            raise ValueError(f"{self.place}: {column!r} is {cell!r}; it must not be empty. Fill it, or drop the row.")
        return text

    def as_text(self, column: str, cell: Any) -> str | None:
        """A cell, or an item of a list in it, as text: numbers become text, None stays None, and NaN is None.

        Raises:
            ValueError: if it holds something else, or a character that no file can hold.
        """
        if isinstance(cell, float) and math.isnan(cell):  # So pandas writes a missing text, also into JSON.
            return None
        found = f"{self.place}: {column!r} holds"
        if cell is not None and not isinstance(cell, (str, int, float)):
            raise ValueError(f"{found} {type(cell).__name__} {cell!r:.60}; it must be a text. Choose another column.")
        text = None if cell is None else str(cell)
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{found} half a character (a lone surrogate): {error}. Correct it.") from error
        return text


def list_as_text(cells: Iterable[Any]) -> str | None:
    """The first cell, if all that are not empty are lists written as text, as pandas writes them into a CSV file."""
    filled = [cell for cell in cells if cell and cell != "[]"]
    found = filled and all(isinstance(cell, str) and LIST_AS_TEXT.fullmatch(cell) for cell in filled)
    return filled[0] if found else None

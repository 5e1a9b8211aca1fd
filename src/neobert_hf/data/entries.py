"""Entries of YAML files that describe datasets and tasks, as objects of dataclasses."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError

from neobert_hf.common.settings import nearest


Entry = TypeVar("Entry")


def read_entry(kind: type[Entry], where: str, entry: Any, **given: Any) -> Entry:
    """Make an object from the keys of an entry.

    Args:
        kind: a dataclass, whose fields are the keys; `strict` of `huggingface_hub` checks their types.
        where: the file and the name of the entry, for messages.
        entry: what the file holds.
        given: fields that are no keys.

    Raises:
        ValueError: naming the place and the key that is unknown, missing or of the wrong type.

    Example:

    ```python
    >>> read_entry(LocalTask, "tasks.yaml, task Search", {"type": "STS", "data": "pairs.csv"}, name="Search")
    ```
    """
    check_mapping(where, entry)
    known = [field.name for field in fields(kind) if field.name not in given]
    for key in entry:
        if key not in known:
            raise ValueError(f"{where} has the unknown key {key!r}{nearest(str(key), known)}")
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if missing := [key for key in needed if key not in entry and key not in given]:
        raise ValueError(f"{where} lacks {' and '.join(f'`{key}`' for key in missing)}: add it.")
    try:
        return kind(**entry, **given)
    except (StrictDataclassError, TypeError, ValueError) as error:
        # The cause is the first sentence of `strict` without its heading.
        raise ValueError(f"{where}: {error.__cause__ or error}") from error


def check_mapping(where: str, entry: Any) -> dict[str, Any]:
    """The entry unchanged; ValueError if it holds no keys."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} holds {entry!r:.60}; it must hold one `key: value` per line.")
    return entry

"""What a YAML file says about datasets of pairs: where they are, which columns are used, which instruction they have.

`configs/embeddings/datasets.yaml` explains the format and holds the paper's datasets.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedTokenizerBase

from neobert_hf.common.paths import DATA_FILE, beside_file, check_file_name
from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.data.entries import check_mapping, read_entry
from neobert_hf.embeddings.instructions import as_prompt, separator_text


@strict
@dataclass
class Lookup:
    """The table that holds the texts of a column of ids: its columns, and its source if that is not the part's."""

    id: str
    text: str
    source: str | None = None
    subset: str | None = None
    split: str = "train"


@strict
@dataclass
class Part:
    """One table of a dataset.

    Columns are named by paths: `set.0` is the first item of the list in `set`, `neg.*.text` the text of every item in
    `neg`. The texts of several paths are joined with a space (`query`, `positive`) or are all used (`negatives`).

    Args:
        split: may be a slice such as `train[:100000]`.
        above: numbers that a row must exceed, by column.
        lookups: where to find the texts of columns that hold ids, by column.
    """

    source: str
    query: str | list[str]
    positive: str | list[str]
    negatives: str | list[str] | None = None
    subset: str | None = None
    split: str = "train"
    above: dict[str, int | float] = field(default_factory=dict)
    skip_incomplete: bool = False
    lookups: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.query or not self.positive:
            raise ValueError("`query` and `positive` must each name a column.")
        lookups = self.lookups.items()
        self.lookups = {column: read_entry(Lookup, f"lookup of {column!r}", entry) for column, entry in lookups}


@strict
@dataclass
class PairDataset:
    """A dataset as the file describes it.

    Args:
        parts: tables with rows of the same kind, read one after the other.
        batch_size: the largest number of rows in a batch, 2 or more. Needed where positives are labels: no two rows of
            a batch may have the same positive, so a batch cannot have more rows than there are labels.
        default: whether its instruction is the prompt of queries for which none is named; see `prompts.py`.
        document_instruction: is put before its documents; nothing if empty.
        separator: is put between an instruction and a text.
    """

    name: str
    instruction: str
    parts: list[Part]
    batch_size: int | None = None
    default: bool = False
    document_instruction: str = ""
    separator: str = " "

    def __post_init__(self):
        self.instruction, self.document_instruction = self.instruction.strip(), self.document_instruction.strip()
        if self.batch_size is not None and self.batch_size < 2:
            raise ValueError(f"`batch_size` is {self.batch_size}; it must be a whole number, 2 or more.")

    @property
    def prompt(self) -> str:
        """The prompt of queries."""
        return as_prompt(self.instruction, self.separator)

    def sources(self) -> list[str]:
        """The tables that it is read from."""
        lookups = [lookup.source for part in self.parts for lookup in part.lookups.values()]
        return [source for source in [*(part.source for part in self.parts), *lookups] if source]

    @property
    def document_prompt(self) -> str:
        return as_prompt(self.document_instruction, self.separator)


def read_descriptions(
    path: str, only: list[str] | None = None, load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None
) -> tuple[list[PairDataset], dict[str, PairDataset]]:
    """Read a file such as `configs/embeddings/datasets.yaml`.

    Args:
        only: names of training datasets to use. All if None.
        load_tokenizer: returns the tokenizer of the model, which is needed if the file's `separator` is special_tokens.

    Returns:
        The training datasets, and those for evaluation by kind, `retrieval` and `sts`.

    Raises:
        ValueError: naming the dataset and the key that is unknown, missing or of the wrong type.
    """
    if DATA_FILE.search(path):
        raise ValueError(
            f"`datasets` is {path}, a file of data. It must be a YAML file that describes datasets, each with "
            "`source`, `query`, `positive` and `instruction`; configs/embeddings/small_datasets.yaml is an example."
        )
    content = read_yaml(path)
    unknown = content.keys() - {"train", "evaluation", "separator"}
    if unknown or not content.get("train"):
        found = f"has the unknown key {min(unknown)!r}" if unknown else "names no training dataset"
        raise ValueError(
            f"{path} {found}; it must hold `train` and may hold `evaluation` (datasets by name) and `separator`."
        )
    separator = _read_separator(path, content.get("separator", "space"), load_tokenizer)
    datasets = _switched_on(check_mapping(f"{path}, `train`", content["train"]))
    evaluation = _switched_on(check_mapping(f"{path}, `evaluation`", content.get("evaluation") or {}))
    if unknown := evaluation.keys() - {"retrieval", "sts"}:
        raise ValueError(f"{path}: `evaluation` may hold `retrieval` and `sts`, not {min(unknown)!r}.")
    for name in only or []:
        if name not in datasets:
            raise ValueError(f"{path} has no training dataset {name!r}{nearest(name, list(datasets))}")
    train = [_read_dataset(path, name, datasets[name], separator) for name in only or datasets]
    evaluated = {kind: _read_dataset(path, kind, entry, separator) for kind, entry in evaluation.items()}
    _check_names_of_prompts(path, train, evaluated)
    return train, evaluated


def _read_separator(path: str, name: Any, load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None) -> str:
    if name not in ("space", "special_tokens"):
        raise ValueError(f"{path}: `separator` is {name!r}; it must be space or special_tokens.")
    if name == "space":
        return " "
    if load_tokenizer is None:
        raise ValueError(f"{path}: `separator` is special_tokens, which needs a tokenizer: give `load_tokenizer`.")
    return separator_text(name, load_tokenizer())


def _check_names_of_prompts(path: str, train: list[PairDataset], evaluation: dict[str, PairDataset]) -> None:
    """Refuse clashing prompts: a model keeps each under the dataset's name, and one of them also as `query`."""
    for kind, dataset in evaluation.items():
        if dataset.default:
            raise ValueError(f"{path}, dataset {kind}: `default` is for training datasets: set it for one of those.")
        if dataset.batch_size is not None:
            raise ValueError(f"{path}, dataset {kind}: `batch_size` is for training datasets; leave it out here.")
        if kind == "sts" and dataset.document_prompt:
            raise ValueError(
                f"{path}, dataset sts: both sentences get the `instruction`; leave `document_instruction` out."
            )
    marked = [dataset.name for dataset in train if dataset.default]
    if len(marked) > 1:
        raise ValueError(f"{path}: both {marked[0]} and {marked[1]} are the `default`, but only one can be.")
    for dataset in train:
        # `passage` and `corpus` are what other models call their prompt for documents.
        if len(train) > 1 and dataset.name in ("query", "document", "passage", "corpus"):
            raise ValueError(f"{path}: {dataset.name!r} is the name of another prompt; give the dataset another name.")


def _read_dataset(path: str, name: str, entry: Any, separator: str) -> PairDataset:
    """A dataset from its entry: the keys of the dataset itself, and those of its one table or of a list of tables."""
    where = f"{path}, dataset {name}"
    check_file_name(name, f"The name of a dataset in {path}")
    table = dict(check_mapping(where, entry))
    keys = ("instruction", "document_instruction", "batch_size", "default")
    dataset = {key: table.pop(key) for key in keys if key in table}
    parts = table.pop("parts", None) or []
    if bool(table) == bool(parts) or not isinstance(parts, list):
        raise ValueError(
            f"{where} must have either `source`, `query` and `positive`, or `parts`, a list of tables that have these."
        )
    tables = [_read_part(path, where, part) for part in parts or [table]]
    return read_entry(PairDataset, where, dataset, name=name, parts=tables, separator=separator)


def _read_part(path: str, where: str, entry: Any) -> Part:
    part = read_entry(Part, where, entry)
    for table in (part, *part.lookups.values()):
        if table.source is not None:
            table.source = beside_file(path, table.source, or_id=True)
    return part


def _switched_on(entries: dict[str, Any]) -> dict[str, Any]:
    """`null` in place of a dataset's keys switches it off."""
    return {name: entry for name, entry in entries.items() if entry is not None}

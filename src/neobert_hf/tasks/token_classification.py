"""Token classification: tags of words, such as entities (BIO) or parts of speech.

The words of a row are joined with spaces into one text, and each piece belongs to the word in which its characters lie.
So every tokenizer makes the pieces that it was trained to make. Given single words, a tokenizer that marks the
beginning of a word by the space before it would treat them as inner parts of words.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from transformers import (
    AutoModelForTokenClassification,
    BatchEncoding,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerBase,
)

from neobert_hf.common.report import markdown_table, plot_confusion
from neobert_hf.common.row_files import open_file
from neobert_hf.tasks.recipe import Task, TaskSettings
from neobert_hf.tasks.rows import CSV_READERS, check_columns, choose_column, count_labels, or_leave_out, row_numbers
from neobert_hf.training.metrics import TagMetric, entities_of, is_entity_scheme


WORDS = ("tokens", "words", "form", "text")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "upos", "pos", "ner", "chunk_tags", "label")
# Windows of a long row overlap by 1/4, so that every word has context on both sides in one of them.
SHARED = 4
IGNORED = -100


@dataclass
class TokenClassificationSettings(TaskSettings):
    """Which columns are used."""

    word_column: str | None = field(default=None, metadata={"help": "lists of words; guessed if unset"})
    tag_column: str | None = field(default=None, metadata={"help": "lists of tags, one per word; guessed if unset"})
    tag_names: list[str] | None = field(
        default=None, metadata={"help": "if tags are bare numbers: the names of 0, 1, 2, ... in order"}
    )

    def __post_init__(self):
        super().__post_init__()
        names = self.tag_names or []
        if doubled := [name for name in names if not name.strip() or names.count(name) > 1]:
            raise ValueError(f"`tag_names` has {doubled[0]!r}; it must name every tag once, and none may be empty.")

    def columns_read(self, table: Dataset) -> list[str]:
        return [choose_column(table, self.word_column, WORDS, "word_column")]

    def labels_of_rows(self, table: Dataset) -> list[set[str]]:
        cells = table[choose_column(table, self.tag_column, TAGS, "tag_column")][:]
        # Cells that are not lists are refused later.
        return [set(map(str, tags)) if isinstance(tags, list) else set() for tags in cells]


# A comment before a sentence, as in MultiCoNER and CoNLL-U: `# id 5239d808 domain=en`. `#` may also be a word.
COMMENT = re.compile(r"#\s*(id|sent_id|text|newdoc|newpar|global\.columns)\b.*=")


def read_conll(file: Path) -> list[dict[str, list[str]]]:
    """Read one word per line, with an empty line after each sentence: first the word, last the tag, or CoNLL-U.

    In CoNLL-U the tag is the universal part of speech, and the parts of a contraction are separate words.
    """
    universal, rows, words, tags = ".conllu" in file.suffixes, [], [], []
    with open_file(str(file)) as handle:
        try:
            lines = handle.read().decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8: {error}.") from error
    for number, line in enumerate([*lines, ""], 1):
        line = line.rstrip("\r")
        # Between tabs a word may contain spaces. No-break spaces, as in 10 000, never separate words.
        if universal:
            cells = line.split("\t")
        else:
            cells = [cell.strip(" ") for cell in re.split("\t" if "\t" in line else " +", line.strip(" \t"))]
        if not line.strip() or cells[0] == "-DOCSTART-":
            rows += [{"tokens": words, "tags": tags}] if words else []
            words, tags = [], []
        elif universal and (line.startswith("#") or not cells[0].isdecimal()):
            continue
        elif not words and COMMENT.match(line):
            continue
        elif len(cells) < (4 if universal else 2):
            raise ValueError(f"{file}, line {number:,} is {line!r:.60}; it must have a word and a tag.")
        else:
            words.append(cells[1] if universal else cells[0])
            tags.append(cells[3] if universal else cells[-1])
    return rows


READERS = MappingProxyType(
    CSV_READERS | dict.fromkeys((".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt"), read_conll)
)


class TokenClassification(Task):
    """See `Task`. The columns are `words`, lists of texts, and `tags`, lists of numbers."""

    kind = "token-classification"
    auto_class = AutoModelForTokenClassification

    def __init__(self, settings: TokenClassificationSettings, splits: DatasetDict):
        table = splits["train"]
        (words,) = settings.columns_read(table)
        tags = choose_column(table, settings.tag_column, TAGS, "tag_column")
        check_columns(splits, [words, tags])
        print(f"columns: words {words}, tags {tags} (settings can name others)", flush=True)
        named = {split: named_tags(table, tags, split, settings.tag_names or ()) for split, table in splits.items()}
        numbers = {split: row_numbers(table) for split, table in splits.items()}
        for split, table in splits.items():
            check_rows(split, numbers[split], table[words][:], named[split])
        counts = count_labels(named, numbers, "tag")
        self.labels = sorted(counts, key=lambda tag: (tag != "O", tag))
        self.entities = is_entity_scheme(self.labels)
        # The tag of words that become no piece.
        self.fallback = "O" if "O" in counts else counts.most_common(1)[0][0]
        ids = {tag: number for number, tag in enumerate(self.labels)}
        self.splits = DatasetDict()
        for split, table in splits.items():
            numbers = [[ids[tag] for tag in row] for row in named[split]]
            self.splits[split] = Dataset.from_dict({"words": table[words][:], "tags": numbers})

    def encode(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
        """Windows of at most `max_length` pieces, with `labels`, `row`, and in `word` the word that begins with it.

        The first piece of a word has the word's tag, as in Transformers' own example and the paper of BERT.
        """
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} does not say which characters a piece covers: use a fast tokenizer."
            )

        # With padding at the end, a piece has the same position in its window and in the logits of the batch.
        tokenizer.padding_side = "right"

        def windows(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            encoded = tokenizer(
                [" ".join(words) for words in batch["words"]],
                truncation=True,
                max_length=max_length,
                stride=max_length // SHARED,
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            rows = encoded.pop("overflow_to_sample_mapping")
            words = words_of_pieces(encoded, rows, batch["words"])
            encoded.pop("offset_mapping")
            tags = [batch["tags"][row] for row in rows]
            labels = [[tag[word] if word >= 0 else IGNORED for word in window] for tag, window in zip(tags, words)]
            return {**encoded, "labels": labels, "word": words, "row": [numbers[row] for row in rows]}

        options = {"with_indices": True, "batched": True, "remove_columns": ["words", "tags"], "desc": "tokenizing"}
        encoded = self.splits.map(windows, **options)
        for split, table in encoded.items():
            self._report_lost(split, table)
        return encoded

    def _report_lost(self, split: str, encoded: Dataset) -> None:
        found = {
            (row, word) for row, words in zip(encoded["row"][:], encoded["word"][:]) for word in words if word >= 0
        }
        rows = self.splits[split]["words"][:]
        lost = [word for row, words in enumerate(rows) for place, word in enumerate(words) if (row, place) not in found]
        if lost:
            print(
                f"{split}: {len(lost):,} words have no piece in this tokenizer, such as {lost[0]!r}. They are not "
                f"trained on, and are predicted as {self.fallback}.",
                flush=True,
            )
        if not found:
            raise ValueError(f"The split {split} has no word with a piece in this tokenizer.")

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> DataCollatorForTokenClassification:
        return DataCollatorForTokenClassification(tokenizer)

    @staticmethod
    def reduce_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The best tag of each piece: all logits would fill the memory. NaN is kept, so that it is noticed."""
        best = logits.argmax(-1).float()
        return best.masked_fill(~logits.isfinite().all(-1), torch.nan)

    def predictions(self, split: str, encoded: Dataset, best: np.ndarray) -> list[list[str]]:
        """The tag of every word, from the window in which the word is furthest from the ends."""
        rows = self.splits[split]["words"][:]
        tags = [[self.fallback] * len(words) for words in rows]
        margins = [[-1] * len(words) for words in rows]
        for row, words, numbers in zip(encoded["row"][:], encoded["word"][:], best):
            for place, word in enumerate(words):
                margin = min(place, len(words) - 1 - place)
                if word >= 0 and margin > margins[row][word]:
                    tags[row][word], margins[row][word] = self.labels[int(numbers[place])], margin
        return tags

    def references(self, split: str) -> list[list[str]]:
        return [[self.labels[number] for number in row] for row in self.splits[split]["tags"][:]]

    def score(self, split: str, encoded: Dataset, logits: np.ndarray) -> dict[str, float]:
        found = self.predictions(split, encoded, logits)
        values = TagMetric(self.entities).compute(predictions=found, references=self.references(split))
        return values | {"score": values["f1" if self.entities else "accuracy"]}

    def describe(self, split: str, encoded: Dataset, logits: np.ndarray, folder: Path) -> list[str]:
        found, right = self.predictions(split, encoded, logits), self.references(split)
        flat = [[tag for row in rows for tag in row] for rows in (right, found)]
        # For entities, too, the picture counts words by their type, wherever the entity begins.
        kind = (lambda tag: tag.partition("-")[2] or tag) if self.entities else (lambda tag: tag)
        names = list(dict.fromkeys(map(kind, self.labels)))
        counts = confusion_matrix(*([kind(tag) for tag in tags] for tags in flat), labels=names)
        picture = plot_confusion(folder / f"confusion_{split}.png", counts, names)
        if self.entities:
            head = ["Entity", "Precision", "Recall", "F1", "Entities"]
            return [*markdown_table(head, entities_of(found, right)), "", *picture]
        counted = precision_recall_fscore_support(*flat, labels=self.labels, average=None, zero_division=0)
        rows = [
            [tag, *(f"{100 * part:.1f}" for part in parts[:3]), parts[3]] for tag, *parts in zip(self.labels, *counted)
        ]
        return [*markdown_table(["Tag", "Precision", "Recall", "F1", "Words"], rows), "", *picture]


def named_tags(table: Dataset, column: str, split: str, names: Sequence[str] = ()) -> list[list[str]]:
    """The tags of all rows by name.

    Args:
        names: the names of tags that are bare numbers.
    """
    where = f"The split {split}: {column!r}"
    if (feature := getattr(table.features[column], "feature", None)) is None:
        raise ValueError(f"{where} holds {table.features[column]}; it must hold lists of tags.")
    kind, rows = str(getattr(feature, "dtype", feature)), table[column][:]
    # Numbers would become labels called 0 and 3, which are no entities, so seqeval would never score them.
    bare = not isinstance(feature, ClassLabel) and kind.startswith(("int", "uint"))
    if not bare and names:
        raise ValueError(f"`tag_names` is given, but {column!r} of the split {split} already has names: leave it out.")
    if not bare and not isinstance(feature, ClassLabel) and kind not in ("string", "large_string", "null"):
        raise ValueError(f"{where} holds lists of {kind}; tags must be texts, or numbers whose names are known.")
    for number, row in zip(row_numbers(table), rows):
        if row is None or any(tag in (None, "") or (isinstance(tag, int) and tag < 0) for tag in row):
            raise ValueError(
                f"The split {split}, row {number:,} has a word without a tag: {row!r:.80}. Give it one"
                f"{or_leave_out(split)}."
            )
    if bare:
        used = sorted({tag for row in rows for tag in row})
        if not names:
            raise ValueError(
                f"{where} holds the numbers {', '.join(map(str, used[:8]))}{', ...' if len(used) > 8 else ''}, and "
                "nothing says which tags they are. Set `tag_names` to the names of 0, 1, 2, ... in order, such as "
                "[O, B-PER, I-PER], or give the tags as texts."
            )
        if used and used[-1] >= len(names):
            raise ValueError(
                f"{where} has the tag {used[-1]}, but `tag_names` has only {len(names)} names, from 0 on: add it."
            )
    naming = names.__getitem__ if bare else feature.int2str if isinstance(feature, ClassLabel) else str
    return [[naming(tag) for tag in row] for row in rows]


def check_rows(split: str, numbers: Sequence[int], words: list, tags: list[list[str]]) -> None:
    """Refuse rows without words, and rows that have another number of tags than of words."""
    for number, row, of_row in zip(numbers, words, tags):
        if not isinstance(row, list) or not row or not all(isinstance(word, str) and word.strip() for word in row):
            raise ValueError(
                f"The split {split}, row {number:,} holds {row!r:.60}; it must be a list of words, none empty."
            )
        if len(row) != len(of_row):
            raise ValueError(
                f"The split {split}, row {number:,} has {len(row)} words and {len(of_row)} tags: {' '.join(row):.60}."
            )


def words_of_pieces(encoded: BatchEncoding, rows: list[int], words: list[list[str]]) -> list[list[int]]:
    """For each piece of each window, the word that begins with it; -1 for all other pieces.

    Args:
        encoded: windows with the character range of each piece.
        rows: the row of each window.
        words: the words of each row.
    """
    starts = [np.cumsum([0, *(len(word) + 1 for word in row)])[:-1].tolist() for row in words]
    pieces, first = [], {}
    for window, row in enumerate(rows):
        pieces.append([])
        for place, (start, end) in zip(encoded.sequence_ids(window), encoded["offset_mapping"][window]):
            word = -1
            if place is not None and end > start:
                # The last character decides: the first one may be the space before the word.
                word = bisect_right(starts[row], end - 1) - 1
                if start >= starts[row][word] + len(words[row][word]):
                    word = -1
            pieces[-1].append((word, start))
            first[row, word] = min(start, first.get((row, word), start))
    marked = []
    for row, window in zip(rows, pieces):
        seen, marked_window = set(), []
        for word, start in window:
            begins = word >= 0 and word not in seen and start == first[row, word]
            seen.add(word)
            marked_window.append(word if begins else -1)
        marked.append(marked_window)
    return marked

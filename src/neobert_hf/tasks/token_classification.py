"""Token classification: tags of words, such as entities (BIO) or parts of speech.

The words of a row are joined with spaces into one text, and each piece belongs to the word in which its characters lie.
So every tokenizer makes the pieces that it was trained to make. Given single words, a tokenizer that marks the
beginning of a word by the space before it would treat them as inner parts of words.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from transformers import (
    AutoModelForTokenClassification,
    BatchEncoding,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerBase,
)

from neobert_hf.common.report import markdown_table
from neobert_hf.data import tables
from neobert_hf.data.tables import Reader, Row
from neobert_hf.tasks.plots import plot_confusion
from neobert_hf.tasks.recipe import Task, TaskSettings
from neobert_hf.tasks.rows import Splits, checking, choose_column, count_labels
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

    def columns_read(self, rows: list[Row]) -> list[str]:
        return [choose_column(rows, self.word_column, WORDS, "word_column")]

    def labels_of_rows(self, rows: list[Row]) -> list[set[str]]:
        column = choose_column(rows, self.tag_column, TAGS, "tag_column")
        return [set(tags_of(row, column, self.tag_names)) for row in rows]


# A comment before a sentence, as in MultiCoNER and CoNLL-U: `# id 5239d808 domain=en`. `#` may also be a word.
COMMENT = re.compile(r"#\s*(id|sent_id|text|newdoc|newpar|global\.columns)\b.*=")


def read_conll(file: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, list[str]]]:
    """Read one word per line, with an empty line after each sentence: first the word, last the tag, or CoNLL-U.

    In CoNLL-U the tag is the universal part of speech, and the parts of a contraction are separate words.
    """
    universal, words, tags = ".conllu" in file.suffixes, [], []
    for number, line in enumerate(chain(tables.read_lines(file), [""]), 1):
        line = line.rstrip("\r\n")
        # Between tabs a word may contain spaces. No-break spaces, as in 10 000, never separate words.
        if universal:
            cells = line.split("\t")
        else:
            cells = [cell.strip(" ") for cell in re.split("\t" if "\t" in line else " +", line.strip(" \t"))]
        if not line.strip() or cells[0] == "-DOCSTART-":
            if words:
                yield {"tokens": words, "tags": tags}
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


READERS: Mapping[str, Reader] = {
    **tables.READERS,
    **dict.fromkeys((".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt"), read_conll),
}


class TokenClassification(Task):
    """See `Task`. The columns are `words`, lists of texts, and `tags`, lists of numbers."""

    kind = "token-classification"
    auto_class = AutoModelForTokenClassification

    def __init__(self, settings: TokenClassificationSettings, splits: Splits):
        (words,) = settings.columns_read(splits["train"])
        tags = choose_column(splits["train"], settings.tag_column, TAGS, "tag_column")
        print(f"columns: words {words}, tags {tags} (settings can name others)", flush=True)
        named = {}
        for split, rows in splits.items():
            with checking(split):
                named[split] = [tags_of(row, tags, settings.tag_names) for row in rows]
                for row, of_row in zip(rows, named[split]):
                    _check_words(row, words, of_row)
        counts = count_labels(named, splits, "tag")
        self.labels = sorted(counts, key=lambda tag: (tag != "O", tag))
        self.entities = is_entity_scheme(self.labels)
        # The tag of words that become no piece.
        self.fallback = "O" if "O" in counts else counts.most_common(1)[0][0]
        ids = {tag: number for number, tag in enumerate(self.labels)}
        self.splits = DatasetDict()
        for split, rows in splits.items():
            numbers = [[ids[tag] for tag in of_row] for of_row in named[split]]
            self.splits[split] = Dataset.from_dict({"words": [row.cells[words] for row in rows], "tags": numbers})

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


def tags_of(row: Row, column: str, names: Sequence[str] | None) -> list[str]:
    """The tags of a row by name.

    Args:
        names: the names of tags that are bare numbers: these would become labels called 0 and 3, which are no entities,
            so seqeval would never score them.
    """
    tags, numbers = row.labels(column), row.cells[column]
    bare = bool(numbers) and all(isinstance(tag, int) for tag in numbers)
    if not bare and names and numbers:
        raise ValueError(f"`tag_names` is given, but {column!r} has names already ({row.place}): leave it out.")
    if any(isinstance(tag, float) for tag in numbers):
        raise ValueError(f"{row.place}: {column!r} is {numbers!r:.60}; tags must be texts, or numbers with names.")
    if not bare:
        return tags
    if not names:
        raise ValueError(
            f"{row.place}: {column!r} holds numbers, {numbers!r:.60}, and nothing says which tags they are. Set "
            "`tag_names` to the names of 0, 1, 2, ... in order, such as [O, B-PER, I-PER], or give the tags as texts."
        )
    if unknown := [tag for tag in numbers if not 0 <= tag < len(names)]:
        raise ValueError(
            f"{row.place} has the tag {unknown[0]} in {column!r}, but `tag_names` has only {len(names)} names, from 0 "
            "on: add it."
        )
    return [names[tag] for tag in numbers]


def _check_words(row: Row, column: str, tags: list[str]) -> None:
    """Refuse a row without words, or with another number of tags than of words."""
    words = row.cell(column)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError(f"{row.place}: {column!r} is {words!r:.60}; it must be a list of words, none empty.")
    if len(words) != len(tags):
        raise ValueError(f"{row.place} has {len(words)} words and {len(tags)} tags: {' '.join(words):.60}.")


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

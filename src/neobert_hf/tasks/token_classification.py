"""Token classification: tags of words, such as entities (BIO) or parts of speech.

The words of a row are joined with spaces into one text, and each piece belongs to the word in which its characters lie.
So every tokenizer makes the pieces that it was trained to make. Given single words, a tokenizer that marks the
beginning of a word by the space before it would treat them as inner parts of words.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.metrics import classification_report
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, PreTrainedTokenizerBase

from neobert_hf.common.recipe import Result, recipe
from neobert_hf.data.rows import Row, list_as_text
from neobert_hf.tasks.pieces import first_with_piece, windows_of_rows
from neobert_hf.tasks.recipe import train_on_task
from neobert_hf.tasks.rows import (
    Splits,
    check_columns,
    choose_column,
    count_labels,
    parse_splits,
    spelled_alike,
)
from neobert_hf.tasks.task import OwnTask, TaskSettings, shortened
from neobert_hf.tasks.words import READERS, join_words, standard_tags, words_of_spans
from neobert_hf.training.fine_tuning import FineTuningArguments


WORDS = ("tokens", "words", "form", "word", "token", "text")
TAGS = "ner_tags tags labels pos_tags upos pos ner chunk_tags label tag entities spans".split()
SENTENCES = ("sentence #", "sentence_id", "sentence_number", "sent_id", "sentence", "sent")
IGNORED = -100


@dataclass
class TokenClassificationSettings(TaskSettings):
    """Which columns are used."""

    word_column: str | None = field(
        default=None, metadata={"help": "lists of words, single words, or texts that have spans; guessed if unset"}
    )
    tag_column: str | None = field(
        default=None, metadata={"help": "their tags, or [start, end, label] of spans; guessed if unset"}
    )
    sentence_column: str | None = field(
        default=None, metadata={"help": "the number of the sentence, if each row has one word; guessed if unset"}
    )
    tag_names: list[str] | None = field(
        default=None, metadata={"help": "if tags are bare numbers: the names of 0, 1, 2, ... in order"}
    )


@recipe
def tag(settings: TokenClassificationSettings, arguments: FineTuningArguments) -> Result:
    """Fine-tune any encoder to tag words: names of entities, parts of speech.

    The data are CoNLL or CoNLL-U files, Parquet, JSON lines or a table with lists of words and tags, with one word a
    row, or with spans of texts (doccano, Label Studio), or a Hub dataset. Entities (tags such as B-PER) are scored by
    seqeval, other tags by accuracy. For resuming and `output_dir` see `classify`; the baseline gives every word its
    commonest tag.

    Returns:
        The model's folder; `scores` and those of the `baseline`, by split and metric.
    """
    return train_on_task("tag", TokenClassification, settings, arguments)


class TokenClassification(OwnTask):
    """See `Task`. The columns are `words`, lists of texts, and `tags`, lists of names."""

    kind = "token-classification"
    title = "Tags of words"
    auto_class = AutoModelForTokenClassification
    collator_class = DataCollatorForTokenClassification
    readers = READERS
    baseline_name = "each word's commonest tag"

    def __init__(self, settings: TokenClassificationSettings, splits: Splits):
        columns = list(splits["train"][0].cells)
        words = choose_column(columns, settings.word_column, WORDS, "word_column")
        tags = choose_column(columns, settings.tag_column, TAGS, "tag_column")
        print(f"columns: words in {words!r}, tags in {tags!r} (settings can name others)", flush=True)
        check_columns(splits, {words: "word_column", tags: "tag_column"})
        splits = as_lists(splits, words, tags, settings.sentence_column)
        self.tables = parse_splits(
            splits,
            lambda row: words_and_tags(row, words, tags, settings.tag_names),
            settings.validation_share,
            ["words"],
            ["words"],
            "tags",
        )
        if spelling := standard_tags(chain(*self.tables["train"]["tags"][:])):
            print(f"tags are read in the usual spelling: {', '.join(map(' as '.join, sorted(spelling.items())))}")
            self.tables = self.tables.map(lambda row: {"tags": [spelling.get(tag, tag) for tag in row["tags"]]})
        self.tables = spelled_alike(self.tables, "tags", "tag")
        self.labels = count_labels(self.tables, "tags", "tag")
        self.entities = is_entity_scheme(self.labels)
        if not self.entities and {"O", "o"} & set(self.labels):
            print("these are no tags such as B-PER, I-PER and O: the accuracy of words is scored, not whole entities")
        # The tag of words that become no piece, or that the baseline has not seen.
        self.fallback = Counter(chain(*self.tables["train"]["tags"][:])).most_common(1)[0][0]

    def purpose(self) -> str:
        return f"This model tags the words of a text with one of {len(self.labels):,} tags: {shortened(self.labels)}."

    def example(self, name: str) -> list[str]:
        # In training the first piece of a word has its tag.
        return super().example(f'{name}, aggregation_strategy="first"' if self.entities else name)

    def encode(self, rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
        """Windows of at most `max_length` pieces, with `labels`, `row`, and in `word` the word that begins there.

        The first piece of a word has the word's tag, as in Transformers' own example and the paper of BERT.
        """
        # With padding at the end, a piece has the same position in its window and in the logits of the batch.
        tokenizer.padding_side = "right"
        classes = {tag: number for number, tag in enumerate(self.labels)}

        def windows(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            encoded = tokenizer(
                [" ".join(words) for words in batch["words"]],
                truncation=True,
                max_length=max_length,
                # So that every word has context on both sides in one of its windows.
                stride=max_length // 4,
                return_overflowing_tokens=True,
            )
            columns = {"labels": [], "word": [], "row": []}
            for row, of_row in windows_of_rows(encoded).items():
                begins, start = {}, 0
                for number, word in enumerate(batch["words"][row]):
                    # A word may begin with characters that have no piece, or have none at all.
                    begins[number] = first_with_piece(encoded, of_row, range(start, start + len(word)))
                    start += len(word) + 1
                for window in of_row:
                    word_of = [-1] * len(encoded["input_ids"][window])
                    for number, begin in begins.items():
                        # None if the word is in another window.
                        if begin is not None and (piece := encoded.char_to_token(window, begin)) is not None:
                            word_of[piece] = number
                    tags = batch["tags"][row]
                    columns["labels"].append([classes[tags[word]] if word >= 0 else IGNORED for word in word_of])
                    columns["word"].append(word_of)
                    columns["row"].append(numbers[row])
            del encoded["overflow_to_sample_mapping"]
            return {**encoded, **columns}

        found = rows.map(windows, with_indices=True, batched=True, remove_columns=rows.column_names, desc="tokenizing")
        with_piece = {pair for row, words in zip(found["row"][:], found["word"][:]) for pair in product([row], words)}
        lost = [
            (row, number)
            for row, words in enumerate(rows["words"][:])
            for number in range(len(words))
            if (row, number) not in with_piece
        ]
        if lost:
            row, number = lost[0]
            print(
                f"{len(lost):,} words have no piece of the tokenizer, such as {rows['words'][row][number]!r} in "
                f"{rows['place'][row]}: they are not learned, and get the commonest tag."
            )
        return found

    @staticmethod
    def reduce_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The best tag of each piece: all logits would fill the memory."""
        return logits.argmax(-1)

    def predict(self, rows: Dataset, inputs: Dataset, logits: np.ndarray) -> list[list[str]]:
        """The tag of every word, from the window in which the word is furthest from the ends."""
        tags = [[self.fallback] * len(words) for words in rows["words"][:]]
        margins = [[-1] * len(of_row) for of_row in tags]
        for row, words, best in zip(inputs["row"][:], inputs["word"][:], logits):
            for place, word in enumerate(words):
                margin = min(place, len(words) - 1 - place)
                if word >= 0 and margin > margins[row][word]:
                    tags[row][word], margins[row][word] = self.labels[int(best[place])], margin
        return tags

    def baseline(self, rows: Dataset) -> list[list[str]]:
        """Every word gets the tag that it has most often in training."""
        counts: dict[str, Counter] = {}
        train = self.tables["train"]
        for words, tags in zip(train["words"][:], train["tags"][:]):
            for word, tag in zip(words, tags):
                counts.setdefault(word, Counter())[tag] += 1
        commonest = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
        return [[commonest.get(word, self.fallback) for word in words] for words in rows["words"][:]]

    def metrics(self, rows: Dataset, found: list[list[str]]) -> dict[str, float]:
        return tag_scores(found, rows["tags"][:], self.entities)

    def label_report(self, rows: Dataset, found: list[list[str]]) -> str:
        right = rows["tags"][:]
        if self.entities:
            from seqeval.metrics import classification_report as entity_report

            return entity_report(to_iobes(right), to_iobes(found), digits=3, zero_division=0)
        return classification_report([*chain(*right)], [*chain(*found)], digits=3, zero_division=0)

    def errors(self, rows: Dataset, found: list[list[str]], logits: np.ndarray) -> list[tuple[float, str, str, str]]:
        """The number of words with a wrong tag, and these words with their tags."""
        errors = []
        for words, right, tags in zip(rows["words"][:], rows["tags"][:], found):
            wrong = [place for place in range(len(words)) if right[place] != tags[place]]
            shown = [", ".join(f"{words[place]} {some[place]}" for place in wrong) for some in (right, tags)]
            errors.append((len(wrong), *shown, " ".join(words)))
        return errors


def as_lists(splits: Splits, words: str, tags: str, sentence: str | None) -> Splits:
    """Rows that hold lists of words and tags, of such rows, of rows with one word each, or of texts with spans.

    Args:
        words, tags: the columns.
        sentence: the column that numbers the sentences, if one is named.
    """
    cells = splits["train"][0].cells
    if not isinstance(cells[words], str) or list_as_text([cells[words]]):
        return splits
    if isinstance(cells[tags], list):
        print(f"{words!r} holds texts and {tags!r} spans: the words of spans are tagged B- and I-, all others O")
        return {split: [words_of_spans(row, words, tags) for row in rows] for split, rows in splits.items()}
    try:
        sentence = choose_column(list(cells), sentence, SENTENCES, "sentence_column")
    except ValueError as error:
        raise ValueError(
            f"{words!r} holds {cells[words]!r:.40}, which is no list of words, as JSON lines can hold it. If each row "
            f"has one word, the number of its sentence is needed: {error}"
        ) from error
    print(f"each row has one word; {sentence!r} numbers the sentences", flush=True)
    return {split: join_words(rows, (words, tags), sentence) for split, rows in splits.items()}


def words_and_tags(row: Row, words: str, tags: str, names: Sequence[str] | None) -> dict[str, Any]:
    """The words of a row and the names of their tags.

    Args:
        words, tags: the columns.
        names: the names of tags that are bare numbers: these would become labels called 0 and 3, which are no entities,
            so seqeval would never score them.
    """
    cell, numbers, found = row.cell(words), row.cell(tags), row.labels(tags)
    # Words without a width, such as a zero-width space, do occur in published data.
    if not isinstance(cell, list) or not cell or not all(isinstance(word, str) and word.strip() for word in cell):
        raise ValueError(f"{row.place}: {words!r} is {cell!r:.60}; it must be a list of words, none empty.")
    if len(cell) != len(found):
        raise ValueError(f"{row.place} has {len(cell)} words and {len(found)} tags: {' '.join(cell):.60}.")
    bare = all(isinstance(tag, (int, float)) for tag in numbers)
    if bare == (names is None):
        raise ValueError(
            f"{row.place}: {tags!r} holds {numbers!r:.60}. Numbers need `tag_names`, the names of 0, 1, 2, ... in "
            "order, such as O B-PER I-PER; names must not have it."
        )
    if names is None:
        return {"words": cell, "tags": found}
    if unknown := [tag for tag in numbers if tag not in range(len(names))]:
        raise ValueError(f"{row.place} has the tag {unknown[0]} in {tags!r}, but `tag_names` has {len(names)} names.")
    return {"words": cell, "tags": [names[int(tag)] for tag in numbers]}


def is_entity_scheme(tags: list[str]) -> bool:
    """Whether tags mark words in entities: `B-PER`, `I-PER`, `O`, also with the letters of IOBES and BILOU."""
    return any("-" in tag for tag in tags) and all(re.fullmatch(r"O|[BIESLU]-.+", tag) for tag in tags)


def to_iobes(rows: list[list[str]]) -> list[list[str]]:
    """Replace BILOU's letters `L` (last word of an entity) and `U` (one-word entity) by `E` and `S`, as in seqeval."""
    return [[re.sub("^L-", "E-", re.sub("^U-", "S-", tag)) for tag in row] for row in rows]


def tag_scores(found: list[list[str]], right: list[list[str]], entities: bool) -> dict[str, float]:
    """Accuracy over words and, for entities, F1, precision and recall of whole entities as in `conlleval`.

    Example:

    ```python
    >>> tag_scores([["B-PER", "O"]], [["B-PER", "O"]], entities=True)["f1"]
    1.0
    ```
    """
    accuracy = {"accuracy": float(np.mean([tag == other for row in zip(found, right) for tag, other in zip(*row)]))}
    if not entities:
        return accuracy
    from seqeval.metrics import f1_score, precision_score, recall_score

    metrics = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
    rows = to_iobes(right), to_iobes(found)
    return {name: float(metric(*rows, zero_division=0)) for name, metric in metrics.items()} | accuracy

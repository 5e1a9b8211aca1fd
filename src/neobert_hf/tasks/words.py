"""Words and their tags in the formats of the trade: CoNLL, CoNLL-U, one word a row, and spans of a text."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neobert_hf.data import readers
from neobert_hf.data.readers import Reader
from neobert_hf.data.rows import Row


# Columns of CoNLL-U, by their places.
CONLLU = {1: "form", 2: "lemma", 3: "upos", 4: "xpos", 5: "feats", 7: "deprel"}
# The lines of a sentence: their numbers in the file, and their cells.
Sentence = list[tuple[int, list[str]]]


# Files


def _sentences(file: Path) -> Iterator[Sentence]:
    """What stands between empty lines."""
    sentence: Sentence = []
    for number, line in enumerate(readers.read_lines(file), 1):
        # Between tabs a word may contain spaces. No-break spaces, as in 10 000, never separate words.
        line = line.strip(" \t\r\n")
        cells = [cell.strip(" ") for cell in re.split("\t" if "\t" in line else " +", line)]
        if line and cells[0] != "-DOCSTART-":
            sentence.append((number, cells))
        elif sentence:
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def read_conll(file: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, list[str]]]:
    """Read one word per line, first the word and last its tag, with an empty line after each sentence.

    A sentence may begin with comments (`# sentence 1`), and its words may be numbered in a column before them.
    """
    sentences = list(_sentences(file))
    lines = [[cells for _, cells in sentence if cells[0][0] != "#"] for sentence in sentences]
    widths, tags = {len(cells) for part in lines for cells in part}, {cells[-1] for part in lines for cells in part}
    numbered = min(widths, default=0) > 2 and all(
        cells[0] == str(number) for part in lines for number, cells in enumerate(part, 1)
    )
    if widths == {10} and all(re.fullmatch(r"\d+([-.]\d+)?", cells[0]) for part in lines for cells in part):
        yield from read_conllu(file)
        return
    for sentence in sentences:
        words = []
        for number, cells in sentence:
            # `#` may also be a word.
            if not words and cells[0][0] == "#" and not (len(cells) in widths and cells[-1] in tags):
                continue
            if len(cells) < 2:
                raise ValueError(f"line {number:,} is {cells[0]!r:.60}; it must have a word and a tag.")
            words.append((cells[numbered], cells[-1]))
        if words:
            yield dict(zip(("tokens", "tags"), map(list, zip(*words))))


def read_conllu(file: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, list[str]]]:
    """Read CoNLL-U: lists of the words (`form`), their `upos` and other columns.

    The words of `vámonos` are `vamos` and `nos`, which have tags, and not the whole (2-3), nor what was left out (8.1).
    """
    for sentence in _sentences(file):
        lines = [(number, cells) for number, cells in sentence if cells[0][0] != "#"]
        if short := [number for number, cells in lines if len(cells) != 10]:
            raise ValueError(f"line {short[0]:,} has not the ten columns of CoNLL-U, separated by tabs.")
        words = [cells for _, cells in lines if cells[0].isdecimal()]
        if words:
            yield {name: [cells[place] for cells in words] for place, name in CONLLU.items()}


READERS: Mapping[str, Reader] = {
    **readers.READERS,
    **dict.fromkeys((".conll", ".bio", ".iob", ".iob2", ".txt"), read_conll),
    ".conllu": read_conllu,
}


# Tables


def join_words(rows: Iterable[Row], columns: Sequence[str], sentence: str) -> list[Row]:
    """Sentences as rows, of rows that hold one word each.

    Args:
        columns: those whose cells become lists.
        sentence: the column that numbers the sentences; empty cells go on with the sentence of the row before.
    """
    sentences, last = [], None
    for row in rows:
        number = row.text_or_none(sentence)
        if not sentences or (number and number != last):
            sentences.append(Row(row.source, row.index, {column: [] for column in columns}))
            last = number
        for column in columns:
            sentences[-1].cells[column].append(row.cell(column))
    return sentences


def words_of_spans(row: Row, text_column: str, span_column: str) -> Row:
    """The words of a text, with tags that say of which spans they are: `B-PER` the first, `I-PER` the others, else `O`.

    Spans are as doccano, Label Studio, spaCy and Prodigy write them: begin, end and label, in a list or by name.
    """
    text, spans = row.text(text_column), sorted(_span(row, span, text_column) for span in row.cell(span_column) or [])
    for (_, end, first), (begin, _, second) in zip(spans, spans[1:]):
        if begin < end:
            raise ValueError(f"{row.place}: the spans {first!r} and {second!r} overlap at {begin}: keep one of them.")
    tags = ["O"] * len(text)
    for begin, end, label in spans:
        tags[begin:end] = [f"B-{label}"] + [f"I-{label}"] * (end - begin - 1)
    # A span may begin or end inside a word.
    places = split_words(text, {place for begin, end, _ in spans for place in (begin, end)})
    # Of a word, the tag is that of its first character.
    found = [(text[begin:end], tags[begin]) for begin, end in places]
    return Row(row.source, row.index, dict(zip((text_column, span_column), map(list, zip(*found)))))


def _span(row: Row, span: Any, text_column: str) -> tuple[int, int, str]:
    """Begin, end and label of a span, without the spaces around it."""
    said = None
    try:
        if isinstance(span, dict):
            begin, end = (span.get(name, span.get(f"{name}_offset")) for name in ("start", "end"))
            label, said = span.get("label") or span["labels"], span.get("text")
        else:
            begin, end, label = span
        (label,) = label if isinstance(label, list) else [label]
        begin, end = int(begin), int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{row.place}: a span is {span!r:.80}; it must have a start, an end and one label, such as [0, 4, 'PER']."
        ) from error
    found = row.text(text_column)[begin:end]
    if not found.strip() or len(found) != end - begin or said not in (None, found):
        raise ValueError(f"{row.place}: the span {span!r:.100} is {found!r:.60} in the text. Correct its places.")
    return begin + len(found) - len(found.lstrip()), end - len(found) + len(found.rstrip()), label


def split_words(text: str, cuts: Iterable[int] = ()) -> list[tuple[int, int]]:
    """Begin and end of each word: what stands between spaces, signs of punctuation, each of which is a word, and cuts.

    Example:

    ```python
    >>> split_words("Hi, Al!")
    [(0, 2), (2, 3), (4, 6), (6, 7)]
    ```
    """
    places, begin = [], None
    for place, character in enumerate(f"{text} "):
        kind = unicodedata.category(character)[0]
        alone = character.isspace() or kind in "PS"
        if begin is not None and (alone or place in cuts):
            places.append((begin, place))
            begin = None
        if alone and not character.isspace():
            places.append((place, place + 1))
        elif not alone and begin is None:
            begin = place
    return places


# Tags


def standard_tags(tags: Iterable[str]) -> dict[str, str]:
    """How tags of entities in another spelling (`B_PER`, `PER-B`, `b-PER`, `o`) are written usually: `B-PER`, `O`.

    Empty if the tags are no such ones, or written as usual.
    """
    tags = set(tags)
    inside = tags - {"O", "o"}
    for pattern in (r"(?P<letter>[BIESLU])[-_](?P<name>.+)", r"(?P<name>.+)[-_](?P<letter>[BIESLU])"):
        found = {tag: re.fullmatch(pattern, tag, re.IGNORECASE) for tag in inside}
        if inside and inside != tags and all(found.values()):
            names = {tag: f"{match['letter'].upper()}-{match['name']}" for tag, match in found.items()}
            names |= {tag: "O" for tag in tags - inside}
            return {tag: name for tag, name in names.items() if tag != name}
    return {}

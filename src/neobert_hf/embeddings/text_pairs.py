"""Pairs of texts that belong together, made from raw text without labels: the data of contrastive pretraining.

Four kinds, each from the structure that documents have anyway:

- `title`: a marked heading (Markdown, reStructuredText) or a short first line, and the paragraph under it;
- `unmarked_title`: a short line and the paragraph under it, in documents whose headings have no marks, such as web
  pages that were saved as text;
- `sentence`: a sentence and the rest of its paragraph (inverse cloze task: Lee et al., arXiv 1906.00300);
- `spans`: two spans of one document that do not overlap (Izacard et al., arXiv 2112.09118).

Code between fences is left out: its comments look like headings, and it has no sentences.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict

from neobert_hf.common.files import check_writable, write_parquet
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.settings import check_numbers
from neobert_hf.data.held_out import is_held_out
from neobert_hf.data.rows import is_empty
from neobert_hf.data.sources import stream_text


# Markdown's `## Title`, and reStructuredText's title with a line of marks under it and perhaps another one above.
HEADING = re.compile(r"#{1,6}\s+(?P<markdown>.+)|(?:([=~^*-])\2{2,} )?(?P<underlined>.+?) ([=~^*\"-])\4{2,}")
# Markdown's headings need no blank line below them, and its blocks of code are not text.
HEADING_LINE = re.compile(r"^#{1,6}[ \t].*$", re.MULTILINE)
FENCED_CODE = re.compile(r"^(```|~~~).*?^\1`*~*[ \t]*$", re.MULTILINE | re.DOTALL)
# A sentence ends with its mark, and the next one begins with a capital letter, a digit or a quotation mark.
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(A-Z0-9])")
# Shorter texts say too little to be told apart from those of other documents.
LEAST_WORDS_OF_TITLE, LEAST_WORDS_OF_SENTENCE, LEAST_WORDS_OF_TEXT = 2, 5, 15
MOST_WORDS_OF_TITLE = 15
# The rest of a text is cut off.
MOST_WORDS = 120
# Of each kind. 64 were no better (benchmarks/NOTES.md).
PAIRS_PER_DOCUMENT = 8
# Titles begin with a capital letter or a number, and do not end like a sentence.
TITLE_BEGINNING = re.compile(r"[A-Z0-9]")
ENDS_OF_SENTENCES = ".!?:;,"


@dataclass
class TextPairSettings:
    """Where raw text comes from, and which pairs are made of it."""

    source: str = field(metadata={"help": "text files, Parquet, JSON lines, or a Hub dataset", "path": "or Hub id"})
    output: str = field(metadata={"help": "Parquet file with the columns query, positive and kind", "path": True})
    column: str = field(default="text", metadata={"help": "name of the column that holds the text"})
    split: str = field(default="train", metadata={"help": "split of a Hub dataset"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    kinds: list[str] = field(
        default_factory=lambda: ["title", "sentence", "spans"], metadata={"help": "kinds of pairs"}
    )
    held_out: float = field(
        default=0.0, metadata={"help": "share of the documents whose pairs go to a second file, OUTPUT_held_out"}
    )

    def __post_init__(self):
        check_numbers(self, {"held_out": "0 or more and below 1"})
        unknown = [kind for kind in self.kinds if kind not in MAKERS]
        if unknown or not self.kinds:
            raise ValueError(f"`kinds` is {self.kinds}; it must name some of {', '.join(MAKERS)}.")
        if not self.output.endswith(".parquet"):
            raise ValueError(f"`output` is {self.output!r}; it must be a file that ends in .parquet.")
        for file in (self.file_of("train"), self.file_of("held_out")):
            if file.exists():
                raise ValueError(f"`output`: {file} exists already: choose another name, or delete it.")

    def file_of(self, part: str) -> Path:
        """`output`, and beside it `OUTPUT_held_out` for what is held out."""
        output = Path(self.output)
        return output if part == "train" else output.with_stem(f"{output.stem}_{part}")


@recipe
def make_pairs(settings: TextPairSettings) -> Result:
    """Make pairs of texts from documents, for training without labels.

    Returns:
        As `output` the file of the pairs, `train`, and `held_out` if a share of the documents is held out.
    """
    # 1. Pairs of all documents
    check_writable(settings.output)
    parts = pairs_of_documents(settings)

    # 2. One file, or one for each part; each file is written completely or not at all
    files = {part: settings.file_of(part) for part in parts}
    for part, pairs in parts.items():
        write_parquet(files[part], pairs)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(pairs["kind"]).items())
        print(f"{files[part]}: {len(pairs):,} pairs ({kinds})", flush=True)
    return Result(output=files)


def pairs_of_documents(settings: TextPairSettings) -> DatasetDict:
    """Make pairs from all documents of a source; the same settings and text give the same pairs.

    Returns:
        Rows of `query`, `positive` and `kind`: `train`, and `held_out` if a share is held out. A query that occurs
        twice is kept once: its second text would be a false negative of the first. Documents are held out as a whole.
        Pairs with a text that also occurs in the other documents, such as a licence at the end of each, are dropped.

    Raises:
        ValueError: if a part has no pair of these kinds. For more, see `stream_text`.
    """
    parts = {"train": [], "held_out": []} if settings.held_out else {"train": []}
    texts, empty = stream_text(settings.source, settings.column, settings.split, settings.subset), 0
    for number, text in enumerate(texts):
        empty += is_empty(text)
        # Each document has a generator of its own, so that adding documents does not change the pairs of earlier ones.
        generator = random.Random(f"0-{number}")
        part = "held_out" if is_held_out(text, settings.held_out) else "train"
        parts[part] += pairs_of_document(text, settings, generator)
    if empty:
        print(f"note: {empty:,} of {number + 1:,} documents have no text in {settings.column!r}.", flush=True)
    found, queries, trained = {part: [] for part in parts}, set(), set()
    # The training part comes first: its texts must be known when held-out pairs are compared with them.
    for part, pairs in parts.items():
        for pair in pairs:
            query, positive = pair["query"].lower(), pair["positive"].lower()
            leaked = part == "held_out" and (query in trained or positive in trained)
            if query not in queries and not leaked:
                found[part].append(pair)
            queries.add(query)
            trained |= {query, positive} if part == "train" else set()
        if not found[part]:
            where = " to hold out: raise `held_out`, or add documents" if part == "held_out" else ""
            raise ValueError(f"The documents give no pair of the kinds {', '.join(settings.kinds)}{where}.")
    return DatasetDict({part: Dataset.from_list(pairs) for part, pairs in found.items()})


def pairs_of_document(text: str, settings: TextPairSettings, generator: random.Random) -> Iterator[dict[str, str]]:
    """The pairs of one document, at most `PAIRS_PER_DOCUMENT` of each kind, drawn at random."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = HEADING_LINE.sub(r"\n\g<0>\n", FENCED_CODE.sub("", text))
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    paragraphs = [part for part in paragraphs if part]
    # A paragraph under a heading does not also give a sentence pair: the two texts would be nearly the same, and each
    # would be a false negative of the other's query.
    kinds_of_titles = [kind for kind in settings.kinds if kind in ("title", "unmarked_title")]
    made = {kind: MAKERS[kind](paragraphs, generator) for kind in kinds_of_titles}
    titled = {body for pairs in made.values() for _, body in pairs}
    untitled = [part for part in paragraphs if part not in titled]
    for kind in settings.kinds:
        if kind not in made:
            made[kind] = MAKERS[kind](untitled if kind == "sentence" else paragraphs, generator)
        pairs = made[kind]
        if len(pairs) > PAIRS_PER_DOCUMENT:
            pairs = generator.sample(pairs, PAIRS_PER_DOCUMENT)
        for pair in pairs:
            query, positive = (" ".join(text.split()[:MOST_WORDS]) for text in pair)
            if query != positive:
                yield {"query": query, "positive": positive, "kind": kind}


def title_pairs(paragraphs: list[str], generator: random.Random) -> list[tuple[str, str]]:
    """Headings, each with the paragraph under it."""
    pairs = []
    for number, (title, body) in enumerate(zip(paragraphs, paragraphs[1:])):
        heading = HEADING.fullmatch(title)
        if heading is None and (number > 0 or title[-1] in ENDS_OF_SENTENCES):
            continue
        if heading is not None:
            title = heading["markdown"] or heading["underlined"]
        if _fit(title, body):
            pairs.append((title, body))
    return pairs


def unmarked_title_pairs(paragraphs: list[str], generator: random.Random) -> list[tuple[str, str]]:
    """Short lines that look like titles, each with the paragraph under it; none if the document marks its headings.

    The first line is not among them: it belongs to `title`.
    """
    if any(HEADING.fullmatch(paragraph) for paragraph in paragraphs):
        return []
    return [
        (title, body)
        for title, body in zip(paragraphs[1:], paragraphs[2:])
        if TITLE_BEGINNING.match(title) and title[-1] not in ENDS_OF_SENTENCES and _fit(title, body)
    ]


def sentence_pairs(paragraphs: list[str], generator: random.Random) -> list[tuple[str, str]]:
    """One sentence of each paragraph, with the paragraph without it."""
    pairs = []
    for paragraph in paragraphs:
        sentences = SENTENCE_END.split(paragraph)
        if len(sentences) < 2:
            continue
        chosen = generator.randrange(len(sentences))
        rest = " ".join(sentences[:chosen] + sentences[chosen + 1 :])
        if _count(sentences[chosen]) >= LEAST_WORDS_OF_SENTENCE and _count(rest) >= LEAST_WORDS_OF_TEXT:
            pairs.append((sentences[chosen], rest))
    return pairs


def span_pairs(paragraphs: list[str], generator: random.Random) -> list[tuple[str, str]]:
    """Neighbouring paragraphs: two spans that do not overlap and are close enough to be about the same thing."""
    long_enough = [part for part in paragraphs if _count(part) >= LEAST_WORDS_OF_TEXT]
    pairs = zip(long_enough[::2], long_enough[1::2])
    return [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs]


MAKERS = {
    "title": title_pairs,
    "unmarked_title": unmarked_title_pairs,
    "sentence": sentence_pairs,
    "spans": span_pairs,
}


def _fit(title: str, body: str) -> bool:
    return LEAST_WORDS_OF_TITLE <= _count(title) <= MOST_WORDS_OF_TITLE and _count(body) >= LEAST_WORDS_OF_TEXT


def _count(text: str) -> int:
    return len(text.split())

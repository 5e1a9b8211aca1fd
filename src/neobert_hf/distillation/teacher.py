"""Texts of many lengths, and what a teacher computes for them.

Nothing but plain text is needed. A document is cut into passages, and each passage gives three texts: itself, one of
its sentences, and a few neighbouring words that stand for a query. Which passages are used follows from a hash of their
words, so it does not depend on the order or the division of the files.

The teacher reads these texts once. Its state of every token and its vector of every text are kept in files of 1,000
texts, so that an interrupted run goes on after the last file. A text of 40 tokens takes 30 kB with a teacher of width
384.
"""

import heapq
import random
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.util import batch_to_device
from tqdm.auto import tqdm
from xxhash import xxh3_64_intdigest

from neobert_hf.common.files import atomic_write
from neobert_hf.common.fingerprints import texts_checksum
from neobert_hf.cpu_neobert import pack_linear_layers
from neobert_hf.data.sources import Source, name_of, stream_text
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.training.arguments import use_fast_bfloat16


# A passage is as many sentences as fit into one of these numbers of characters, which is drawn for each passage. The
# largest is about 250 tokens of English, the most that many teachers read.
PASSAGE_LENGTHS = (120, 350, 1_000)
MOST_QUERY_WORDS = 8
# A blank line ends a sentence, too: titles and the entries of lists often have no full stop.
SENTENCE_END = re.compile(r"\n\s*\n|(?<=[.!?])\s+|(?<=[。！？])")
# Of every 20 passages one is held out to measure on, and no more than this in all.
MOST_HELD_OUT = 100
TEXTS_OF_FILE = 1_000
# Texts that the teacher reads at a time.
BATCHES = {"cpu": 16, "cuda": 256}


class Text(NamedTuple):
    """A text as the teacher reads it: a query gets the teacher's prompt for queries."""

    content: str
    is_query: bool


def passages(document: str) -> Iterator[list[str]]:
    """The passages of a document in order, each as a list of its sentences."""
    draw = random.Random(document)
    passage, size, limit = [], 0, draw.choice(PASSAGE_LENGTHS)
    for part in SENTENCE_END.split(document):
        sentence = " ".join(part.split())
        # A table may have no sentence end at all.
        for piece in textwrap.wrap(sentence, max(PASSAGE_LENGTHS)) if len(sentence) > limit else [sentence]:
            if passage and size + len(piece) > limit:
                yield passage
                passage, size, limit = [], 0, draw.choice(PASSAGE_LENGTHS)
            # Lines, tables and numbers say nothing. Of Hindi, whose vowel signs are no letters, more than half are.
            if 3 * sum(map(str.isalpha, piece)) > len(piece):
                passage.append(piece)
                size += len(piece) + 1
    if passage:
        yield passage


def texts_of(passage: list[str]) -> list[Text]:
    """A passage, one of its sentences unless there is only one, and 1 to 8 neighbouring words of a sentence."""
    whole = " ".join(passage)
    draw = random.Random(whole)
    sentence, words = draw.choice(passage), draw.choice(passage).split()
    start = draw.randrange(len(words))
    query = " ".join(words[start : start + draw.randint(1, MOST_QUERY_WORDS)])
    texts = [Text(whole, False), Text(sentence, False), Text(query, True)]
    return texts if len(passage) > 1 else [texts[0], texts[2]]


def checksum_of(texts: Iterable[Text]) -> str:
    return texts_checksum(f"{text.is_query} {text.content}" for text in texts)


def choose_texts(sources: Sequence[Source], column: str, most_passages: int) -> tuple[list[Text], list[Text]]:
    """The texts to learn from and those that are held out, cut from different passages.

    Args:
        sources: files, patterns, folders, Hub datasets or tables in memory, as for `stream_text`.
        column: the column that holds the text.
        most_passages: how many passages are used; those with the smallest hashes are.

    Raises:
        ValueError: if the sources hold fewer than 20 passages, or as `stream_text`.
    """

    def hashed() -> Iterator[tuple[int, list[str]]]:
        for source in sources:
            for text in stream_text(source, column):
                for passage in passages(text):
                    yield xxh3_64_intdigest(" ".join(passage).encode()), passage

    # A dictionary: the same passage may occur many times.
    chosen = list(dict(heapq.nsmallest(most_passages, hashed())).values())
    if len(chosen) < 20:
        raise ValueError(
            f"{', '.join(map(name_of, sources))} holds {len(chosen)} passages of text in the column {column!r}; it "
            "must hold 20 or more, and some ten thousand to learn well. Name another column, or add texts."
        )
    held_out = min(MOST_HELD_OUT, len(chosen) // 20)
    to_learn, to_measure = (
        [text for passage in some for text in texts_of(passage)] for some in (chosen[held_out:], chosen[:held_out])
    )
    return to_learn, to_measure


def load_teacher(path: str, device: torch.device) -> SentenceTransformer:
    """An embedding model whose first module gives a state for every token, prepared to read fast.

    MiniLM (6 layers x 384) reads 8,000 tokens a second on one core in bfloat16 with packed weights, 5,000 in float32,
    and without packing 6,700 (by autocast) and 2,500.

    Raises:
        ValueError: if it is another kind of model.
    """
    teacher = load_trained_model(path, "teacher").to(device).eval()
    if not isinstance(teacher[0], Transformer):
        raise ValueError(
            f"`teacher` is {path!r}, which begins with {type(teacher[0]).__name__}; it must begin with a Transformers "
            "encoder, whose token states the student learns."
        )
    use_fast_bfloat16(teacher.float(), device)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        pack_linear_layers(teacher)
    return teacher


@dataclass
class Targets:
    """Texts, and what the teacher computed for them, which the student learns.

    Args:
        files: the tensors of each file: `ids` (tokens,) and `lengths` (texts,), int32; `states` (tokens, width),
            float16; `vectors` (texts, dimensions), float32. They are mapped into memory, so they are read when used.

    Attributes:
        lengths: tokens of each text, with prompt and special tokens.
    """

    texts: list[Text]
    files: list[dict[str, torch.Tensor]]

    def __post_init__(self):
        self.lengths = np.concatenate([file["lengths"].numpy() for file in self.files])
        self._starts = [np.cumsum(file["lengths"].numpy()) - file["lengths"].numpy() for file in self.files]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Number, token ids, token states and vector of a text."""
        file, row = divmod(number, TEXTS_OF_FILE)
        start = self._starts[file][row]
        tokens = slice(start, start + self.lengths[number])
        tensors = self.files[file]
        return number, tensors["ids"][tokens], tensors["states"][tokens], tensors["vectors"][row]


def compute_targets(teacher: SentenceTransformer, fingerprint: str, texts: list[Text], folder: Path) -> Targets:
    """Let the teacher read the texts that no file in the folder holds yet.

    Args:
        fingerprint: of the teacher. A file of another teacher or of other texts is written anew.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, bar = [], tqdm(total=len(texts), unit=" texts", desc="the teacher reads")
    for start in range(0, len(texts), TEXTS_OF_FILE):
        file = folder / f"{start // TEXTS_OF_FILE:05}.safetensors"
        part = texts[start : start + TEXTS_OF_FILE]
        identity = {"teacher": fingerprint, "texts": checksum_of(part)}
        stored = None
        if file.exists():
            with safe_open(file, framework="pt") as opened:
                stored = opened.metadata()
        if stored == identity:
            # Without this, the time left would be that of a teacher who reads such texts in no time. A bar that is
            # disabled (TQDM_DISABLE) has no `initial`.
            if not bar.disable:
                bar.initial += len(part)
            bar.update(len(part))
        else:
            with atomic_write(file) as partial:
                save_file(_read(teacher, part, bar), partial, metadata=identity)
        files.append(load_file(file))
    bar.close()
    return Targets(texts, files)


@torch.inference_mode()
def _read(teacher: SentenceTransformer, texts: list[Text], bar: tqdm) -> dict[str, torch.Tensor]:
    """The tensors of a file, see `Targets`."""
    found: list[tuple] = [()] * len(texts)
    for kind in ("query", "document"):
        rows = [row for row, text in enumerate(texts) if text.is_query == (kind == "query")]
        rows.sort(key=lambda row: -len(texts[row].content))
        size = BATCHES.get(teacher.device.type, BATCHES["cpu"])
        for batch in (rows[start : start + size] for start in range(0, len(rows), size)):
            features = teacher.preprocess([texts[row].content for row in batch], prompt=prompt_of(teacher, kind))
            outputs = teacher(batch_to_device(features, teacher.device))
            mask, vectors = outputs["attention_mask"].bool(), outputs["sentence_embedding"].float().cpu()
            ids, states = outputs["input_ids"][mask].int().cpu(), outputs["token_embeddings"][mask].half().cpu()
            if not (states.isfinite().all() and vectors.isfinite().all()):
                first = texts[batch[0]].content[:80]
                raise FloatingPointError(f"The teacher's numbers are not finite for texts such as {first!r}.")
            lengths = mask.sum(1).tolist()
            for row, *tensors in zip(batch, ids.split(lengths), states.split(lengths), vectors):
                found[row] = tuple(tensors)
            bar.update(len(batch))
    ids, states, vectors = zip(*found)
    lengths = torch.tensor([len(each) for each in ids], dtype=torch.int32)
    return {"ids": torch.cat(ids), "lengths": lengths, "states": torch.cat(states), "vectors": torch.stack(vectors)}


@torch.inference_mode()
def states_alone(teacher: SentenceTransformer, ids: Sequence[int]) -> torch.Tensor:
    """The teacher's state of each of these tokens in a text of nothing else: (ids, width), float32."""
    special = teacher.tokenizer("")["input_ids"]
    before, after = special[:1], special[1:]
    found = []
    for start in range(0, len(ids), 512):
        rows = torch.tensor([[*before, number, *after] for number in ids[start : start + 512]], device=teacher.device)
        inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        found.append(teacher[0](inputs)["token_embeddings"][:, len(before)].float().cpu())
    return torch.cat(found)

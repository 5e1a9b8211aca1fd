"""Which rows of a corpus to leave out: exact duplicates, near-duplicates, and texts that evaluations are made of.

Near-duplicates are found with MinHash (Broder, 1997) and banding, as for RefinedWeb (Penedo et al., 2023, arXiv
2306.01116): texts that share a band of their signatures are linked, and of each connected group the first row, by file
and row, stays. A text that shares 13 words in a row with an evaluation text is contaminated (Brown et al., 2020, arXiv
2005.14165). Signatures are made in parts, so that any number of workers gives the same rows.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from rensa import RMinHash
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from neobert_hf.common.files import absolute, write_whole
from neobert_hf.common.fingerprints import fingerprint
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import identity_of, output_folder
from neobert_hf.common.settings import check_numbers
from neobert_hf.data.parts import Part, do_parts, plan_parts, read_part, read_texts, sizes_of
from neobert_hf.data.preparing import REMOVED


# Chinese and Japanese have no spaces: each of their characters counts as a word.
WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{WITHOUT_SPACES}]|[^\W{WITHOUT_SPACES}]+")
# Two texts are compared by their runs of this many words.
SHINGLE = 5
# A text is contaminated if it shares a run of this many words with an evaluation text.
CONTAMINATING = 13
# What happens to a row.
STATES = KEPT, EXACT, NEAR, CONTAMINATED = "kept", "exact", "near", "contaminated"


@dataclass
class DuplicateSettings:
    """What counts as a duplicate."""

    column: str = field(default="text", metadata={"help": "column that holds the text"})
    bands: int = field(default=16, metadata={"help": "texts that agree in one of these bands are near-duplicates"})
    rows_per_band: int = field(
        default=8, metadata={"help": "MinHash values in a band; 16 bands of 8 find texts that share some 70% or more"}
    )


@dataclass(kw_only=True)
class DeduplicateArguments(DuplicateSettings):
    """The corpus, and what works on it."""

    source: list[str] = field(metadata={"help": "files, patterns, folders, URLs, Hub ids", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "where signatures and the texts that stay are written"})
    evaluation: list[str] = field(
        default_factory=list,
        metadata={"help": "files whose texts must not be trained on, with the same column", "path": True},
    )
    rows_per_part: int = field(default=20_000, metadata={"help": "rows that a worker does at a time"})
    workers: int = field(default=1, metadata={"help": "processes on this machine"})
    ray: str | None = field(default=None, metadata={"help": "auto, or the address of a Ray cluster"})

    def __post_init__(self):
        check_numbers(self, dict.fromkeys(("bands", "rows_per_band", "rows_per_part", "workers"), "1 or more"))


@recipe
def deduplicate(settings: DeduplicateArguments) -> Result:
    """Leave out of a corpus what occurs twice, nearly twice, or in evaluation texts. Of the rest the texts are written.

    Sources are Parquet or JSON lines, as files, folders or URLs of fsspec (`hf://`, `s3://`), or ids of Hub datasets.
    CSV and text files are read from the beginning for each part, which suits small corpora. The same rows stay for any
    number of workers, and called again after an interruption it goes on. `texts/removed.json` has how many rows were
    removed, and why; `prepare_data` takes it over into its manifest.

    Returns:
        `output`: the folder or URL of the texts that stay; `scores`: how many rows are in each of `STATES`.
    """
    # 1. A folder that no other run writes
    writes, sources = ("signatures", "texts"), {"source": settings.source, "evaluation": settings.evaluation}
    with output_folder(settings.output_dir, "deduplicate", writes, {}, sources):
        # 2. A plan of parts, and the runs of words in the evaluation texts
        plan, engine = plan_parts(settings.source, settings.rows_per_part), (settings.workers, settings.ray)
        parts = plan_parts(settings.evaluation, settings.rows_per_part)
        evaluation = runs_of(text for part in parts for text in read_texts(part, settings.column) if text)

        # 3. A signature of every row
        of_rows = DuplicateSettings(settings.column, settings.bands, settings.rows_per_band)
        identity = identity_of(of_rows, evaluation=fingerprint(evaluation), sizes=sizes_of(plan))
        signatures, texts = (f"{absolute(settings.output_dir)}/{name}" for name in writes)
        do_parts(plan, partial(sign_part, settings=of_rows, evaluation=evaluation), signatures, identity, *engine)

        # 4. Which rows stay: of each group of duplicates the first, by file and row
        states = find_duplicates([part.path(signatures, "parquet") for part in plan], settings.bands)
        file = f"{signatures}/states.bin"
        write_whole(file, lambda handle: handle.write(states.tobytes()))

        # 5. Their texts
        starts = np.cumsum([0, *(part.rows for part in plan)])
        keep = partial(keep_rows, column=settings.column, states=file, starts=starts)
        records = do_parts(plan, keep, texts, identity, *engine)
        counts = {state: sum(record[state] for record in records) for state in STATES}
        write_whole(f"{texts}/{REMOVED}", lambda handle: handle.write(json.dumps(counts).encode()))
    found = ", ".join(f"{count:,} {state}" for state, count in counts.items())
    print(f"{texts}: {found} of {starts[-1]:,} rows", flush=True)
    return Result(output=texts, scores=counts)


def sign_part(part: Part, settings: DuplicateSettings, evaluation: np.ndarray) -> tuple[pa.Table, dict[str, Any]]:
    """For each row of a part a hash of the text, a hash of each band, and whether it is contaminated.

    Args:
        evaluation: sorted uint64 hashes of the runs of words in evaluation texts, from `runs_of`.
    """
    exact, bands, contaminated = [], [], []
    for text in read_texts(part, settings.column):
        exact.append(xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")))
        signature = RMinHash(num_perm=settings.bands * settings.rows_per_band, seed=0)
        signature.update(_runs(text, SHINGLE))
        values = np.array(signature.digest(), dtype=np.uint32).reshape(settings.bands, settings.rows_per_band)
        bands.append([xxhash.xxh3_64_intdigest(band.tobytes()) for band in values])
        contaminated.append(bool(len(evaluation)) and bool(np.isin(runs_of([text]), evaluation).any()))
    columns = {f"band_{number}": pa.array(list(band), pa.uint64()) for number, band in enumerate(zip(*bands))}
    table = pa.table({"exact": pa.array(exact, pa.uint64()), "contaminated": contaminated, **columns})
    return table, {"rows": len(table)}


def runs_of(texts: Iterable[str]) -> np.ndarray:
    """Sorted hashes of all runs of 13 words in these texts, uint64; of a shorter text, of all of it."""
    found = {run for text in texts for run in _runs(text, CONTAMINATING)}
    return np.sort(np.array([xxhash.xxh3_64_intdigest(run.encode()) for run in found], dtype=np.uint64))


def _runs(text: str, length: int) -> list[str]:
    # A text without words, such as a line of dashes, is like none but itself.
    words = WORD.findall(text.lower()) or [text]
    return [" ".join(words[start : start + length]) for start in range(max(1, len(words) - length + 1))]


def find_duplicates(signatures: list[str | Path], bands: int) -> np.ndarray:
    """What happens to each row, in the order of the parts, as uint8 numbers of `STATES`.

    Memory is some 60 bytes a row: one column of the signatures at a time, and the group of each row.

    Args:
        signatures: the files of all parts, in order.
    """
    contaminated = _column(signatures, "contaminated").to_numpy(zero_copy_only=False)
    exact = _first_with_same(_column(signatures, "exact").to_numpy())
    rows = np.arange(len(exact))
    links = [exact]
    for number in range(bands):
        links.append(_first_with_same(_column(signatures, f"band_{number}").to_numpy()))
        # Links within groups that are known already say nothing new: one array of groups is kept, not one a band.
        links = [_smallest_in_group(links)]
    states = np.full(len(exact), STATES.index(KEPT), dtype=np.uint8)
    states[links[0] != rows] = STATES.index(NEAR)
    states[exact != rows] = STATES.index(EXACT)
    states[contaminated] = STATES.index(CONTAMINATED)
    return states


def _column(files: list[str | Path], name: str) -> pa.ChunkedArray:
    chunks = []
    for file in files:
        with fsspec.open(str(file)) as handle:
            chunks += pq.read_table(handle, columns=[name])[name].chunks
    return pa.chunked_array(chunks)


def _first_with_same(values: np.ndarray) -> np.ndarray:
    """For each row the first row with the same value, int64."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse]


def _smallest_in_group(links: list[np.ndarray]) -> np.ndarray:
    """For each row the first row of its group, when each row is linked with one row of each array."""
    rows = np.arange(len(links[0]))
    edges = (np.ones(len(rows) * len(links), dtype=np.int8), (np.tile(rows, len(links)), np.concatenate(links)))
    _, groups = connected_components(coo_array(edges, shape=(len(rows), len(rows))), directed=False)
    return _first_with_same(groups)


def keep_rows(part: Part, column: str, states: str, starts: np.ndarray) -> tuple[pa.Table, dict[str, Any]]:
    """The texts of a part that stay, and how many rows are in each state.

    Args:
        states: path or URL of the file with one byte for each row of the corpus, see `find_duplicates`.
        starts: for each part, which row of the corpus its first is.
    """
    with fsspec.open(states, "rb") as file:
        file.seek(int(starts[part.number]))
        own = np.frombuffer(file.read(part.rows), dtype=np.uint8)
    counts = {state: int((own == number).sum()) for number, state in enumerate(STATES)}
    texts = [row.text_or_none(column) for row in read_part(part, [column])]
    return pa.table({column: pa.array(texts, pa.string())}).filter(pa.array(own == STATES.index(KEPT))), counts

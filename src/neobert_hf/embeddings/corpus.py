"""Vectors of a whole corpus, part by part: one process, every GPU of a machine, or a Ray cluster."""

import math
import multiprocessing
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from sentence_transformers import SentenceTransformer

from neobert_hf.common.files import absolute, write_parquet
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import check_inputs, identity_of, mark_folder
from neobert_hf.common.settings import check_numbers
from neobert_hf.data.parts import Part, do_parts, plan_parts, read_part, sizes_of
from neobert_hf.data.sources import Source, as_dataset, holds_documents, is_table, list_of
from neobert_hf.embeddings.models import check_finite, load_embedding_model, note_on_untrained


# Texts are sorted by length among those of so many batches. The sets begin at the same rows of a file whatever the size
# of the parts, so that vectors are the same to the bit: a product of matrices rounds a row by the rows beside it.
SORTED_BATCHES = 32
# What is written to `output_dir`.
WRITES = ("part-*", "table-*.parquet")


@dataclass
class CorpusSettings:
    """The model, and what else the vectors depend on."""

    model: str = field(metadata={"help": "embedding model", "path": "or Hub id"})
    column: str = field(default="text", metadata={"help": "column that holds the text"})
    id_column: str | None = field(
        default=None, metadata={"help": "column that is kept beside the vectors; of text files, the path as `file`"}
    )
    max_length: int | None = field(default=None, metadata={"help": "tokens; the model's own limit if unset"})
    batch_size: int = field(default=32, metadata={"help": "texts computed at a time; padding is not computed"})
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", metadata={"help": "of the encoder"})

    def __post_init__(self):
        check_numbers(self, {"batch_size": "1 or more", "max_length": "1 or more"})

    @property
    def sorted_rows(self) -> int:
        """Rows of a set that is sorted by length. Parts are made of whole sets."""
        return SORTED_BATCHES * self.batch_size


@dataclass
class EmbedSettings:
    """Where texts come from, where vectors go, and who computes them."""

    source: list[str] = field(metadata={"help": "files, patterns, folders, URLs, Hub ids", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder or URL for the vectors"})
    rows_per_part: int = field(
        default=8192, metadata={"help": "rows that a worker does at a time, in whole 32 batches"}
    )
    workers: int = field(default=1, metadata={"help": "processes on this machine; with GPUs, one for each"})
    ray: str | None = field(default=None, metadata={"help": "auto, or the address of a Ray cluster"})
    gpus: bool = field(default=False, metadata={"help": "with ray: each worker has a GPU"})

    def __post_init__(self):
        self.source = list_of(self.source)
        check_numbers(self, {"rows_per_part": "1 or more", "workers": "1 or more"})


@recipe
def embed(settings: EmbedSettings, corpus: CorpusSettings) -> Result:
    """Store the vectors of a corpus, in one process, on every GPU of a machine or on a Ray cluster.

    Each part of the corpus becomes a Parquet file with the column `vector`, beside `id_column` if there is one, or the
    `file` of each text file. Called again after an interruption, it goes on with the parts that are not done.

    Returns:
        The folder or URL of the vectors as `output`.
    """
    # 1. A plan of parts; workers read a table in memory from a file beside the vectors
    check_model_exists(corpus.model, "model")
    if "://" not in settings.output_dir:
        check_inputs(settings.output_dir, WRITES, {"model": corpus.model}, {"source": settings.source})
    elif any(map(is_table, settings.source)):
        raise ValueError("`source` is a table in memory, and `output_dir` a URL: write the table as Parquet first.")
    mark_folder(settings.output_dir, "embed", WRITES)
    sources = [
        write_table(source, Path(settings.output_dir, f"table-{number}.parquet")) if is_table(source) else source
        for number, source in enumerate(settings.source)
    ]
    plan = plan_parts(sources, math.ceil(settings.rows_per_part / corpus.sorted_rows) * corpus.sorted_rows)
    if Path(corpus.model).is_dir():
        # Workers may run in other folders.
        corpus.model = absolute(corpus.model)
    if note := note_on_untrained(corpus.model):
        print(note, file=sys.stderr)

    # 2. Vectors of each part; what they depend on is stored with them
    identity = identity_of(corpus, model=model_fingerprint(corpus.model), sizes=sizes_of(plan))
    engine = {"workers": settings.workers, "ray": settings.ray, "gpus": settings.gpus}
    records = do_parts(plan, partial(embed_part, settings=corpus), settings.output_dir, identity, **engine)
    rows = sum(record["rows"] for record in records)
    print(f"{rows:,} vectors of {records[0]['dimensions']} numbers in {settings.output_dir}", flush=True)
    return Result(output=settings.output_dir)


def write_table(table: Source, file: Path) -> str:
    """Store a table in memory, and return the path."""
    write_parquet(file, as_dataset(table))
    return str(file)


@cache
def _model(path: str, dtype: str, max_length: int | None) -> SentenceTransformer:
    """The model of this process, loaded once; on a machine with several GPUs each process takes its own."""
    device = None
    if torch.cuda.device_count() > 1:
        # Processes of a pool are numbered from 1.
        number = (multiprocessing.current_process()._identity or (1,))[0]
        device = f"cuda:{(number - 1) % torch.cuda.device_count()}"
    return load_embedding_model(path, getattr(torch, dtype), max_length, device=device)


def embed_part(part: Part, settings: CorpusSettings) -> tuple[pa.Table, dict[str, Any]]:
    """The vectors of a part, and their number and size.

    Returns:
        A table with `vector`, a list of float32, beside `id_column` if there is one, or `file` of text files.
    """
    columns = [settings.column, *([settings.id_column] if settings.id_column else [])]
    rows = list(read_part(part, columns))
    texts = [row.text_or_none(settings.column) or "" for row in rows]
    # Read before the vectors are computed: a row may lack the column.
    table = {settings.id_column: [row.cell(settings.id_column) for row in rows]} if settings.id_column else {}
    if not settings.id_column and "://" not in part.file and holds_documents(part.file):
        table["file"] = [row.source for row in rows]
    model = _model(settings.model, settings.dtype, settings.max_length)
    # Sentence Transformers sorts the texts of a call by length, so a batch has texts of about one length.
    sets = [texts[start : start + settings.sorted_rows] for start in range(0, len(texts), settings.sorted_rows)]
    options = {"batch_size": settings.batch_size, "show_progress_bar": False}
    vectors = np.concatenate([model.encode_document(some, **options) for some in sets])
    check_finite(vectors, texts)
    table["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    return pa.table(table), {"rows": len(texts), "dimensions": vectors.shape[1]}

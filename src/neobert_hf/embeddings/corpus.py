"""Vectors of a whole corpus, part by part; see examples/embed.py."""

import multiprocessing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from sentence_transformers import SentenceTransformer

from neobert_hf.data.parts import Part, read_part
from neobert_hf.embeddings.models import check_finite, load_embedding_model


# Texts are sorted by length among those of so many batches. The sets begin at the same rows of a file whatever the size
# of the parts, so that vectors are the same to the bit: a product of matrices rounds a row by the rows beside it.
SORTED_BATCHES = 32


@dataclass
class CorpusSettings:
    """Settings of examples/embed.py that the vectors depend on."""

    model: str = field(metadata={"help": "embedding model", "path": "or Hub id"})
    column: str = field(default="text", metadata={"help": "column that holds the text"})
    id_column: str | None = field(default=None, metadata={"help": "column that is kept beside the vectors"})
    max_length: int | None = field(default=None, metadata={"help": "tokens; the model's own limit if unset"})
    batch_size: int = field(default=32, metadata={"help": "texts computed at a time; padding is not computed"})
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", metadata={"help": "of the encoder"})

    @property
    def sorted_rows(self) -> int:
        """Rows of a set that is sorted by length. Parts are made of whole sets."""
        return SORTED_BATCHES * self.batch_size


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
        A table with `vector`, a list of float32, beside `id_column` if there is one.
    """
    columns = [settings.column, *([settings.id_column] if settings.id_column else [])]
    rows = list(read_part(part, columns))
    texts = [row.text_or_none(settings.column) or "" for row in rows]
    model = _model(settings.model, settings.dtype, settings.max_length)
    # Sentence Transformers sorts the texts of a call by length, so a batch has texts of about one length.
    sets = [texts[start : start + settings.sorted_rows] for start in range(0, len(texts), settings.sorted_rows)]
    options = {"batch_size": settings.batch_size, "show_progress_bar": False}
    vectors = np.concatenate([model.encode_document(some, **options) for some in sets])
    check_finite(vectors, texts)
    table = {settings.id_column: [row.cell(settings.id_column) for row in rows]} if settings.id_column else {}
    table["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    return pa.table(table), {"rows": len(texts), "dimensions": vectors.shape[1]}

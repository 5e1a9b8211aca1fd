"""Semantic search: index documents in a vector database with an embedding model, and query it.

The database is LanceDB in a folder, which needs no server, or a collection of a Weaviate server.
"""

import json
import os
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import fill

import numpy as np
from sentence_transformers import CrossEncoder
from tqdm import tqdm

from neobert_hf.common.files import folder_lock
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import output_folder
from neobert_hf.common.settings import check_numbers
from neobert_hf.embeddings.models import check_reranker
from neobert_hf.embeddings.space import check_student
from neobert_hf.search.documents import Documents, SourceSettings
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.excerpts import find_excerpts
from neobert_hf.search.passages import Passage
from neobert_hf.search.vector_index import Hit, VectorIndex, VectorIndexError, open_index


# Results that a reranker reads unless `rerank` says otherwise.
RERANKED = 50
# What LanceDB's index has in its folder; see `LanceDBIndex`.
WRITES = ("passages.lance", "waiting", "recall.json", "context.safetensors")


@dataclass
class IndexSettings:
    """The index, and the device of the encoder."""

    index: str = field(metadata={"help": "a folder, or the name of a collection if `weaviate_url` is set"})
    weaviate_url: str | None = field(
        default=None, metadata={"help": "URL of a Weaviate server; an API key is read from WEAVIATE_API_KEY"}
    )
    weaviate_grpc_port: int = field(default=50051, metadata={"help": "gRPC port of the same host"})
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest available one if unset"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        self.index = os.path.expanduser(self.index)

    def open(self) -> closing[VectorIndex]:
        return closing(open_index(self.index, self.weaviate_url, self.weaviate_grpc_port))

    def kept(self, embedding: EmbeddingSettings, source: SourceSettings) -> AbstractContextManager:
        """Keep the folder for one run. Weaviate needs no lock: it guards its files, and stores a passage once."""
        if self.weaviate_url is not None:
            return nullcontext()
        inputs, sources = {"model": embedding.model}, {"source": source.source}
        return output_folder(self.index, "index", WRITES, inputs, sources, setting="index")


@dataclass
class QuerySettings:
    """The queries, and how the results are ranked and printed."""

    text: list[str] = field(metadata={"help": "one query or several, each in quotes"})
    top_k: int = field(default=5, metadata={"help": "results to show"})
    every_passage: bool = field(
        default=False, metadata={"help": "show each passage of a document that is found, not only the best"}
    )
    keyword_weight: float = field(
        default=0.0, metadata={"help": "weight of BM25 (shared words) added to the cosine; 0 for the cosine alone"}
    )
    model: str | None = field(
        default=None, metadata={"help": "new folder of the index's model, if it was moved", "path": "or Hub id"}
    )
    query_model: str | None = field(
        default=None,
        metadata={
            "help": "embeds the queries: a model that learned the vectors of the index's model, as of `distil`",
            "path": "or Hub id",
        },
    )
    reranker: str | None = field(
        default=None, metadata={"help": "a cross-encoder that orders what was found anew", "path": "or Hub id"}
    )
    rerank: int | None = field(
        default=None, metadata={"help": "with `reranker`: how many results it reads; 50 if unset"}
    )
    json: bool = field(default=False, metadata={"help": "print one JSON object for each query"})

    def __post_init__(self):
        if not self.text or any(not text.strip() for text in self.text):
            raise ValueError("`text` holds an empty query, or none.")
        check_numbers(self, {"top_k": "1 or more", "rerank": "1 or more", "keyword_weight": "0 or more"})
        if self.rerank is not None and self.reranker is None:
            raise ValueError(f"`rerank` is {self.rerank}, but nothing reranks: name a cross-encoder as `reranker`.")
        if self.model is not None and self.query_model is not None:
            raise ValueError(
                f"`query_model` {self.query_model!r} embeds the queries, so `model` {self.model!r} would not be used: "
                "give one of them."
            )


@dataclass
class RemoveSettings:
    """The source to remove."""

    name: str = field(metadata={"help": "name of a source in the index, as `index` prints it"})


@recipe
def index(place: IndexSettings, embedding: EmbeddingSettings, source: SourceSettings) -> Result:
    """Index documents for a search, also those that changed: files, a Hub dataset, or a table.

    Called again, unchanged documents are not embedded again, and documents that are gone from the source are removed;
    after an interruption it goes on. A source that was moved counts as a new source. The index stores how its vectors
    were made, and refuses another model or other settings.

    Returns:
        The index, as `output`, and in `scores` how many documents were embedded, unchanged, removed or left out.
    """
    with place.kept(embedding, source), place.open() as database:
        check_model_exists(embedding.model, "model")
        if database.identity is not None:
            embedding.check_like(place.index, database.identity)

        # 1. Hashes of all texts show below which of them changed
        documents = Documents(source)

        # 2. The model; if the index exists already, it must be the one that the index was made with
        encoder = PassageEncoder(embedding, place.device, place.trust_remote_code)
        if database.identity is None:
            if encoder.needs_context:
                encoder.use_context(documents.context(encoder))
                database.write_context(encoder.context)
            database.create(encoder.identity)
        join(encoder, place, database)

        # 3. Documents that are gone leave the index
        database.commit()  # What an interrupted run has written.
        gone = documents.compare(database.document_hashes(source.name_in_index))
        database.delete(source.name_in_index, gone)

        # 4. Passages of those that are new or changed, their vectors, and both into the index
        written, changed = 0, int(documents.missing.sum())
        with tqdm(total=changed, desc="embedding", unit=" documents") as bar:
            for passages, replaced in documents.passages(encoder):
                database.write(passages, embed_passages(encoder, passages, source.batch_size, bar), replaced)
                written += len(passages)
        database.commit()
        database.optimize()
        others = [name for name in database.sources() if name != source.name_in_index]
    counts = {"embedded": changed, "passages": written, "unchanged": len(documents.rows) - changed}
    counts |= {"removed": len(gone), "left_out": documents.total - len(documents.rows)}
    print(
        f"{source.name_in_index} in {place.index}: {changed:,} documents embedded ({written:,} passages), "
        f"{counts['unchanged']:,} unchanged, {len(gone):,} removed; {counts['left_out']:,} repeated or empty left out"
    )
    if others:
        print(f"also in {place.index}: {', '.join(others)}")
    return Result(scores=counts, output=place.index)


def join(encoder: PassageEncoder, place: IndexSettings, database: VectorIndex) -> None:
    """Prepare the encoder for the index, and print what the user should know."""
    encoder.join(place.index, database)
    for line in encoder.notes():
        print(line, file=sys.stderr)


def embed_passages(encoder: PassageEncoder, passages: list[Passage], batch_size: int, bar: tqdm) -> np.ndarray:
    """The vectors of passages. The bar, which counts documents, moves with each batch."""
    begun, documents, done = bar.n, sum(passage.number == 0 for passage in passages), 0

    def progress(embedded: int) -> None:
        nonlocal done
        done += embedded
        bar.update(begun + documents * done // len(passages) - bar.n)

    return encoder.embed("document", [passage.text for passage in passages], batch_size, progress)


@recipe
def query(place: IndexSettings, settings: QuerySettings) -> list[list[Hit]]:
    """Search an index: by meaning, and with a `keyword_weight` also by words.

    Each document is found once, with its best passage, of which the sentences nearest to the query are printed. A
    `query_model` that learned the vectors of the index's model answers faster, and a `reranker` orders better.

    Returns:
        For each query its hits, the best first.
    """
    with place.open() as database:
        # 1. The model of the index, or one that learned its vectors, and no other
        check_can_answer(place.index, database)
        encoder = load_encoder(place, settings, database)
        reranker = load_reranker(settings.reranker, place) if settings.reranker else None

        # 2. Search: by vectors (dense), and with a `keyword_weight` also by words (hybrid)
        found = []
        candidates = max(settings.top_k, settings.rerank or RERANKED) if reranker else settings.top_k
        for text, vector in zip(settings.text, encoder.embed("query", settings.text)):
            hits = database.find(text, vector, candidates, settings.keyword_weight, settings.every_passage)

            # 3. What a reranker says of the best ones, which it reads together with the query
            if reranker:
                hits = rerank(reranker, text, hits)[: settings.top_k]
            found.append(hits)
            if settings.json:
                print(json.dumps({"query": text, "hits": [asdict(hit) for hit in hits]}))
            else:
                kind = "score" if settings.keyword_weight or reranker else "cosine"
                print(format_hits(text, hits, find_excerpts(encoder, vector, hits), kind))
    return found


def load_encoder(place: IndexSettings, settings: QuerySettings, database: VectorIndex) -> PassageEncoder:
    """The model of the queries, with the settings of the index."""
    identity = database.identity
    options = place.device, place.trust_remote_code
    if settings.query_model:
        check_model_exists(settings.query_model, "query_model")
        check_student(settings.query_model, identity, f"the index {place.index}")
        # Queries are not cut into passages.
        changes = {"model": settings.query_model, "passage_tokens": None, "overlap": 0}
        return PassageEncoder(replace(EmbeddingSettings.of_index(identity), **changes), *options)
    model = settings.model or identity["model"]
    if os.path.isabs(model) and not os.path.isdir(model):
        raise VectorIndexError(
            f"The model {model} of the index {place.index} is gone: name its new folder with `--model`."
        )
    encoder = PassageEncoder(replace(EmbeddingSettings.of_index(identity), model=model), *options)
    join(encoder, place, database)
    return encoder


def load_reranker(path: str, place: IndexSettings) -> CrossEncoder:
    check_reranker(path, "reranker", place.trust_remote_code)
    return CrossEncoder(path, device=place.device, trust_remote_code=place.trust_remote_code)


def rerank(reranker: CrossEncoder, text: str, hits: list[Hit]) -> list[Hit]:
    """The hits with the scores of a reranker, the best first."""
    scores = reranker.predict([(text, hit.text) for hit in hits], show_progress_bar=False) if hits else []
    scored = [replace(hit, score=float(score)) for hit, score in zip(hits, scores)]
    return sorted(scored, key=lambda hit: -hit.score)


def check_can_answer(name: str, database: VectorIndex) -> None:
    """Refuse an index that does not exist or holds nothing; say so if a part is missing."""
    if database.identity is None:
        raise VectorIndexError(f"There is no index {name}: make it with `neobert-hf index`.")
    if database.is_empty():
        raise VectorIndexError(
            f"The index {name} is empty: indexing was interrupted, or all is removed. Run `index` again."
        )
    if database.is_unfinished():
        print(f"note: {name} is not finished: run the same `index` again for all documents.", file=sys.stderr)


def format_hits(text: str, hits: list[Hit], excerpts: list[str], score: str) -> str:
    """The hits of a query, best first: score, document, number of the passage, and its sentences."""
    lines = [f"{text!r}: {len(hits)} results", f"{score:>7}  document [passage]"]
    for hit, excerpt in zip(hits, excerpts):
        lines.append(f"{hit.score:>7.4f}  {hit.document} [{hit.number + 1} of {hit.count}]")
        lines.append(fill(excerpt, 110, initial_indent=" " * 9, subsequent_indent=" " * 9))
    return "\n".join(lines)


@recipe
def remove(place: IndexSettings, settings: RemoveSettings) -> Result:
    """Remove a source from an index, with all its documents.

    Returns:
        The index, as `output`, and in `scores` how many documents were removed.
    """
    with place.open() as database:
        if database.identity is None:
            raise VectorIndexError(f"There is no index {place.index}.")
        with folder_lock(Path(place.index)) if place.weaviate_url is None else nullcontext():
            database.commit()  # What an interrupted run has written.
            if settings.name not in (names := database.sources()):
                raise VectorIndexError(
                    f"The index {place.index} holds no source {settings.name!r}; it holds {', '.join(names) or 'none'}."
                )
            documents = [document for document, _ in database.document_hashes(settings.name)]
            database.delete(settings.name, documents)
            database.optimize()
    print(f"{settings.name} in {place.index}: {len(documents):,} documents removed")
    return Result(scores={"removed": len(documents)}, output=place.index)

"""Semantic search: index documents in a vector database with an embedding model, and query it.

    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model --source docs
    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model \\
        --source 'corpus/*.parquet' --column body --id_column url
    python examples/semantic_search.py query --index runs/search --text "how is padding removed?"
    python examples/semantic_search.py query --index runs/search --text "ECONNRESET" --keyword_weight 0.5
    python examples/semantic_search.py remove --index runs/search --name /where/docs/were

`-h` after `index`, `query` or `remove` lists the settings of that command. The database is LanceDB in the folder
`--index`, which needs no server. With `--weaviate_url http://localhost:8080` it is a collection in Weaviate, and
`--index` is its name.

Run `index` again when documents have changed: unchanged documents are not embedded again, and documents that are gone
from the source are removed. A source that was moved counts as a new source: `index` prints the names of the other
sources in the index, and `remove` removes one of them. After an interruption, run the same command again to continue.
The index stores how its vectors were made, and refuses another model or other settings.
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.files import folder_lock
from neobert_hf.common.run import check_inputs
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.search.documents import Documents, SourceSettings
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.index import Hit, VectorIndex, VectorIndexError, open_index


@dataclass
class SharedSettings:
    """The index, and the device of the encoder."""

    index: str = field(metadata={"help": "a folder, or the name of a collection if `weaviate_url` is set"})
    weaviate_url: str | None = field(
        default=None, metadata={"help": "URL of a Weaviate server; an API key is read from WEAVIATE_API_KEY"}
    )
    weaviate_grpc_port: int = field(default=50051, metadata={"help": "gRPC port of the same host"})
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest available one if unset"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def lock(self) -> AbstractContextManager:
        """A lock on the folder. Weaviate needs none: it guards its own files, and stores a repeated passage once."""
        return folder_lock(Path(self.index)) if self.weaviate_url is None else nullcontext()

    def open(self) -> closing[VectorIndex]:
        return closing(open_index(self.index, self.weaviate_url, self.weaviate_grpc_port))


@dataclass
class QuerySettings:
    """The queries, and how the results are ranked and printed."""

    text: list[str] = field(metadata={"help": "one query or several, each in quotes"})
    top_k: int = field(default=5, metadata={"help": "passages to show"})
    keyword_weight: float = field(
        default=0.0, metadata={"help": "weight of BM25 (shared words) added to the cosine; 0 for the cosine alone"}
    )
    model: str | None = field(
        default=None, metadata={"help": "new folder of the index's model, if it was moved", "path": "or Hub id"}
    )
    json: bool = field(default=False, metadata={"help": "print one JSON object for each query"})

    def __post_init__(self):
        if any(not text.strip() for text in self.text):
            raise ValueError("`text` holds an empty query.")


@dataclass
class RemoveSettings:
    """The source to remove."""

    name: str = field(metadata={"help": "name of a source in the index, as `index` prints it"})


def index_documents(args: list[str]) -> None:
    shared, embedding, source = parse_config(SharedSettings, EmbeddingSettings, SourceSettings, args=args)
    if shared.weaviate_url is None:
        check_inputs(shared.index, ["*"], {"model": embedding.model}, {"source": source.source}, "index")
    with shared.lock(), shared.open() as index:
        # 1. Hashes of all texts show below which of them changed
        documents = Documents(source)

        # 2. The model; if the index exists already, it must be the one that the index was made with
        encoder = PassageEncoder(embedding, shared.device, shared.trust_remote_code)
        if index.identity is None:
            if encoder.needs_context:
                encoder.use_context(documents.context(encoder))
                index.write_context(encoder.context)
            index.create(encoder.identity)
        encoder.join(shared.index, index)
        for line in encoder.notes():
            print(line, file=sys.stderr)

        # 3. Documents that are gone leave the index
        index.commit()  # What an interrupted run has written.
        gone = documents.compare(index.document_hashes(source.name_in_index))
        index.delete(source.name_in_index, gone)

        # 4. Passages of those that are new or changed, their vectors, and both into the index
        written = 0
        for passages, replaced in documents.passages(encoder):
            vectors = encoder.embed("document", [passage.text for passage in passages], source.batch_size)
            index.write(passages, vectors, replaced)
            written += len(passages)
        index.commit()
        index.optimize()
        others = [name for name in index.sources() if name != source.name_in_index]
    count, changed = len(documents.rows), int(documents.missing.sum())
    print(
        f"{source.name_in_index} in {shared.index}: {changed:,} documents embedded ({written:,} passages), "
        f"{count - changed:,} unchanged, {len(gone):,} removed; {documents.total - count:,} repeated or empty left out"
    )
    if others:
        print(f"also in {shared.index}: {', '.join(others)}")


def answer_queries(args: list[str]) -> None:
    shared, settings = parse_config(SharedSettings, QuerySettings, args=args)
    with shared.open() as index:
        if index.identity is None:
            raise VectorIndexError(f"There is no index {shared.index}: make it with `semantic_search.py index`.")

        # 1. The model of the index, and no other
        model = settings.model or index.identity["model"]
        if os.path.isabs(model) and not os.path.isdir(model):
            raise VectorIndexError(
                f"The model {model} of the index {shared.index} is gone: name its new folder with `--model`."
            )
        embedding = replace(EmbeddingSettings.of_index(index.identity), model=model)
        encoder = PassageEncoder(embedding, shared.device, shared.trust_remote_code)
        encoder.join(shared.index, index)
        for line in encoder.notes():
            print(line, file=sys.stderr)

        # 2. Search: by vectors (dense), and with a `keyword_weight` also by words (hybrid)
        for query, vector in zip(settings.text, encoder.embed("query", settings.text)):
            hits = index.search_hybrid(query, vector, settings.top_k, settings.keyword_weight)
            if settings.json:
                print(json.dumps({"query": query, "hits": [asdict(hit) for hit in hits]}))
            else:
                print(format_hits(query, hits, "score" if settings.keyword_weight else "cosine"))


def remove_source(args: list[str]) -> None:
    shared, settings = parse_config(SharedSettings, RemoveSettings, args=args)
    with shared.lock(), shared.open() as index:
        if index.identity is not None:
            index.commit()  # What an interrupted run has written.
        names = [] if index.identity is None else index.sources()
        if settings.name not in names:
            raise VectorIndexError(
                f"The index {shared.index} holds no source {settings.name!r}; it holds {', '.join(names) or 'none'}."
            )
        documents = [document for document, _ in index.document_hashes(settings.name)]
        index.delete(settings.name, documents)
        index.optimize()
    print(f"{settings.name} in {shared.index}: {len(documents):,} documents removed")


def format_hits(query: str, hits: list[Hit], score: str) -> str:
    """The passages found for a query, best first: score, document, number and beginning of each passage."""
    lines = [f"{query!r}: {len(hits)} passages", f"{score:>7}  document [passage]"]
    for hit in hits:
        lines += [f"{hit.score:>7.4f}  {hit.document} [{hit.number}]", f"{'':>9}{' '.join(hit.text.split())[:110]}"]
    return "\n".join(lines)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    commands = {"index": index_documents, "query": answer_queries, "remove": remove_source}
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands, help="add `-h` for its settings")
    commands[parser.parse_args(args[:1]).command](args[1:])


if __name__ == "__main__":
    run_script(main)

"""Semantic search: put documents into a vector database with an embedding model, and ask it.

    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model --source docs
    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model \\
        --source 'corpus/*.parquet' --column body --id_column url
    python examples/semantic_search.py query --index runs/search --text "how is padding removed?"
    python examples/semantic_search.py query --index runs/search --text "ECONNRESET" --keyword_weight 0.5
    python examples/semantic_search.py remove --index runs/search --name /where/docs/were

`-h` after `index`, `query` or `remove` lists their settings. The database is LanceDB in the folder `--index`, which
needs no server, or with `--weaviate_url http://localhost:8080` a collection of that name in Weaviate.

Run `index` again when documents have changed: those that did not are not embedded again, and those that are gone from
the source are removed. A source that was moved is another one: `index` names those that an index holds, and `remove`
removes one. After an interruption, the same command goes on. The index stores how its vectors were made, and
refuses another model or other settings.
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.locks import folder_lock
from neobert_hf.common.settings import NotNegative, PathOrId, Range, check_ranges, parse_config
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder, join_index
from neobert_hf.search.index import Hit, VectorIndex, VectorIndexError, open_index
from neobert_hf.search.indexing import SourceSettings, update_index


@dataclass
class SharedSettings:
    """Where the index is, and what computes."""

    index: str = field(metadata={"help": "a folder, or with `weaviate_url` the name of a collection"})
    weaviate_url: str | None = field(
        default=None, metadata={"help": "of a Weaviate server; an API key is taken from WEAVIATE_API_KEY"}
    )
    weaviate_grpc_port: Annotated[int, Range(1, 65535)] = field(
        default=50051, metadata={"help": "where the same host answers gRPC"}
    )
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest there is if unset"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        check_ranges(self)

    def lock(self) -> AbstractContextManager:
        """Of the folder. A Weaviate server sees to its own files, and the same passage is the same object there."""
        return folder_lock(Path(self.index)) if self.weaviate_url is None else nullcontext()

    def open(self) -> closing[VectorIndex]:
        return closing(open_index(self.index, self.weaviate_url, self.weaviate_grpc_port))


@dataclass
class QuerySettings:
    """What is asked."""

    text: list[str] = field(metadata={"help": "one query or several, each in quotes"})
    top_k: Annotated[int, Range(1, 10_000)] = field(default=5, metadata={"help": "passages to show"})
    keyword_weight: NotNegative = field(
        default=0.0, metadata={"help": "of BM25, by shared words, beside the cosine; 0: the cosine alone"}
    )
    model: PathOrId | None = field(default=None, metadata={"help": "where the index's model is now, if it was moved"})
    json: bool = field(default=False, metadata={"help": "print one JSON object for each query"})

    def __post_init__(self):
        check_ranges(self)
        if any(not text.strip() for text in self.text):
            raise ValueError("`text` holds an empty query.")


@dataclass
class RemoveSettings:
    """What is removed."""

    name: str = field(metadata={"help": "of a source in the index, as `index` prints it"})


def index_documents(args: list[str]) -> None:
    # 1. Settings and source; that the source can be read is found out before a model is loaded
    shared, embedding, source = parse_config(SharedSettings, EmbeddingSettings, SourceSettings, args=args)
    if shared.weaviate_url is None:
        source.check_apart(shared.index)
    source.stream()
    with shared.lock(), shared.open() as index:
        # 2. The model, which must be that of the index if there is one
        encoder = PassageEncoder(embedding, shared.device, shared.trust_remote_code)
        if index.identity is not None:
            join_index(shared.index, index, encoder)
        for line in encoder.notes():
            print(line, file=sys.stderr)

        # 3. Only what changed is embedded
        update = update_index(index, encoder, source)
        others = [name for name in index.sources() if name != source.name_in_index]
    print(f"{source.name_in_index} in {shared.index}: {update}")
    if others:
        print(f"also in {shared.index}: {', '.join(others)}")


def answer_queries(args: list[str]) -> None:
    # 1. Settings and index
    shared, settings = parse_config(SharedSettings, QuerySettings, args=args)
    with shared.open() as index:
        if index.identity is None:
            raise VectorIndexError(f"There is no index {shared.index}: make it with `semantic_search.py index`.")

        # 2. The model of the index, and no other
        model = settings.model or index.identity["model"]
        if os.path.isabs(model) and not os.path.isdir(model):
            raise VectorIndexError(f"The model {model} of the index {shared.index} is gone: give it by `--model`.")
        embedding = replace(EmbeddingSettings.of_index(index.identity), model=model)
        encoder = PassageEncoder(embedding, shared.device, shared.trust_remote_code)
        join_index(shared.index, index, encoder)

        # 3. Search
        for line in encoder.notes() + encoder.warnings(settings.text):
            print(line, file=sys.stderr)
        for query, vector in zip(settings.text, encoder.embed("query", settings.text)):
            hits = index.search_hybrid(query, vector, settings.top_k, settings.keyword_weight)
            if settings.json:
                print(json.dumps({"query": query, "hits": [asdict(hit) for hit in hits]}))
            else:
                print(format_hits(query, hits, "score" if settings.keyword_weight else "cosine"))


def remove_source(args: list[str]) -> None:
    shared, settings = parse_config(SharedSettings, RemoveSettings, args=args)
    with shared.lock(), shared.open() as index:
        names = [] if index.identity is None else index.sources()
        if settings.name not in names:
            raise VectorIndexError(
                f"The index {shared.index} holds no source {settings.name!r}; it holds {', '.join(names) or 'none'}."
            )
        documents = sorted(index.document_hashes(settings.name))
        index.delete(settings.name, documents)
        index.optimize()
    print(f"{settings.name} in {shared.index}: {len(documents):,} documents removed")


def format_hits(query: str, hits: list[Hit], score: str) -> str:
    """A query's passages, best first: score, document, number of the passage, and its beginning."""
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
    try:
        main()
    except VectorIndexError as error:
        sys.exit(str(error))

"""Semantic search: put documents into a vector database with an embedding model, and ask it.

    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model --source docs
    python examples/semantic_search.py index --index runs/search --model runs/embeddings/model \\
        --source 'corpus/*.parquet' --column body --id_column url
    python examples/semantic_search.py query --index runs/search --text "how is padding removed?"

`-h` after `index` or `query` lists their settings. The database is LanceDB in the folder `--index`, which needs no
server, or with `--weaviate_url http://localhost:8080` a collection of that name in Weaviate.

Run `index` again when documents have changed: those that did not are not embedded again, and those that are gone from
the source are removed. After an interruption, the same command goes on. The index stores how its vectors were made, and
refuses another model or other settings.
"""

import hashlib
import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tqdm import tqdm

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.settings import parse_config
from neobert_hf.common.text_sources import local_files, stream_documents
from neobert_hf.embeddings.inference import check_finite, fingerprint, load_model
from neobert_hf.search.index import Hit, Passage, VectorIndex, VectorIndexError, check_identity, open_index
from neobert_hf.search.passages import split_passages


@dataclass
class Database:
    """Where the index is, and what computes."""

    index: str = field(metadata={"help": "a folder, or with `weaviate_url` the name of a collection"})
    weaviate_url: str | None = field(
        default=None, metadata={"help": "of a Weaviate server; an API key is taken from WEAVIATE_API_KEY"}
    )
    weaviate_grpc_port: int = field(default=50051, metadata={"help": "where the same host answers gRPC"})
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest there is if unset"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


@dataclass
class IndexArguments:
    """What is indexed and how. What the vectors depend on is stored with the index."""

    source: str = field(metadata={"help": "text or Markdown files, Parquet, JSON lines, or a Hub dataset"})
    model: str = field(metadata={"help": "an embedding model, or an encoder, which gets mean pooling: path or Hub id"})
    name: str | None = field(
        default=None,
        metadata={"help": "of the source in the index: what was indexed under it and is gone is removed. Its path"},
    )
    column: str = field(default="text", metadata={"help": "that holds the text, unless the source is text files"})
    id_column: str | None = field(default=None, metadata={"help": "that tells rows apart; a hash of the text if unset"})
    split: str = field(default="train", metadata={"help": "of a Hub dataset"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    passage_tokens: int | None = field(
        default=None, metadata={"help": "longer documents are cut into passages; what the model reads if unset"}
    )
    overlap: int = field(default=32, metadata={"help": "tokens that neighbouring passages share"})
    query_prompt: str | None = field(
        default=None, metadata={"help": "put before queries as it is, so end it with a space; the model's own if unset"}
    )
    document_prompt: str | None = field(default=None, metadata={"help": "put before passages; as `query_prompt`"})
    truncate_dim: int | None = field(default=None, metadata={"help": "dimensions to keep (Matryoshka)"})
    dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="float32", metadata={"help": "of the encoder, for queries as well"}
    )
    batch_size: int = field(default=32, metadata={"help": "passages embedded at once"})
    write_every: int = field(default=1024, metadata={"help": "passages; what an interruption loses"})

    def __post_init__(self):
        for name in ("batch_size", "write_every", "passage_tokens", "truncate_dim"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be 1 or more.")


@dataclass
class QueryArguments:
    """What is asked."""

    text: list[str] = field(metadata={"help": "one query or several, each in quotes"})
    top_k: int = field(default=5, metadata={"help": "passages to show"})
    model: str | None = field(default=None, metadata={"help": "where the index's model is now, if it was moved"})
    json: bool = field(default=False, metadata={"help": "print one JSON object for each query"})

    def __post_init__(self):
        if self.top_k < 1:
            raise ValueError(f"`top_k` is {self.top_k}; it must be 1 or more.")
        if any(not text.strip() for text in self.text):
            raise ValueError("`text` holds an empty query.")


Documents = Callable[[], Iterator[tuple[str | None, str | None]]]


def with_hashes(documents: Documents) -> Iterator[tuple[str, str, str] | None]:
    """Id, hash and text of each document; None for one without text. Without an id, the hash is the id."""
    for document, text in documents():
        if text and text.strip():
            value = hashlib.sha256(text.encode()).hexdigest()[:32]
            yield document or value, value, text
        else:
            yield None


def read_hashes(documents: Documents) -> tuple[dict[str, str], str]:
    """The hash of each document by its id, and a line on what was left out. Texts are not kept.

    Raises:
        ValueError: if an id stands for two texts, or there is no text at all.
    """
    hashes, total, empty = {}, 0, 0
    for found in tqdm(with_hashes(documents), desc="reading", unit=" documents"):
        total += 1
        if found is None:
            empty += 1
            continue
        document, value, _ = found
        if hashes.setdefault(document, value) != value:
            raise ValueError(f"The id {document!r} stands for two texts: name an `id_column` without repeats.")
    if not hashes:
        raise ValueError(f"The source has no text: all of its {total:,} documents are empty.")
    return hashes, f"{total - empty - len(hashes):,} repeated and {empty:,} empty ones left out"


def passage_batches(
    documents: Documents, changed: set[str], source: str, split: Callable[[str], list[str]], size: int
) -> Iterator[list[Passage]]:
    """The passages of the changed documents, so many at a time or a few more: documents stay whole."""
    left, batch = set(changed), []
    with tqdm(total=len(changed), desc="embedding", unit=" documents") as bar:
        for found in with_hashes(documents):
            if found is None or found[0] not in left:
                continue
            document, value, text = found
            left.remove(document)
            parts = split(text)
            batch += [Passage(source, document, i, len(parts), value, part) for i, part in enumerate(parts)]
            if len(batch) >= size:
                yield batch
                batch = []
            bar.update()
        if batch:
            yield batch


def describe_model(model: SentenceTransformer, name: str, settings: dict) -> dict:
    """All that vectors depend on, and the model's name for whoever has to find it."""
    prompts = {kind: settings[f"{kind}_prompt"] for kind in ("query", "document")}
    for kind, prompt in prompts.items():
        prompts[kind] = model.prompts.get(kind, "") if prompt is None else prompt
    return {
        # Found again from any working directory.
        "model": os.path.abspath(name) if os.path.isdir(name) else name,
        "fingerprint": fingerprint(model),
        "pooling": [module.pooling_mode for module in model if isinstance(module, Pooling)],
        "dimension": model.get_embedding_dimension(),
        "truncate_dim": settings["truncate_dim"],
        "dtype": settings["dtype"],
        "max_length": model.max_seq_length,
        "passage_tokens": settings["passage_tokens"] or model.max_seq_length,
        "overlap": settings["overlap"],
        "query_prompt": prompts["query"],
        "document_prompt": prompts["document"],
    }


def load(name: str, settings: dict, database: Database) -> tuple[SentenceTransformer, dict]:
    """The model and its description."""
    dtype = getattr(torch, settings["dtype"])
    model = load_model(name, dtype, database.device, None, settings["truncate_dim"], database.trust_remote_code)
    return model, describe_model(model, name, settings)


def splitter(model: SentenceTransformer, identity: dict) -> Callable[[str], list[str]]:
    """What cuts documents into passages that, with the prompt, the model reads whole.

    Raises:
        ValueError: if there is no room for that, or the model has fewer dimensions than asked for.
    """
    limit, size = identity["max_length"], identity["passage_tokens"]
    if size is None or (limit is not None and size > limit):
        raise ValueError(f"`passage_tokens` is {size}; the model reads {limit or 'any number: set one'}.")
    if identity["truncate_dim"] not in (None, identity["dimension"]):
        raise ValueError(f"`truncate_dim` is {identity['truncate_dim']}; the model has {identity['dimension']} only.")
    prompt = model.tokenizer(identity["document_prompt"], add_special_tokens=False)["input_ids"]
    room = size - len(prompt) - model.tokenizer.num_special_tokens_to_add()
    split = partial(split_passages, tokenizer=model.tokenizer, size=room, overlap=identity["overlap"])
    split("")  # Raises what it would raise on the first document.
    return split


def embed(model: SentenceTransformer, texts: list[str], prompt: str, batch_size: int = 32) -> np.ndarray:
    """Vectors of unit length.

    Raises:
        FloatingPointError: if one is not finite.
    """
    # An empty prompt, unlike None, also keeps the model's own away.
    vectors = model.encode(
        texts, prompt=prompt, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False
    )
    check_finite(vectors, texts)
    return vectors


def index_documents(target: VectorIndex, database: Database, settings: IndexArguments) -> None:
    # 1. The source; that it can be read is found out before a model is loaded
    documents = partial(
        stream_documents, settings.source, settings.column, settings.id_column, settings.split, settings.subset
    )
    documents()
    local = local_files(settings.source)
    source = settings.name or (os.path.abspath(os.path.expanduser(settings.source)) if local else settings.source)

    # 2. The model: that of the index, if there is one
    model, identity = load(settings.model, asdict(settings), database)
    if target.identity is not None:
        check_identity(database.index, target.identity, identity)
    split = splitter(model, identity)

    # 3. What is new, changed or gone; all of the source is read once before anything is written
    hashes, left_out = read_hashes(documents)
    if target.identity is None:
        target.create(identity)
    stored = target.hashes(source)
    changed = {document for document, value in hashes.items() if stored.get(document) != value}
    gone = stored.keys() - hashes.keys()
    target.delete(source, sorted(gone))

    # 4. Passages and their vectors. What is written stays when the run ends early, and is not embedded again
    passages = 0
    for batch in passage_batches(documents, changed, source, split, settings.write_every):
        vectors = embed(model, [passage.text for passage in batch], identity["document_prompt"], settings.batch_size)
        target.delete(source, sorted({passage.document for passage in batch} & stored.keys()))
        target.add(batch, vectors)
        passages += len(batch)
    target.optimize()
    print(
        f"{source} in {database.index}: {len(changed):,} documents embedded ({passages:,} passages), "
        f"{len(hashes) - len(changed):,} unchanged, {len(gone):,} removed; {left_out}"
    )


def answer_queries(target: VectorIndex, database: Database, settings: QueryArguments) -> None:
    # 1. The model of the index, and no other
    if target.identity is None:
        raise VectorIndexError(f"There is no index {database.index}: make it with `semantic_search.py index`.")
    name = settings.model or target.identity["model"]
    if os.path.isabs(name) and not os.path.isdir(name):
        raise VectorIndexError(f"The model {name} of the index {database.index} is gone: say where it is by `model`.")
    model, identity = load(name, target.identity, database)
    check_identity(database.index, target.identity, identity)

    # 2. Search
    warn_of_cut_queries(model, settings.text, identity)
    vectors = embed(model, settings.text, identity["query_prompt"])
    for text, vector in zip(settings.text, vectors):
        hits = target.search(vector, settings.top_k)
        if settings.json:
            print(json.dumps({"query": text, "hits": [asdict(hit) for hit in hits]}))
        else:
            print(table(text, hits))


def warn_of_cut_queries(model: SentenceTransformer, texts: list[str], identity: dict) -> None:
    """Name queries that are longer than the model reads. Documents are cut into passages, queries are not."""
    for text in texts:
        length = len(model.tokenizer(identity["query_prompt"] + text, verbose=False)["input_ids"])
        if identity["max_length"] is not None and length > identity["max_length"]:
            print(
                f"warning: the query {text[:60]!r} has {length:,} tokens with its prompt and the model reads "
                f"{identity['max_length']:,}: its end is not searched for.",
                file=sys.stderr,
            )


def table(text: str, hits: list[Hit]) -> str:
    """A query's passages, best first: cosine, document, number of the passage, and its beginning."""
    lines = [f"{text!r}: {len(hits)} passages", f"{'cosine':>7}  document [passage]"]
    for hit in hits:
        lines += [f"{hit.score:>7.4f}  {hit.document} [{hit.number}]", f"{'':>9}{' '.join(hit.text.split())[:110]}"]
    return "\n".join(lines)


def main(args: list[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else args
    commands = {"index": (IndexArguments, index_documents), "query": (QueryArguments, answer_queries)}
    parser = ArgumentParser(Path(__file__).name, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=commands)
    arguments, run = commands[parser.parse_args(args[:1]).command]
    database, settings = parse_config(Database, arguments, args=args[1:])
    with closing(open_index(database.index, database.weaviate_url, database.weaviate_grpc_port)) as target:
        run(target, database, settings)


if __name__ == "__main__":
    try:
        main()
    except VectorIndexError as error:
        sys.exit(str(error))

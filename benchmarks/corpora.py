"""What large corpora cost: preparing, deduplicating, embedding, indexing and searching them, measured on this machine.

    python benchmarks/corpora.py            # 10 minutes on 2 quiet CPU cores

The texts are random words of Python's documentation, the vectors lie in clusters, so that neighbours are hard to tell
apart. From the rates the page calculates what RefinedWeb and 100 million passages take.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from encoders import build_model, ragged_lengths
from runner import ROOT, Settings, medians, run_benchmark, table
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from neobert_hf.data.duplicates import DuplicateSettings, sign_part
from neobert_hf.data.parts import plan_parts
from neobert_hf.data.preparing import PrepareArguments, prepare
from neobert_hf.embeddings.corpus import CorpusSettings, embed_part
from neobert_hf.search.documents import Documents, SourceSettings
from neobert_hf.search.lancedb_index import LanceDBIndex


TOKENIZER = str(ROOT / "models" / "distilled")
DIMENSIONS = 64
# Texts in a batch: few, so that some dozen texts make batches of like lengths, as the many of a large corpus do.
BATCH = 8
# Documents of 300 words whose preparing is timed, and of how many their duplicates are looked for.
DOCUMENTS, SIGNED = 60_000, 2_000
# Short documents that are searched.
SHORT_DOCUMENTS = 1_000_000
# Texts of up to 256 words that are embedded, by so many layers, and turns of which the median counts.
TEXTS, LAYERS, ROUNDS = 64, 28, 3


def random_texts(lengths: Iterable[int]) -> Iterator[str]:
    words = np.array(" ".join(topics.values()).split())
    generator = np.random.default_rng(0)
    return (" ".join(words[generator.integers(0, len(words), length)]) for length in lengths)


def write_texts(file: Path, count: int, words: int) -> None:
    """Texts with an id, in groups of rows, in constant memory."""
    texts = random_texts(words for _ in range(count))
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(file, schema) as writer:
        for start in range(0, count, 5_000):
            ids = [f"document {number}" for number in range(start, min(start + 5_000, count))]
            writer.write_table(pa.table({"id": ids, "text": [next(texts) for _ in ids]}, schema))


def measure_preparing() -> dict[str, float]:
    """Seconds of all of `prepare_data.py` beside those of its tokenizer alone on the same texts; and of MinHash."""
    with TemporaryDirectory() as folder:
        file, outputs = Path(folder, "texts.parquet"), iter(range(10**6))
        write_texts(file, DOCUMENTS, 300)
        texts = pq.read_table(file)["text"].to_pylist()
        tokenizer = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
        tokenizer.no_padding()
        tokenizer.enable_truncation(4096)
        tokens = sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts))

        def whole() -> None:
            with redirect_stdout(StringIO()):
                prepare(PrepareArguments(str(file), TOKENIZER, f"{folder}/{next(outputs)}"))

        def alone() -> None:
            for start in range(0, len(texts), 1_000):
                tokenizer.encode_batch_fast(texts[start : start + 1_000])

        found = medians({"whole": whole, "alone": alone}, ROUNDS)
        (part,) = plan_parts([str(file)], SIGNED, most=SIGNED)
        start = time.perf_counter()
        sign_part(part, DuplicateSettings(), np.array([], np.uint64))
        found["minhash"] = (time.perf_counter() - start) / part.rows * DOCUMENTS
    return {"tokens": tokens, "cores": torch.get_num_threads()} | found


class Clusters:
    """In place of an encoder: a text is one passage, and its vector lies in one of 1,000 clusters."""

    def __init__(self):
        self.generator = np.random.default_rng(0)
        self.centers = self.generator.normal(size=(1_000, DIMENSIONS))

    def split(self, text: str) -> list[str]:
        return [text]

    def embed(self, texts: list[str]) -> np.ndarray:
        chosen = self.centers[self.generator.integers(0, len(self.centers), len(texts))]
        vectors = (chosen + self.generator.normal(size=chosen.shape) * 0.5).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_index(folder: str) -> LanceDBIndex:
    """What `semantic_search.py index` does before it builds the indexes, without a model."""
    encoder, index = Clusters(), LanceDBIndex(Path(folder, "index"))
    index.create({"dimension": DIMENSIONS})
    for passages, replaced in Documents(SourceSettings(f"{folder}/texts.parquet", id_column="id")).passages(encoder):
        index.write(passages, encoder.embed([passage.text for passage in passages]), replaced)
    index.commit()
    return index


def measure_search() -> dict[str, float]:
    """Seconds of writing vectors, building their indexes and searching them, and what the search finds of the exact."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        write_texts(Path(folder, "texts.parquet"), SHORT_DOCUMENTS, 20)
        begin = time.perf_counter()
        index = write_index(folder)
        written = time.perf_counter()
        index.optimize()
        found = {"written": written - begin, "indexed": time.perf_counter() - written}
        queries = iter(Clusters().embed([""] * 1_000))
        searches = {
            name: lambda exact=exact: index.search(next(queries), 10, exact)
            for name, exact in (("exact", True), ("approximate", False))
        }
        found |= medians(searches, 20)
        # A small table has no index of its vectors, and an exact search finds all.
        stored = json.loads(index.recall_file.read_text()) if index.recall_file.exists() else {}
    return found | {"passages": SHORT_DOCUMENTS, "recall": stored.get("recall_at_10", 1.0)}


def measure_embedding() -> dict[str, float]:
    """Tokens and seconds of embed.py's work on texts of mixed lengths, by the published shape."""
    texts = list(random_texts(ragged_lengths(TEXTS, 256).tolist()))
    with TemporaryDirectory() as folder:
        build_model("NeoBERT", num_hidden_layers=LAYERS).base_model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        tokenizer.save_pretrained(folder)
        pq.write_table(pa.table({"text": texts}), f"{folder}/texts.parquet")
        (part,) = plan_parts([f"{folder}/texts.parquet"], len(texts))
        of_corpus = CorpusSettings(model=folder, max_length=512, batch_size=BATCH)
        tokens = sum(map(len, tokenizer(texts, truncation=True, max_length=512)["input_ids"]))
        return {"tokens": tokens} | medians({"embed.py": partial(embed_part, part, of_corpus)}, ROUNDS)


def measure(settings: Settings) -> dict:
    return {
        "preparing": measure_preparing(),
        "search": measure_search(),
        "embedding": measure_embedding(),
    }


# RefinedWeb as it is published, and passages of a usual length.
REFINEDWEB_TOKENS, REFINEDWEB_DOCUMENTS = 600e9, 968e6
PASSAGES, PASSAGE_TOKENS, PASSAGE_DIMENSIONS = 100e6, 128, 768


def arithmetic(found: dict) -> str:
    """What corpora of full size take at the rates that were measured."""
    preparing, embedding, search = found["preparing"], found["embedding"], found["search"]
    # Tokens that one core prepares, signs (in one thread) and embeds in an hour.
    prepared = 3600 * preparing["tokens"] / preparing["whole"] / preparing["cores"]
    signed = 3600 * preparing["tokens"] / preparing["minhash"]
    embedded = 3600 * embedding["tokens"] / embedding["embed.py"] / preparing["cores"]
    scale = PASSAGES / search["passages"] * PASSAGE_DIMENSIONS / DIMENSIONS
    rows = [
        ["RefinedWeb, 600 billion tokens, prepared", f"{REFINEDWEB_TOKENS / prepared:,.0f} core hours"],
        ["its MinHash signatures", f"{REFINEDWEB_TOKENS / signed:,.0f} core hours"],
        ["its groups of duplicates, in one process", f"{60 * REFINEDWEB_DOCUMENTS / 1e9:,.0f} GB of memory"],
        ["100 million passages of 128 tokens embedded", f"{PASSAGES * PASSAGE_TOKENS / embedded:,.0f} core hours"],
        ["their vectors of 768 numbers, float32", f"{PASSAGES * PASSAGE_DIMENSIONS * 4 / 1e9:,.0f} GB"],
        ["written to LanceDB, by one process", f"{search['written'] * scale / 3600:,.1f} hours"],
        ["its indexes built, by one process", f"{search['indexed'] * scale / 3600:,.1f} hours"],
        ["a search that compares all of them", f"{search['exact'] * scale:,.0f} s"],
    ]
    return table(["", "by arithmetic"], rows)


def page(found: dict) -> list[str]:
    preparing, search, embedding = (found[part] for part in ("preparing", "search", "embedding"))
    return [
        "# What large corpora cost, and what breaks first",
        f"Preparing {preparing['tokens']:,} tokens takes {preparing['whole']:.1f} s, the tokenizer alone "
        f"{preparing['alone']:.1f} s ({preparing['alone'] / preparing['whole']:.2f} of the whole).",
        f"NeoBERT's published shape embeds {embedding['tokens'] / embedding['embed.py']:,.0f} tokens a second in "
        "`embed.py`, texts of mixed lengths of up to 256 words.",
        f"Of {search['passages']:,} vectors of {DIMENSIONS} numbers in clusters, an approximate search finds "
        f"{search['recall']:.3f} of the 10 nearest in {1000 * search['approximate']:.1f} ms, an exact one takes "
        f"{1000 * search['exact']:.1f} ms. Writing them took {search['written']:.0f} s, the indexes "
        f"{search['indexed']:.0f} s.",
        "Memory hardly grows with the corpus: from 10,000 documents to a million by 4% in preparing and by 38% in "
        "indexing ([log](../NOTES.md), 28 November 2026).",
        "## RefinedWeb, and 100 million passages",
        "Core hours are spread over all workers of a cluster. What one process does stays with one process.",
        arithmetic(found),
        "At ten times as much, the first to break are the groups of near-duplicates: they need 60 bytes a document in "
        "the memory of one process, so each crawl has to be deduplicated by itself. Then the index of vectors, which "
        "LanceDB trains and builds in one process, and `semantic_search.py index`, which embeds on one GPU.",
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("corpora", measure, page, None, ("lancedb",), args=args)


if __name__ == "__main__":
    main()

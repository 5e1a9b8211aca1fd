"""What large corpora cost: preparing, deduplicating, embedding, indexing and searching them, measured on this machine.

    python benchmarks/corpora.py            # 15 minutes on 2 quiet CPU cores

The texts are random words of Python's documentation, the vectors lie in clusters, so that neighbours are hard to tell
apart. Finished parts are kept in results/single_runs/corpora.json, so that an interrupted command goes on. From the
rates the page calculates what RefinedWeb and 100 million passages take.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from encoders import build_config, build_model, ragged_lengths
from runner import ROOT, Settings, StoredRuns, machine, medians, run_benchmark, table
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer

from neobert_hf.data.duplicates import DuplicateSettings, sign_part
from neobert_hf.data.parts import plan_parts
from neobert_hf.data.preparing import PrepareArguments, prepare
from neobert_hf.embeddings.corpus import CorpusSettings, embed_part
from neobert_hf.search.documents import Documents, SourceSettings
from neobert_hf.search.lancedb_index import LanceDBIndex


TOKENIZER = str(ROOT / "models" / "distilled")


@dataclass(kw_only=True)
class CorporaSettings(Settings):
    documents: int = field(default=60_000, metadata={"help": "documents of 300 words whose preparing is timed"})
    memory_documents: list[int] = field(
        default_factory=lambda: [10_000, 100_000, 1_000_000], metadata={"help": "short documents, for memory"}
    )
    vectors: int = field(default=1_000_000, metadata={"help": "vectors that are searched"})
    dimensions: int = field(default=64, metadata={"help": "of these vectors"})
    texts: int = field(default=64, metadata={"help": "texts that are embedded"})
    longest: int = field(default=256, metadata={"help": "words of the longest text that is embedded"})
    layers: int | None = field(default=None, metadata={"help": "fewer layers than published, for a trial"})
    repeats: int = field(default=3, metadata={"help": "turns; the median counts"})


def random_texts(lengths: Iterator[int] | list[int], seed: int = 0) -> Iterator[str]:
    words = np.array(" ".join(topics.values()).split())
    generator = np.random.default_rng(seed)
    return (" ".join(words[generator.integers(0, len(words), length)]) for length in lengths)


def write_texts(file: Path, count: int, words: int) -> None:
    """Texts with an id, in groups of rows, in constant memory."""
    texts = random_texts(words for _ in range(count))
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(file, schema) as writer:
        for start in range(0, count, 5_000):
            ids = [f"document {number}" for number in range(start, min(start + 5_000, count))]
            writer.write_table(pa.table({"id": ids, "text": [next(texts) for _ in ids]}, schema))


def measure_preparing(settings: CorporaSettings) -> dict[str, float]:
    """Seconds of all of `prepare_data.py` beside those of its tokenizer alone on the same texts; and of MinHash."""
    with TemporaryDirectory() as folder:
        file, outputs = Path(folder, "texts.parquet"), iter(range(10**6))
        write_texts(file, settings.documents, 300)
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

        found = medians({"whole": whole, "alone": alone}, settings.repeats)
        (part,) = plan_parts([str(file)], min(2_000, settings.documents), most=min(2_000, settings.documents))
        start = time.perf_counter()
        sign_part(part, DuplicateSettings(), np.array([], np.uint64))
        signed = (time.perf_counter() - start) / part.rows * settings.documents
    return {
        "tokens": tokens,
        "documents": settings.documents,
        "cores": torch.get_num_threads(),
        "minhash": signed,
    } | found


def peak_memory() -> int:
    """The most MB that this process has had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


def prepare_documents(count: int) -> list[int]:
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        write_texts(Path(folder, "texts.parquet"), count, 20)
        before = peak_memory()
        arguments = (f"{folder}/texts.parquet", TOKENIZER, f"{folder}/out")
        prepare(PrepareArguments(*arguments, documents_per_shard=5_000))
        return [before, peak_memory()]


class Clusters:
    """In place of an encoder: a text is one passage, and its vector lies in one of 1,000 clusters."""

    def __init__(self, dimensions: int):
        self.generator = np.random.default_rng(0)
        self.centers = self.generator.normal(size=(1_000, dimensions))

    def split(self, text: str) -> list[str]:
        return [text]

    def embed(self, texts: list[str]) -> np.ndarray:
        chosen = self.centers[self.generator.integers(0, len(self.centers), len(texts))]
        vectors = (chosen + self.generator.normal(size=chosen.shape) * 0.5).astype(np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def index_documents(folder: str, count: int, dimensions: int) -> tuple[LanceDBIndex, dict[str, float]]:
    """What `semantic_search.py index` does, without a model. Returns seconds and peaks of memory in MB."""
    write_texts(Path(folder, "texts.parquet"), count, 20)
    memory, begin = [peak_memory()], time.perf_counter()
    encoder, index = Clusters(dimensions), LanceDBIndex(Path(folder, "index"))
    documents = Documents(SourceSettings(f"{folder}/texts.parquet", id_column="id"))
    index.create({"dimension": dimensions})
    for passages, replaced in documents.passages(encoder):
        index.write(passages, encoder.embed([passage.text for passage in passages]), replaced)
    memory.append(peak_memory())
    written = time.perf_counter()
    index.optimize()
    memory.append(peak_memory())
    seconds = {"written": written - begin, "indexed": time.perf_counter() - written}
    return index, seconds | {"memory": memory, "versions": index.table.version}


def index_memory(count: int, dimensions: int) -> list[int]:
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        return index_documents(folder, count, dimensions)[1]["memory"]


def in_own_process(function: Callable, *arguments):
    """Run a function in a fresh process, whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def measure_memory(settings: CorporaSettings) -> dict[str, dict[str, list[int]]]:
    jobs = {"preparing": prepare_documents, "indexing": partial(index_memory, dimensions=settings.dimensions)}
    counts = settings.memory_documents
    return {name: {f"{count:,}": in_own_process(job, count) for count in counts} for name, job in jobs.items()}


def measure_recall(settings: CorporaSettings) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        index, found = index_documents(folder, settings.vectors, settings.dimensions)
        queries = iter(Clusters(settings.dimensions).embed([""] * 1_000))
        searches = {
            name: lambda exact=exact: index.search(next(queries), 10, exact)
            for name, exact in (("exact", True), ("approximate", False))
        }
        times = medians(searches, 20)
        stored = json.loads(index.recall_file.read_text()) if index.recall_file.exists() else {}
    found |= {"passages": settings.vectors, "dimensions": settings.dimensions}
    # An exact search finds all.
    return found | times | {"recall": stored.get("recall_at_10", 1.0)}


def embedding_model(name: str, folder: str, changes: dict) -> SentenceTransformer:
    """A model of the published shape with random weights and mean pooling, as Sentence Transformers loads it."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, model_max_length=512)
    build_model(build_config(name, **changes), "sdpa", "cpu", torch.float32).base_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    encoder = Transformer(folder)
    return SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")


# Texts in a batch: few, so that some dozen texts make batches of like lengths, as the many of a large corpus do.
BATCH = 8


def bare_products(model: SentenceTransformer, lengths: list[int]) -> Callable[[], None]:
    """The matrix products of the real tokens and nothing else, in the batches that `encode` makes: sorted by length."""
    config = model[0].auto_model.config
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Linear)]
    lengths, heads = sorted(lengths, reverse=True), config.num_attention_heads

    @torch.no_grad()
    def products() -> None:
        for start in range(0, len(lengths), BATCH):
            rows = lengths[start : start + BATCH]
            inputs = {width: torch.ones(sum(rows), width) for width in {weight.shape[1] for weight in weights}}
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
            for length in rows:
                one = torch.ones(heads, length, config.hidden_size // heads)
                for _ in range(config.num_hidden_layers):
                    one @ one.transpose(-1, -2) @ one

    return products


def measure_encode(settings: CorporaSettings) -> dict[str, dict[str, float]]:
    """Seconds of `encode`, and of embed.py's work, for texts of mixed lengths, beside the products of their tokens."""
    texts = list(random_texts(ragged_lengths(settings.texts, settings.longest).tolist()))
    changes = {"num_hidden_layers": settings.layers} if settings.layers else {}
    candidates, tokens = {}, {}
    with TemporaryDirectory() as folder:
        for name in ("NeoBERT", "BERT-base"):
            model = embedding_model(name, f"{folder}/{name}", changes)
            lengths = [len(ids) for ids in model.tokenizer(texts, truncation=True, max_length=512)["input_ids"]]
            candidates[name] = partial(model.encode, texts, batch_size=BATCH, show_progress_bar=False)
            candidates[f"{name}, products"] = bare_products(model, lengths)
            tokens[name] = sum(lengths)
        pq.write_table(pa.table({"text": texts}), f"{folder}/texts.parquet")
        (part,) = plan_parts([f"{folder}/texts.parquet"], len(texts))
        of_corpus = CorpusSettings(model=f"{folder}/NeoBERT", max_length=512, batch_size=BATCH)
        candidates["embed.py"] = partial(embed_part, part, of_corpus)
        found = medians(candidates, settings.repeats)
    rows = {"NeoBERT, `encode`": "NeoBERT", "NeoBERT, `embed.py`": "NeoBERT", "BERT-base, `encode`": "BERT-base"}
    seconds = [found["NeoBERT"], found["embed.py"], found["BERT-base"]]
    return {
        label: {"tokens": tokens[name], "seconds": second, "products": found[f"{name}, products"]}
        for (label, name), second in zip(rows.items(), seconds)
    }


# What is measured, by part, and the settings that it depends on.
MEASURES = {
    "preparing": (measure_preparing, ("documents", "repeats")),
    "memory": (measure_memory, ("memory_documents", "dimensions")),
    "recall": (measure_recall, ("vectors", "dimensions")),
    "encode": (measure_encode, ("texts", "longest", "layers", "repeats")),
}


def measure(settings: CorporaSettings) -> dict:
    runs, found = StoredRuns(Path(settings.results) / "single_runs" / "corpora.json"), {}
    for name, (function, needs) in MEASURES.items():
        key = "; ".join([name, *(f"{need} {getattr(settings, need)}" for need in needs), machine()])
        found[name] = runs.result(key, partial(function, settings))
        print(name, found[name], flush=True)
    return found


# RefinedWeb as it is published, and a passage of a usual length.
REFINEDWEB_TOKENS, REFINEDWEB_DOCUMENTS = 600e9, 968e6
PASSAGES, PASSAGE_TOKENS, DIMENSIONS = 100e6, 128, 768


def arithmetic(found: dict) -> str:
    """What corpora of full size take at the rates that were measured."""
    preparing, encode, recall = found["preparing"], found["encode"]["NeoBERT, `embed.py`"], found["recall"]
    rate = preparing["tokens"] / preparing["whole"] / preparing["cores"]
    minhash = preparing["tokens"] / preparing["minhash"]
    embedded = encode["tokens"] / encode["seconds"] / preparing["cores"]
    scale = PASSAGES / recall["passages"] * DIMENSIONS / recall["dimensions"]
    rows = [
        ["RefinedWeb, 600 billion tokens, prepared", f"{REFINEDWEB_TOKENS / rate / 3600:,.0f} core hours"],
        ["its MinHash signatures", f"{REFINEDWEB_TOKENS / minhash / 3600:,.0f} core hours"],
        ["its groups of duplicates, in one process", f"{60 * REFINEDWEB_DOCUMENTS / 1e9:,.0f} GB of memory"],
        [
            "100 million passages of 128 tokens embedded",
            f"{PASSAGES * PASSAGE_TOKENS / embedded / 3600:,.0f} core hours",
        ],
        ["their vectors of 768 numbers, float32", f"{PASSAGES * DIMENSIONS * 4 / 1e9:,.0f} GB"],
        ["written to LanceDB, by one process", f"{recall['written'] * scale / 3600:,.1f} hours"],
        ["its indexes built, by one process", f"{recall['indexed'] * scale / 3600:,.1f} hours"],
        ["a search that compares all of them", f"{recall['exact'] * scale:,.0f} s"],
    ]
    return table(["", "by arithmetic"], rows)


AT_TEN_TIMES = (
    "At ten times as much, the first to break are the groups of near-duplicates: they need 60 bytes a document in the "
    "memory of one process, so each crawl has to be deduplicated by itself. Then the index of vectors, which LanceDB "
    "trains and builds in one process, and `semantic_search.py index`, which embeds on one GPU."
)


def memory_table(memory: dict) -> str:
    rows = [[name, *(" / ".join(map(str, peaks)) for peaks in of_job.values())] for name, of_job in memory.items()]
    return table(["MB at the peak", *(f"{count} documents" for count in memory["preparing"])], rows)


def encode_table(encode: dict) -> str:
    rows = [
        [name, f"{row['tokens'] / row['seconds']:,.0f}", f"{row['products'] / row['seconds']:.2f}"]
        for name, row in encode.items()
    ]
    return table(["texts of mixed lengths", "real tokens a second", "share of bare products"], rows)


def page(stored: dict, folder: Path) -> list[str]:
    found = stored["found"]
    preparing, recall = found["preparing"], found["recall"]
    return [
        "# What large corpora cost, and what breaks first",
        f"Preparing {preparing['tokens']:,} tokens takes {preparing['whole']:.1f} s, the tokenizer alone "
        f"{preparing['alone']:.1f} s ({preparing['alone'] / preparing['whole']:.2f} of the whole).",
        encode_table(found["encode"]),
        f"Of {recall['passages']:,} vectors of {recall['dimensions']} numbers in clusters, an approximate search finds "
        f"{recall['recall']:.3f} of the 10 nearest in {1000 * recall['approximate']:.1f} ms, an exact one takes "
        f"{1000 * recall['exact']:.1f} ms. Writing them took {recall['written']:.0f} s, the indexes "
        f"{recall['indexed']:.0f} s, in {recall['versions']} versions of the table.",
        "Memory of the process before, and at its peak; in indexing at the last write and after the indexes are built:",
        memory_table(found["memory"]),
        "## RefinedWeb, and 100 million passages",
        "Core hours are spread over all workers of a cluster. What one process does stays with one process.",
        arithmetic(found),
        AT_TEN_TIMES,
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("corpora", CorporaSettings, measure, page, ("lancedb", "sentence-transformers"), args=args)


if __name__ == "__main__":
    main()

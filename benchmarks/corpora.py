"""What large corpora cost: preparing, deduplicating and embedding them, measured on this machine.

    python benchmarks/corpora.py            # six minutes on 2 quiet CPU cores

The texts are random words of Python's documentation. From the rates the page calculates what RefinedWeb and 100 million
passages take.
"""

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
from neobert_hf.data.preparing import prepare_data
from neobert_hf.embeddings.corpus import CorpusSettings, embed_part


TOKENIZER = str(ROOT / "models" / "distilled")
# Texts in a batch: few, so that some dozen texts make batches of like lengths, as the many of a large corpus do.
BATCH = 8
# Documents of 300 words whose preparing is timed, and of how many their duplicates are looked for.
DOCUMENTS, SIGNED = 60_000, 2_000
# Texts of up to 256 words that are embedded, by so many layers, and turns of which the median counts.
TEXTS, LAYERS, ROUNDS = 64, 28, 3


def random_texts(lengths: Iterable[int]) -> Iterator[str]:
    words = np.array(" ".join(topics.values()).split())
    generator = np.random.default_rng(0)
    return (" ".join(words[generator.integers(0, len(words), length)]) for length in lengths)


def measure_preparing() -> dict[str, float]:
    """Seconds of all of `prepare_data` beside those of its tokenizer alone on the same texts; and of MinHash."""
    with TemporaryDirectory() as folder:
        file, outputs = Path(folder, "texts.parquet"), iter(range(10**6))
        texts = list(random_texts([300] * DOCUMENTS))
        pq.write_table(pa.table({"text": texts}), file, row_group_size=5_000)
        tokenizer = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json")
        tokenizer.no_padding()
        tokenizer.enable_truncation(4096)
        tokens = sum(len(encoding) for encoding in tokenizer.encode_batch_fast(texts))

        def whole() -> None:
            with redirect_stdout(StringIO()):
                prepare_data(source=file, tokenizer=TOKENIZER, output_dir=f"{folder}/{next(outputs)}")

        def alone() -> None:
            for start in range(0, len(texts), 1_000):
                tokenizer.encode_batch_fast(texts[start : start + 1_000])

        found = medians({"whole": whole, "alone": alone}, ROUNDS)
        (part,) = plan_parts([str(file)], SIGNED, most=SIGNED)
        start = time.perf_counter()
        sign_part(part, DuplicateSettings(), np.array([], np.uint64))
        found["minhash"] = (time.perf_counter() - start) / part.rows * DOCUMENTS
    return {"tokens": tokens, "cores": torch.get_num_threads()} | found


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
    return {"preparing": measure_preparing(), "embedding": measure_embedding()}


# RefinedWeb as it is published, and passages of a usual length.
REFINEDWEB_TOKENS, REFINEDWEB_DOCUMENTS = 600e9, 968e6
PASSAGES, PASSAGE_TOKENS, PASSAGE_DIMENSIONS = 100e6, 128, 768


def arithmetic(found: dict) -> str:
    """What corpora of full size take at the rates that were measured."""
    preparing, embedding = found["preparing"], found["embedding"]
    # Tokens that one core prepares, signs (in one thread) and embeds in an hour.
    prepared = 3600 * preparing["tokens"] / preparing["whole"] / preparing["cores"]
    signed = 3600 * preparing["tokens"] / preparing["minhash"]
    embedded = 3600 * embedding["tokens"] / embedding["embed.py"] / preparing["cores"]
    rows = [
        ["RefinedWeb, 600 billion tokens, prepared", f"{REFINEDWEB_TOKENS / prepared:,.0f} core hours"],
        ["its MinHash signatures", f"{REFINEDWEB_TOKENS / signed:,.0f} core hours"],
        ["its groups of duplicates, in one process", f"{60 * REFINEDWEB_DOCUMENTS / 1e9:,.0f} GB of memory"],
        ["100 million passages of 128 tokens embedded", f"{PASSAGES * PASSAGE_TOKENS / embedded:,.0f} core hours"],
        ["their vectors of 768 numbers, float32", f"{PASSAGES * PASSAGE_DIMENSIONS * 4 / 1e9:,.0f} GB"],
    ]
    return table(["", "by arithmetic"], rows)


def page(found: dict) -> list[str]:
    preparing, embedding = found["preparing"], found["embedding"]
    return [
        "# What large corpora cost, and what breaks first",
        f"Preparing {preparing['tokens']:,} tokens takes {preparing['whole']:.1f} s, the tokenizer alone "
        f"{preparing['alone']:.1f} s ({preparing['alone'] / preparing['whole']:.2f} of the whole).",
        f"NeoBERT's published shape embeds {embedding['tokens'] / embedding['embed.py']:,.0f} tokens a second in "
        "`embed.py`, texts of mixed lengths of up to 256 words.",
        "Memory hardly grows with the corpus: from 10,000 documents to a million by 4% in preparing and by 38% in "
        "indexing ([log](../NOTES.md), 28 November 2026).",
        "## RefinedWeb, and 100 million passages",
        "Core hours are spread over all workers of a cluster. What one process does stays with one process.",
        arithmetic(found),
        "LanceDB took 25 s to write a million vectors of 64 numbers and 22 s to build their indexes; a search that "
        "compares all took 157 ms, and one with the index, which found the same, 23 ms (28 November 2026). In one "
        "process that is 8 and 7 hours for the vectors above, and three minutes for a search that compares all.",
        "At ten times as much, the first to break are the groups of near-duplicates: they need 60 bytes a document in "
        "the memory of one process, so each crawl has to be deduplicated by itself. Then the index of vectors, which "
        "LanceDB trains and builds in one process, and `semantic_search.py index`, which embeds on one GPU.",
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("corpora", measure, page, None, args=args)


if __name__ == "__main__":
    main()

"""What a search loses with vectors in fewer bytes, and how many pairs a second a reranker reads.

    python benchmarks/search.py --files data/benchmark/retrieval_foldoc_test.parquet data/kinds/choose_code.parquet

Vectors: nDCG@10 of `models/distilled` by the `precision` of its index. `bits alone` is `binary` without ordering its
candidates once more.

Rerankers: classifiers of the same width and depth with random weights, which read batches of pairs of mixed lengths
(lognormal, mean 35% of the longest) as `CrossEncoder` gives them: with padding, and a mask. `computed` is the share of
a batch's places, padding among them, whose numbers the linear layers compute. The models take turns, on one thread;
the medians over the rounds count, of the seconds that the process computed, so that others on the machine count less.
"""

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from datasets import Dataset
from encoders import ragged_lengths
from runner import Settings, run_benchmark, table
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, ModernBertConfig, PreTrainedModel

from neobert_hf import NeoBERTConfig
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.keywords import ndcg, ranks_of
from neobert_hf.search.lancedb_index import LanceDBIndex
from neobert_hf.search.passages import Passage
from neobert_hf.search.precision import bits_of


# Of each file, among all of its documents.
QUERIES = 300
PRECISIONS = {"float32": None, "int8": "int8", "binary": "binary"}
KEYWORD_WEIGHT = 0.5
PAIRS, LONGEST = 32, 256
# Width, layers and heads.
SHAPES = ((384, 6, 6),)
# The class, and the width of the feed-forward network as a share of the model's.
MODELS = {"NeoBERT": (NeoBERTConfig, 4), "BERT": (BertConfig, 4), "ModernBERT": (ModernBertConfig, 1.5)}
ROUNDS = 5


@dataclass(kw_only=True)
class SearchSettings(Settings):
    model: str = field(default="models/distilled", metadata={"help": "embedding model", "path": "or Hub id"})
    files: list[str] = field(
        default_factory=lambda: ["data/benchmark/retrieval_foldoc_test.parquet"],
        metadata={"help": "Parquet files of `query` and `document`, each query with its right document"},
    )


def measure_vectors(settings: SearchSettings) -> list[dict]:
    encoder, found = PassageEncoder(EmbeddingSettings(settings.model), "cpu"), []
    for file in settings.files:
        rows = Dataset.from_parquet(file)
        queries, documents = rows["query"][:QUERIES], rows["document"][:]
        asked, vectors = encoder.embed("query", queries), encoder.embed("document", documents)
        passages = [Passage("", str(number), 0, 1, "", text) for number, text in enumerate(documents)]
        for name, precision in PRECISIONS.items():
            with TemporaryDirectory() as folder:
                index = LanceDBIndex(Path(folder))
                index.create({"dimension": vectors.shape[1], "precision": precision})
                index.write(passages, vectors, [])
                index.commit()
                index.optimize()
                columns = index.table.to_arrow().select(
                    [each for each in ("vector", "bits") if each in index.table.schema.names]
                )
                alone = [index.search(vector, 10) for vector in asked]
                words = [index.search_hybrid(text, vector, 10, KEYWORD_WEIGHT) for text, vector in zip(queries, asked)]
                row = {"data": Path(file).stem, "precision": name, "bytes": columns.nbytes / len(documents)}
                row |= {"alone": mean_ndcg(alone), "words": mean_ndcg(words)}
                row["folder"] = sum(each.stat().st_size for each in Path(folder).rglob("*") if each.is_file())
            found.append(row)
            print(row, flush=True)
        apart = np.unpackbits(bits_of(asked)[:, None] ^ bits_of(vectors)[None], axis=-1).sum(-1, dtype=np.int32)
        ranks = ranks_of(-apart, np.arange(len(queries)))
        found.append({"data": Path(file).stem, "precision": "bits alone", "alone": ndcg(ranks).mean()})
    return found


def mean_ndcg(found: list) -> float:
    """nDCG@10 where the right document of a query has its number."""
    ids = [[hit.document for hit in hits] for hits in found]
    ranks = [hits.index(str(row)) + 1 if str(row) in hits else 11 for row, hits in enumerate(ids)]
    return ndcg(np.array(ranks)).mean()


def measure_rerankers() -> list[dict]:
    torch.set_num_threads(1)
    lengths, found = ragged_lengths(PAIRS, LONGEST), []
    real = torch.arange(LONGEST) < lengths[:, None]
    inputs = {"input_ids": torch.randint(5, 30_000, real.shape) * real, "attention_mask": real.long()}
    for width, layers, heads in SHAPES:
        models = {name: build(name, width, layers, heads) for name in MODELS}
        seconds = {name: [] for name in models}
        for number in range(ROUNDS + 1):
            for name, model in models.items():
                began = time.process_time()
                with torch.inference_mode():
                    model(**inputs)
                # The first round warms up.
                seconds[name] += [time.process_time() - began] if number else []
        for name, model in models.items():
            embedded = model.base_model.get_input_embeddings().weight.numel()
            row = {"model": name, "shape": f"{layers} x {width}", "pairs": PAIRS / statistics.median(seconds[name])}
            row["parameters"] = sum(weight.numel() for weight in model.parameters()) - embedded
            row["computed"] = places_computed(model, inputs) / real.numel()
            found.append(row)
            print(row, flush=True)
    return found + [{"real": real.float().mean().item()}]


def build(name: str, width: int, layers: int, heads: int) -> PreTrainedModel:
    kind, ratio = MODELS[name]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    # Those of ModernBERT's own vocabulary are larger.
    ids = {"pad_token_id": 0, **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)}
    config = kind(**sizes, intermediate_size=int(ratio * width), vocab_size=30_522, num_labels=1, **ids)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").eval()


def places_computed(model: PreTrainedModel, inputs: dict) -> int:
    """The rows that the last linear layer of a block multiplies."""
    layers = [layer for layer in model.base_model.modules() if isinstance(layer, nn.Linear)]
    block, counted = [layer for layer in layers if layer.in_features != layer.out_features][-1], []
    hook = block.register_forward_hook(lambda layer, args, out: counted.append(args[0][..., 0].numel()))
    with torch.inference_mode():
        model(**inputs)
    hook.remove()
    return counted[-1]


def measure(settings: SearchSettings) -> dict:
    return {"vectors": measure_vectors(settings), "rerankers": measure_rerankers()}


def page(found: dict) -> list[str]:
    *rerankers, counts = found["rerankers"]
    vectors = [
        [
            row["data"].removeprefix("retrieval_").replace("_", " "),
            row["precision"],
            *(f"{row[name]:{form}}" if name in row else "-" for name, form in (("bytes", ",.0f"), ("folder", ",.0f"))),
            *(f"{row[name]:.3f}" if name in row else "-" for name in ("alone", "words")),
        ]
        for row in found["vectors"]
    ]
    speeds = [
        [row["shape"], row["model"], f"{row['parameters'] / 1e6:.1f}M", f"{row['computed']:.2f}", f"{row['pairs']:.1f}"]
        for row in rerankers
    ]
    return [
        "# Vectors in int8 lose nothing, and a NeoBERT reranker computes no padding",
        "nDCG@10 of `models/distilled` by the `precision` of its index, alone and with BM25 (`--keyword_weight 0.5`). "
        f"Up to {QUERIES} queries among all documents of each file. A vector's bytes, and those of the whole folder, "
        "with the texts and the index of their words:",
        table(["documents", "precision", "bytes of a vector", "bytes of the index", "alone", "with BM25"], vectors),
        "## Pairs a second of rerankers",
        f"Classifiers with random weights read {PAIRS} pairs of mixed lengths up to {LONGEST} tokens on one thread; "
        f"{counts['real']:.2f} of the places of a batch are tokens, the others padding. `computed` is the share that "
        "the linear layers compute. Parameters are without embeddings.",
        table(["layers x width", "", "parameters", "computed", "pairs a second"], speeds),
    ]


def main(args: list[str] | None = None) -> None:
    packages = ("sentence-transformers", "lancedb")
    run_benchmark("search", measure, page, packages=packages, kind=SearchSettings, args=args)


if __name__ == "__main__":
    main()

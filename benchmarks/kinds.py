"""Which share of its teacher a distilled model keeps on texts of kinds that it has not seen.

    python benchmarks/kinds_data.py packages lists data/kinds    # its first lines say what to download
    python benchmarks/kinds.py --data data/kinds

Five kinds of searches, each with its own documents: questions of FAQs, titles of sections, the purpose of a command and
its manual page, the short description of a package and its long one, a docstring and its code. `test_` files chose
nothing; `choose_` files are for choosing among models. Shares are of the teacher's nDCG@10, with 95% intervals of a
bootstrap over the queries.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from distil import KEYWORD_WEIGHT, Retrieval
from runner import Settings, run_benchmark, table
from sentence_transformers import SentenceTransformer

import neobert_hf  # noqa: F401  (registers the architecture)


ROUNDS, CUTOFF = 2_000, 10
WAYS = ("alone", "with BM25", "its queries, the teacher's index", "the teacher's queries, its index")


@dataclass(kw_only=True)
class KindsSettings(Settings):
    data: str = field(default="data/kinds", metadata={"help": "folder that kinds_data.py wrote", "path": True})
    teacher: str = field(
        default="sentence-transformers/all-MiniLM-L6-v2",
        metadata={"help": "the embedding model that the others were distilled from", "path": "or Hub id"},
    )
    models: list[str] = field(
        default_factory=lambda: ["models/distilled=models/distilled"], metadata={"help": "NAME=FOLDER of each student"}
    )


def measure(settings: KindsSettings) -> list[dict]:
    folders = dict(entry.split("=", 1) for entry in settings.models)
    models = {name: SentenceTransformer(folder, device="cpu") for name, folder in folders.items()}
    teacher, found = SentenceTransformer(settings.teacher, device="cpu"), []
    for file in sorted(Path(settings.data).glob("*.parquet")):
        rows = Dataset.from_parquet(str(file))
        test = Retrieval(rows["query"][:], rows["document"][:])
        by_words = test.bm25_scores / test.bm25_scores.max(1, keepdims=True).clip(1e-9)
        of_teacher = vectors(teacher, test)
        alone = ndcg(of_teacher[0] @ of_teacher[1].T)
        together = ndcg(of_teacher[0] @ of_teacher[1].T + KEYWORD_WEIGHT * by_words)
        kind = {"kind": file.stem, "queries": len(test.queries), "words": ndcg(by_words).mean()}
        kind |= {"teacher": alone.mean(), "teacher with words": together.mean()}
        for name, model in models.items():
            queries, documents = vectors(model, test)
            scores = (
                (queries @ documents.T, alone),
                (queries @ documents.T + KEYWORD_WEIGHT * by_words, together),
                (queries @ of_teacher[1].T, alone),
                (of_teacher[0] @ documents.T, alone),
            )
            kind[name] = [share(ndcg(of_model), reference) for of_model, reference in scores]
            print(f"{file.stem}, {name}: {kind[name]}", flush=True)
        found.append(kind)
    return found


def vectors(model: SentenceTransformer, test: Retrieval) -> tuple[np.ndarray, np.ndarray]:
    """Of the queries and of the documents, of length 1."""
    options = {"normalize_embeddings": True, "batch_size": 16}
    return model.encode_query(test.queries, **options), model.encode_document(test.documents, **options)


def ndcg(scores: np.ndarray) -> np.ndarray:
    """nDCG@10 of each query, whose one right document has its number."""
    ranks = (scores >= scores.diagonal()[:, None]).sum(1)
    return np.where(ranks <= CUTOFF, 1 / np.log2(ranks + 1), 0.0)


def share(found: np.ndarray, reference: np.ndarray) -> tuple[float, float, float]:
    """The share of the reference's mean, and its 95% interval over the queries."""
    drawn = np.random.default_rng(0).integers(len(found), size=(ROUNDS, len(found)))
    low, high = np.quantile(found[drawn].mean(1) / reference[drawn].mean(1), (0.025, 0.975))
    return found.mean() / reference.mean(), low, high


def page(found: list[dict]) -> list[str]:
    known = {"kind", "queries", "words", "teacher", "teacher with words"}
    first = [
        [kind["kind"].replace("_", " "), kind["queries"], *(f"{kind[name]:.3f}" for name in list(kind)[2:5])]
        for kind in found
    ]
    paragraphs = [
        "# What a small model keeps of its teacher, by kind of text",
        "Searches of kinds that no text, pair or choice of the shipped model had. The files that begin with `test` "
        "have chosen nothing since; those with `choose` are for choosing the next model.",
        table(["kind", "queries", "BM25", "teacher", "teacher with BM25"], first),
    ]
    for name in [name for name in found[0] if name not in known]:
        rows = [
            [
                kind["kind"].replace("_", " "),
                *(f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in kind[name]),
            ]
            for kind in found
        ]
        paragraphs += [
            f"`{name}`, as a share of the teacher (with BM25: of both together), and 95% intervals over queries:",
            table(["kind", *WAYS], rows),
        ]
    return paragraphs


def main(args: list[str] | None = None) -> None:
    run_benchmark("kinds", measure, page, packages=("sentence-transformers", "lancedb"), kind=KindsSettings, args=args)


if __name__ == "__main__":
    main()

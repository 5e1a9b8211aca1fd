"""Which share of its teacher a distilled model keeps on texts of kinds that it has not seen.

    python benchmarks/kinds_data.py packages data/kinds
    python benchmarks/kinds.py --data data/kinds

Six searches, each with its own documents: questions of FAQs, of two sets of packages, titles of sections, the purpose
of a command and its manual page, the short description of a package and its long one, a docstring and its code.
`test_` files chose nothing; `choose_` files are for choosing among models. Shares are of the teacher's nDCG@10, with
95% intervals of a bootstrap over the queries.

Beside the models stand BM25, static vectors of the teacher as in model2vec, and three of the teacher's layers, which
were not trained for it, as those of `models/minilm_3_layers` were. Each of the `--rerankers` orders anew the first 50
documents that each of them finds with BM25, as `query` does, for the first `--reranked_queries` queries.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from distil import BM25, KEYWORD_WEIGHT, STATIC, TEACHER, Retrieval, prepared, static_model
from runner import Settings, run_benchmark, table
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.training.arguments import use_fast_bfloat16


ROUNDS = 2_000
ALONE, TOGETHER, RERANKED = "alone", "with BM25", "the first 50 ordered anew"
WAYS = (ALONE, TOGETHER, "its queries, the teacher's index", "the teacher's queries, its index")
# As many as `query --rerank` reads by default.
FIRST = 50
# Of the teacher's six layers, as for the trained one in results/distil.md.
CUT, KEPT = "teacher cut to 3 layers, without training", (1, 3, 5)


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
    int8: list[str] = field(
        default_factory=list, metadata={"help": "names of the students that are also measured in int8"}
    )
    rerankers: list[str] = field(
        default_factory=list,
        metadata={"help": "NAME=FOLDER of cross-encoders that order anew what each model found"},
    )
    reranked_queries: int = field(default=200, metadata={"help": "queries of each kind that the rerankers order"})


def measure(settings: KindsSettings) -> list[dict]:
    folders = dict(entry.split("=", 1) for entry in settings.models)
    teacher, found = SentenceTransformer(settings.teacher, device="cpu"), []
    models = {name: SentenceTransformer(folder, device="cpu") for name, folder in folders.items()}
    models |= {f"{name}, int8": prepared(folders[name], int8=True) for name in settings.int8}
    models |= {CUT: cut(teacher), STATIC: static_model(teacher)}
    rerankers = dict(entry.split("=", 1) for entry in settings.rerankers)
    rerankers = {name: CrossEncoder(folder, device="cpu") for name, folder in rerankers.items()}
    for reranker in rerankers.values():
        use_fast_bfloat16(reranker, reranker.device)
    for file in sorted(Path(settings.data).glob("*.parquet")):
        rows = Dataset.from_parquet(str(file))
        test = Retrieval(rows["query"][:], rows["document"][:])
        found_by = similarities(teacher, models, test)
        alone, together = (test.ndcg(found_by[TEACHER][way]) for way in (ALONE, TOGETHER))
        scores = {
            name: {
                way: described(test.ndcg(each), together if way == TOGETHER else alone) for way, each in by_way.items()
            }
            for name, by_way in found_by.items()
        }
        some = Retrieval(test.queries[: settings.reranked_queries], test.documents)
        for title, reranker in rerankers.items():
            known: dict[tuple[str, str], float] = {}
            for name, by_way in found_by.items():
                first = by_way.get(TOGETHER, by_way[ALONE])[: len(some.queries)]
                anew = reranked(reranker, some, first, known)
                scores[name].setdefault(RERANKED, {})[title] = gained(some.ndcg(anew), some.ndcg(first))
                print(f"{file.stem}, {name}, {title}: {scores[name][RERANKED][title]}", flush=True)
        reranked_queries = len(some.queries) if rerankers else 0
        found.append(
            {"kind": file.stem, "queries": len(test.queries), "reranked queries": reranked_queries, "scores": scores}
        )
        print(f"{file.stem}: {scores}", flush=True)
    return found


def similarities(
    teacher: SentenceTransformer, models: dict[str, SentenceTransformer], test: Retrieval
) -> dict[str, dict[str, np.ndarray]]:
    """By model and way, the scores of all documents for each query (queries, documents)."""
    by_words, (queries, documents) = test.bm25_shares, vectors(teacher, test)
    found = {
        BM25: {ALONE: by_words},
        TEACHER: {ALONE: queries @ documents.T, TOGETHER: queries @ documents.T + KEYWORD_WEIGHT * by_words},
    }
    for name, model in models.items():
        own_queries, own_documents = vectors(model, test)
        cosines = own_queries @ own_documents.T
        found[name] = {ALONE: cosines, TOGETHER: cosines + KEYWORD_WEIGHT * by_words}
        if own_documents.shape[1] == documents.shape[1]:
            found[name] |= {WAYS[2]: own_queries @ documents.T, WAYS[3]: queries @ own_documents.T}
    return found


def cut(teacher: SentenceTransformer) -> SentenceTransformer:
    """A copy of the teacher with some of its layers, if it has them, and as it is if not."""
    model = deepcopy(teacher)
    layers = getattr(getattr(model[0].model, "encoder", None), "layer", ())
    if len(layers) > max(KEPT):
        model[0].model.encoder.layer = nn.ModuleList(layers[number] for number in KEPT)
        model[0].model.config.num_hidden_layers = len(KEPT)
    return model


def vectors(model: SentenceTransformer, test: Retrieval) -> tuple[np.ndarray, np.ndarray]:
    """Of the queries and of the documents, of length 1."""
    options = {"normalize_embeddings": True, "batch_size": 16}
    return model.encode_query(test.queries, **options), model.encode_document(test.documents, **options)


def reranked(
    reranker: CrossEncoder, test: Retrieval, scores: np.ndarray, known: dict[tuple[str, str], float]
) -> np.ndarray:
    """An order of the documents of each query, as scores: the first ones as the reranker has them, then the others.

    As in `query`, documents with the same score keep their order.

    Args:
        known: what the reranker says of pairs; those that it has not read yet are added.
    """
    first = np.argsort(-scores, axis=1, kind="stable")[:, :FIRST]
    pairs = [(query, test.documents[number]) for query, row in zip(test.queries, first) for number in row]
    new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
    known.update(zip(new, reranker.predict(new).tolist() if new else ()))
    says = np.array([known[pair] for pair in pairs]).reshape(first.shape)
    order = np.argsort(-says, axis=1, kind="stable")
    anew = np.full(scores.shape, -np.inf)
    np.put_along_axis(anew, np.take_along_axis(first, order, axis=1), -np.arange(first.shape[1], dtype=float), axis=1)
    return anew


def described(found: np.ndarray, reference: np.ndarray) -> dict:
    """The mean, the share of the reference's mean, and the 95% intervals of both over the queries."""
    drawn = np.random.default_rng(0).integers(len(found), size=(ROUNDS, len(found)))
    means, shares = found[drawn].mean(1), found[drawn].mean(1) / reference[drawn].mean(1)
    return {
        "ndcg": [found.mean(), *np.quantile(means, (0.025, 0.975))],
        "share": [found.mean() / reference.mean(), *np.quantile(shares, (0.025, 0.975))],
    }


def gained(found: np.ndarray, before: np.ndarray) -> dict:
    """The mean, and its difference to that of the same queries before, with a 95% interval over them."""
    gains = (found - before)[np.random.default_rng(0).integers(len(found), size=(ROUNDS, len(found)))].mean(1)
    return {"ndcg": found.mean(), "gain": [(found - before).mean(), *np.quantile(gains, (0.025, 0.975))]}


def page(found: list[dict]) -> list[str]:
    kinds, names = [kind["kind"].replace("_", " ") for kind in found], list(found[0]["scores"])

    def cells(name: str, way: str, number: str) -> list[str]:
        scores = [kind["scores"][name].get(way) for kind in found]
        return ["{:.3f} ({:.3f} to {:.3f})".format(*each[number]) if each else "-" for each in scores]

    by_way = {
        way: [[name, *cells(name, way, "ndcg")] for name in names if way in found[0]["scores"][name]]
        for way in (ALONE, TOGETHER)
    }
    by_way[ALONE].insert(0, ["queries", *(kind["queries"] for kind in found)])
    paragraphs = [
        "# What a small model keeps of its teacher, by kind of text",
        "Searches of kinds whose texts are in no text or pair of the shipped model. The files that begin with `test` "
        "have chosen nothing; those with `choose` chose the model.",
        "nDCG@10, with 95% intervals over queries:",
        *(table([way, *kinds], rows) for way, rows in by_way.items()),
        "As a share of the teacher (with BM25: of both together), with 95% intervals over queries:",
    ]
    for way in WAYS:
        rows = [[name, *cells(name, way, "share")] for name in names if name != TEACHER]
        rows = [row for row in rows if set(row[1:]) != {"-"}]
        paragraphs += [table([way, *kinds], rows)] if rows else []
    reranked_kinds = [kind for kind in found if RERANKED in kind["scores"][TEACHER]]
    for title in reranked_kinds[0]["scores"][TEACHER][RERANKED] if reranked_kinds else ():
        read_behind = [name for name in names if RERANKED in reranked_kinds[0]["scores"][name]]
        by_name = {name: [kind["scores"][name][RERANKED][title] for kind in reranked_kinds] for name in read_behind}
        rows = [
            [name, *("{:.3f}, {:+.3f} ({:+.3f} to {:+.3f})".format(each["ndcg"], *each["gain"]) for each in of_kinds)]
            for name, of_kinds in by_name.items()
        ]
        queries = ["queries", *(kind["reranked queries"] for kind in reranked_kinds)]
        paragraphs += [
            f"What each of them found with BM25 (BM25: alone), of which {title} ordered the first {FIRST} anew. "
            "nDCG@10, and what it gains on the same queries, with 95% intervals over them:",
            table([title, *(kind["kind"].replace("_", " ") for kind in reranked_kinds)], [queries, *rows]),
        ]
    return paragraphs


def main(args: list[str] | None = None) -> None:
    run_benchmark("kinds", measure, page, packages=("sentence-transformers", "lancedb"), kind=KindsSettings, args=args)


if __name__ == "__main__":
    main()

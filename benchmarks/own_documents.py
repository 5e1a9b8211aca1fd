"""Whether a model that has learned from one's documents answers real questions better, and whether the recipe knows.

    python benchmarks/own_documents_data.py packages data/own_documents
    python benchmarks/own_documents.py --data data/own_documents

`retrieval_from_documents` sees the documents of each collection, and neither it nor the model has seen the questions.
With `--teacher MODEL` it also learns from the teacher.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from runner import Settings, StoredRuns, run_benchmark, table

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.search import index, retrieval_from_documents
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.own_documents import KEYWORD_WEIGHT, STAGES
from neobert_hf.search.vector_index import open_index


CUTOFF, ROUNDS = 10, 2_000


@dataclass(kw_only=True)
class OwnDocumentsBenchmark(Settings):
    data: str = field(
        default="data/own_documents", metadata={"help": "folder that own_documents_data.py wrote", "path": True}
    )
    teacher: str | None = field(
        default=None, metadata={"help": "the teacher of the model, to learn from it, too", "path": "or Hub id"}
    )
    model: str = field(default="models/distilled", metadata={"help": "folder of the model", "path": True})
    runs: str = field(default="runs/own_documents", metadata={"help": "folder for the runs", "path": True})


def measure(settings: OwnDocumentsBenchmark) -> list[dict]:
    stored, found = StoredRuns(Path(settings.results, "single_runs", "own_documents.json")), []
    for teacher in dict.fromkeys((None, settings.teacher)):
        for collection in sorted(Path(settings.data).iterdir()):
            name = (
                f"{collection.name}, {'pairs' if teacher is None else 'teacher'}, {model_fingerprint(settings.model)}"
            )
            found.append(stored.result(name, lambda: learn(settings, collection, teacher)))  # noqa: B023
            print(found[-1], flush=True)
    return found


def learn(settings: OwnDocumentsBenchmark, collection: Path, teacher: str | None) -> dict:
    """What the recipe says of a collection, and what its questions find before and after."""
    output, began = (
        Path(settings.runs, f"{collection.name}_{'pairs' if teacher is None else 'teacher'}"),
        time.process_time(),
    )
    resumed = output.exists()
    documents = {"source": collection / "documents.jsonl", "id_column": "id"}
    result = retrieval_from_documents(
        documents=documents["source"], id_column="id", model=settings.model, teacher=teacher, output_dir=output
    )
    seconds = time.process_time() - began
    index(index=output.with_suffix(".before"), model=settings.model, name="documents", **documents)
    questions = Dataset.from_parquet(str(collection / "questions.parquet"))
    before = answers(output.with_suffix(".before"), settings.model, questions)
    # The recipe's choice, and what training did whether it was chosen or not.
    after = before if str(result.model) == settings.model else answers(result.output, result.model, questions)
    index(index=output.with_suffix(".after"), model=output / "trained/model", name="documents", **documents)
    trained = answers(output.with_suffix(".after"), output / "trained/model", questions)
    report = json.loads((output / "report.json").read_text())
    return {
        "collection": collection.name.replace("_", " "),
        "teacher": teacher is not None,
        "questions": len(questions),
        "seconds": None if resumed else seconds,
        "chosen": Path(result.model).name if after is not before else "as it was",
        "held_out": [report["models"][name] for name in STAGES.values()],
        "words": before["words"].mean(),
        "before": {name: before[name].mean() for name in ("alone", "with_words")},
        "after": {name: gain(after[name], before[name]) for name in ("alone", "with_words")},
        "trained": {name: gain(trained[name], before[name]) for name in ("alone", "with_words")},
    }


def answers(folder: Path, model: str | Path, questions: Dataset) -> dict[str, np.ndarray]:
    """nDCG@10 of each question: by the model alone, with BM25, and by BM25 alone."""
    database, encoder = open_index(str(folder)), PassageEncoder(EmbeddingSettings(str(model)))
    found: dict[str, list[float]] = {"alone": [], "with_words": [], "words": []}
    for text, right, vector in zip(
        questions["query"], questions["document"], encoder.embed("query", questions["query"][:])
    ):
        hits = {
            "alone": database.find(text, vector, CUTOFF),
            "with_words": database.find(text, vector, CUTOFF, KEYWORD_WEIGHT),
            "words": [hit for hit, _ in database.match(text, vector, 20 * CUTOFF)],
        }
        for name, each in hits.items():
            documents = list(dict.fromkeys(hit.document for hit in each))[:CUTOFF]
            found[name].append(1 / np.log2(2 + documents.index(right)) if right in documents else 0.0)
    database.close()
    return {name: np.array(scores) for name, scores in found.items()}


def gain(after: np.ndarray, before: np.ndarray) -> tuple[float, float, float]:
    """The mean difference, and its 95% interval over the questions."""
    difference = after - before
    drawn = np.random.default_rng(0).integers(len(difference), size=(ROUNDS, len(difference)))
    low, high = np.quantile(difference[drawn].mean(1), (0.025, 0.975))
    return difference.mean(), low, high


def page(found: list[dict]) -> list[str]:
    def interval(numbers: tuple[float, float, float]) -> str:
        return "{:+.3f} ({:+.3f} to {:+.3f})".format(*numbers)

    rows = [
        [
            each["collection"],
            each["questions"],
            f"{each['words']:.3f}",
            *(f"{each['before'][name]:.3f}" for name in ("alone", "with_words")),
            "teacher" if each["teacher"] else "pairs",
            each["chosen"],
            *(interval(each["after"][name]) for name in ("alone", "with_words")),
            f"{each['seconds']:.0f} s" if each["seconds"] else "not measured",
        ]
        for each in found
    ]
    columns = [
        "collection",
        "questions",
        "BM25",
        "before",
        "with BM25",
        "learned from",
        "chosen",
        "alone",
        "with BM25",
        "CPU",
    ]
    pairs = [
        [
            each["collection"],
            "teacher" if each["teacher"] else "pairs",
            *(f"{scores['ndcg_at_10']:.3f}, {scores['ndcg_at_10_with_words']:.3f}" for scores in each["held_out"][:2]),
            *(interval(each["trained"][name]) for name in ("alone", "with_words")),
        ]
        for each in found
    ]
    return [
        "# Does learning from one's own documents help real questions?",
        "nDCG@10 of the questions of FAQs among the answers and the pages of the same documentation, which "
        "`retrieval_from_documents` has seen without the questions. Differences have 95% intervals over questions. "
        "Time is that of all threads together; it is not measured where the training was there already.",
        table(columns, rows),
        "nDCG@10 of the held-out pairs, alone and with BM25, and what the questions say of the model after all of the "
        "training, whether it was chosen or not:",
        table(["collection", "learned from", "before", "after", "questions, whole", "with BM25"], pairs),
    ]


def main(args: list[str] | None = None) -> None:
    packages = ("sentence-transformers", "lancedb")
    run_benchmark("own_documents", measure, page, packages=packages, kind=OwnDocumentsBenchmark, args=args)


if __name__ == "__main__":
    main()

"""Search one's own documents with an embedding model that is trained on nothing but their own titles and sections.

It calls other recipes, each of which can also be run by itself on the files in `output_dir`: `make_pairs`,
`finetune_embeddings` twice, `run_mteb` and `index`.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import output_folder
from neobert_hf.common.settings import settings_of_keywords
from neobert_hf.data.sources import is_table, local_files
from neobert_hf.embeddings import finetune_embeddings, make_pairs
from neobert_hf.evaluation.mteb import run_mteb
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.keywords import ndcg_with_words
from neobert_hf.search.recipe import index


# The models that are compared, and what the report calls them.
STAGES = {
    "before": "before fine-tuning",
    "pairs_alone": "after, on the pairs alone",
    "hard_negatives": "after, with hard negatives",
}
# A short line above a paragraph is a title, too, in documents that do not mark theirs.
KINDS = ["title", "unmarked_title", "sentence"]
# Of BM25, added to the cosine; each is tried in a hybrid search.
KEYWORD_WEIGHTS = [0.5, 2.0]
BM25, HYBRID = "BM25, which knows words only", "both, BM25 with weight {:g}"
WRITES = ("pairs*", "datasets.yaml", "tasks.yaml", "hard_negatives", "evaluation", "index", "report.json")


@dataclass
class OwnDocumentsSettings:
    """The documents, the encoder, and the size of the training."""

    documents: str = field(
        metadata={"help": "text or Markdown files, Parquet or JSON lines: a file, pattern or folder", "path": True}
    )
    model: str = field(metadata={"help": "path or Hub id of an encoder", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder for the pairs, models, numbers and the index", "path": True})
    column: str = field(default="text", metadata={"help": "column of the text, unless the documents are text files"})
    id_column: str | None = field(default=None, metadata={"help": "column that identifies a row in the index"})
    held_out: float = field(
        default=0.1, metadata={"help": "share of the documents that are kept out of training, for evaluation"}
    )
    training: str = field(
        default="configs/embeddings/small.yaml",
        metadata={"help": "YAML file with settings of finetune_embeddings", "path": True},
    )
    max_steps: int | None = field(
        default=None, metadata={"help": "optimizer steps of each of the two trainings; as in `training` if unset"}
    )
    negatives: int = field(default=4, metadata={"help": "maximum number of hard negatives per pair"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    @property
    def output(self) -> Path:
        return Path(self.output_dir)

    def training_settings(self, model: str | Path, name: str) -> dict[str, Any]:
        """The settings of one of the two trainings, whose folder has this name."""
        settings = {"config": self.training, "datasets": str(self.output / "datasets.yaml"), "model": str(model)}
        settings |= {"output_dir": str(self.output / name), "trust_remote_code": self.trust_remote_code}
        settings |= {} if self.max_steps is None else {"max_steps": self.max_steps}
        return settings if torch.accelerator.is_available() else settings | {"use_cpu": True}


@recipe
def retrieval_from_documents(settings: OwnDocumentsSettings) -> Result:
    """Train an embedding model on nothing but your documents' titles and sections, and index them with it.

    Called again after an interruption, every step goes on where it stopped and gives the same numbers. If documents
    have changed since, old and new ones are not mixed: choose another `output_dir`.

    Returns:
        The model that finds the held-out pairs best, and nDCG@10 of it (`scores`), of the model `before` and of BM25
        alone (`baseline`); the folder of the index is `output`.
    """
    # 1. Settings, including those of the training
    check_model_exists(settings.model, "model")
    local_files(settings.documents)
    trained = settings_of_keywords(
        finetune_embeddings.kinds, settings.training_settings(settings.model, "pairs_alone"), "finetune_embeddings"
    )
    max_length = next(each.max_length for each in trained if hasattr(each, "max_length"))
    inputs, sources = {"model": settings.model, "training": settings.training}, {"documents": settings.documents}
    with output_folder(settings.output, "retrieval_from_documents", WRITES, inputs, sources):
        # 2. Pairs of a title and its section, or of a sentence and its paragraph; some whole documents are held out
        print("1. Pairs of texts from the documents", flush=True)
        make_pairs_of_documents(settings)
        describe_pairs(settings.output)

        # 3. Retrieval with the encoder as it is, before fine-tuning
        print("2. Held-out pairs before fine-tuning", flush=True)
        evaluate(settings, settings.model, "before", max_length)

        # 4. Fine-tuning with in-batch negatives: each query against the other texts of its batch
        print("3. Fine-tuning on the pairs", flush=True)
        first = finetune_embeddings(**settings.training_settings(settings.model, "pairs_alone")).model
        evaluate(settings, first, "pairs_alone", max_length)

        # 5. Fine-tuning continues with hard negatives: texts that this model takes for positives
        print("4. Fine-tuning with hard negatives", flush=True)
        mining = {"miner": str(first), "negatives": settings.negatives}
        second = finetune_embeddings(**settings.training_settings(first, "hard_negatives"), **mining).model
        evaluate(settings, second, "hard_negatives", max_length)

        # 6. The index of all documents, with the model that scores best on the held-out pairs: few pairs can do harm
        print("5. The index", flush=True)
        scores = read_scores(settings.output)
        best = max(scores, key=scores.get)
        model = {"before": settings.model, "pairs_alone": first, "hard_negatives": second}[best]
        index_documents(settings, model)

        # 7. Numbers, and the command for a search
        print("6. Numbers", flush=True)
        by_words, by_weight = report(settings, scores, best, model)
    print(f"Ask it:\n  {query_command(settings, max(by_weight, key=by_weight.get))}")
    ndcg, before, baseline = ({"ndcg_at_10": score} for score in (scores[best], scores["before"], by_words))
    return Result(Path(model), ndcg, before, baseline, output=settings.output / "index")


def make_pairs_of_documents(settings: OwnDocumentsSettings) -> None:
    """Write `pairs.parquet` and `pairs_held_out.parquet`, again if an earlier run has done so."""
    for name in ("pairs.parquet", "pairs_held_out.parquet"):
        (settings.output / name).unlink(missing_ok=True)
    pairs = {"output": settings.output / "pairs.parquet", "kinds": KINDS, "held_out": settings.held_out}
    make_pairs(source=settings.documents, column=settings.column, **pairs)


def describe_pairs(output: Path) -> None:
    """Describe the pairs for the training (`datasets.yaml`) and for the evaluation (`tasks.yaml`)."""
    columns = {"query": "query", "positive": "positive", "instruction": ""}
    train, held_out = output / "pairs.parquet", output / "pairs_held_out.parquet"
    datasets = {
        "train": {"documents": {"source": train.name} | columns},
        "evaluation": {"retrieval": {"source": held_out.name} | columns},
    }
    write_text(output / "datasets.yaml", yaml.safe_dump(datasets, sort_keys=False))
    # The positive of a query must be found among the texts of all documents, not only of the held-out ones.
    task = {"type": "Retrieval", "data": held_out.name, "corpus": train.name, "columns": {"document": "positive"}}
    write_text(output / "tasks.yaml", yaml.safe_dump({"HeldOutPairs": task}, sort_keys=False))


def evaluate(settings: OwnDocumentsSettings, model: str | Path, name: str, max_length: int) -> None:
    run_mteb(
        local_tasks=settings.output / "tasks.yaml",
        output_dir=settings.output / "evaluation",
        model=model,
        name=name,
        max_length=max_length,
        trust_remote_code=settings.trust_remote_code,
    )


def index_documents(settings: OwnDocumentsSettings, model: str | Path) -> None:
    index(
        index=settings.output / "index",
        model=model,
        source=settings.documents,
        name="documents" if is_table(settings.documents) else None,
        column=settings.column,
        id_column=settings.id_column,
        trust_remote_code=settings.trust_remote_code,
    )


def read_scores(output: Path) -> dict[str, float]:
    """nDCG@10 of the three models on the held-out pairs, by the names of their evaluations."""
    files = {name: output / "evaluation" / name / "HeldOutPairs.json" for name in STAGES}
    return {name: json.loads(file.read_text(encoding="utf-8"))["score"] for name, file in files.items()}


def report(
    settings: OwnDocumentsSettings, scores: dict[str, float], best: str, model: str | Path
) -> tuple[float, dict[float, float]]:
    """Print nDCG@10 on the held-out pairs for the models, BM25 and hybrid search, and write it to `report.json`.

    Returns:
        That of BM25 alone, and those of the indexed model with each weight of BM25, 0 for the model alone.
    """
    output = settings.output
    train, held_out = (Dataset.from_parquet(str(output / name)) for name in ("pairs.parquet", "pairs_held_out.parquet"))
    texts = list(dict.fromkeys([*held_out["positive"], *train["positive"]]))
    encoder = PassageEncoder(EmbeddingSettings(str(model)), trust_remote_code=settings.trust_remote_code)
    by_words, by_weight = ndcg_with_words(
        encoder, held_out["query"][:], held_out["positive"][:], texts, KEYWORD_WEIGHTS
    )
    by_weight = {0.0: scores[best]} | by_weight
    named = {words: scores[name] for name, words in STAGES.items()} | {BM25: by_words}
    named |= {HYBRID.format(weight): by_weight[weight] for weight in KEYWORD_WEIGHTS}
    found = {"queries": len(held_out), "texts": len(texts), "ndcg_at_10": named, "indexed": best}
    write_json(output / "report.json", found)
    print(
        f"nDCG@10 of {len(held_out):,} held-out queries among {len(texts):,} texts, also in {output / 'report.json'}:"
    )
    for words, score in named.items():
        print(f"  {words:<32}{score:.3f}")
    print(f"The index is that of the best model, {model}.")
    return by_words, by_weight


def query_command(settings: OwnDocumentsSettings, keyword_weight: float) -> str:
    query = ["neobert-hf", "query", "--index", str(settings.output / "index"), "--text", "..."]
    query += ["--keyword_weight", f"{keyword_weight:g}"] if keyword_weight else []
    query += ["--trust_remote_code", "true"] if settings.trust_remote_code else []
    return shlex.join(query)

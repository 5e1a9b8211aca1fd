"""Search your documents with an embedding model that is trained on nothing but their own titles and sections.

    python examples/retrieval_from_documents.py --documents docs --model runs/small/model --output_dir runs/docs

The script runs other recipes of this folder: `make_pairs.py`, `finetune_embeddings.py` twice, `run_mteb.py` and
`semantic_search.py`. Each of them can also be run by itself on the files in `output_dir`, with all of its settings.
They need `pip install 'neobert_hf[eval,search]'`.

After an interruption, run the same command again: every step continues where it stopped and gives the same numbers. If
documents have changed since, the script refuses to mix old and new ones: choose another `output_dir`.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import finetune_embeddings
import make_pairs
import run_mteb
import semantic_search
import torch
import yaml
from datasets import Dataset

from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.paths import check_exists
from neobert_hf.common.run import output_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.arguments import EmbeddingArguments
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.keywords import ndcg_with_words


# The models that are compared, and what the report calls them.
STAGES = {
    "before": "before fine-tuning",
    "pairs_alone": "after, on the pairs alone",
    "hard_negatives": "after, with hard negatives",
}
# A short line above a paragraph is a title, too, in documents that do not mark theirs.
KINDS = ("title", "unmarked_title", "sentence")
# Of BM25, added to the cosine; each is tried in a hybrid search.
KEYWORD_WEIGHTS = [0.5, 2.0]
BM25, HYBRID = "BM25, which knows words only", "both, BM25 with weight {:g}"


@dataclass
class RetrievalArguments:
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
        metadata={"help": "settings of examples/finetune_embeddings.py", "path": True},
    )
    max_steps: int | None = field(
        default=None, metadata={"help": "optimizer steps of each of the two trainings; as in `training` if unset"}
    )
    negatives: int = field(default=4, metadata={"help": "maximum number of hard negatives per pair"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


def main(args: list[str] | None = None) -> None:
    # 1. Settings, including those of the training
    (settings,) = parse_config(RetrievalArguments, args=args)
    check_exists(settings.model, "model")
    output = Path(settings.output_dir)
    max_length = check_training(settings)

    writes = ("pairs*", "datasets.yaml", "tasks.yaml", "hard_negatives", "evaluation", "index", "report.json")
    inputs, sources = {"model": settings.model, "training": settings.training}, {"documents": settings.documents}
    with output_folder(output, "retrieval_from_documents.py", writes, inputs, sources):
        # 2. Pairs of a title and its section, or of a sentence and its paragraph; some whole documents are held out
        print("1. Pairs of texts from the documents", flush=True)
        make_pairs_of_documents(settings)
        describe_pairs(output)

        # 3. Retrieval with the encoder as it is, before fine-tuning
        print("2. Held-out pairs before fine-tuning", flush=True)
        evaluate(settings, settings.model, "before", max_length)

        # 4. Fine-tuning with in-batch negatives: each query against the other texts of its batch
        print("3. Fine-tuning on the pairs", flush=True)
        finetune_embeddings.main(training_flags(settings, settings.model, output / "pairs_alone"))
        first = output / "pairs_alone" / "model"
        evaluate(settings, str(first), "pairs_alone", max_length)

        # 5. Fine-tuning continues with hard negatives: texts that this model takes for positives
        print("4. Fine-tuning with hard negatives", flush=True)
        mining = ["--miner", str(first), "--negatives", str(settings.negatives)]
        finetune_embeddings.main([*training_flags(settings, str(first), output / "hard_negatives"), *mining])
        evaluate(settings, str(output / "hard_negatives" / "model"), "hard_negatives", max_length)

        # 6. The index of all documents, with the model that scores best on the held-out pairs: few pairs can do harm
        print("5. The index", flush=True)
        scores = read_scores(output)
        best = max(scores, key=scores.get)
        model = settings.model if best == "before" else str(output / best / "model")
        index_documents(settings, model)

        # 7. Numbers, and the command for a search
        print("6. Numbers", flush=True)
        keyword_weight = report(settings, scores, best, model)
    query = ["python", "examples/semantic_search.py", "query", "--index", str(output / "index"), "--text", "..."]
    query += ["--keyword_weight", f"{keyword_weight:g}"] if keyword_weight else []
    query += ["--trust_remote_code", "true"] if settings.trust_remote_code else []
    print(f"Ask it:\n  {shlex.join(query)}")


def check_training(settings: RetrievalArguments) -> int:
    """Check the settings of the training before any work starts. Returns `max_length`, also used by the evaluations."""
    flags = training_flags(settings, settings.model, Path(settings.output_dir))
    training, _ = parse_config(finetune_embeddings.DenseArguments, EmbeddingArguments, args=flags)
    return training.max_length


def training_flags(settings: RetrievalArguments, model: str, output_dir: Path) -> list[str]:
    """The command line of one of the two trainings."""
    flags = ["--config", settings.training, "--datasets", str(Path(settings.output_dir, "datasets.yaml"))]
    flags += ["--model", model, "--output_dir", str(output_dir)]
    flags += ["--trust_remote_code", str(settings.trust_remote_code)]
    if settings.max_steps is not None:
        flags += ["--max_steps", str(settings.max_steps)]
    return flags if torch.accelerator.is_available() else [*flags, "--use_cpu", "true"]


def make_pairs_of_documents(settings: RetrievalArguments) -> None:
    """Write `pairs.parquet` and `pairs_held_out.parquet`, again if an earlier run has done so."""
    for name in ("pairs.parquet", "pairs_held_out.parquet"):
        Path(settings.output_dir, name).unlink(missing_ok=True)
    flags = ["--source", settings.documents, "--column", settings.column, "--kinds", *KINDS]
    flags += ["--held_out", str(settings.held_out), "--output", str(Path(settings.output_dir, "pairs.parquet"))]
    make_pairs.main(flags)


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


def evaluate(settings: RetrievalArguments, model: str, name: str, max_length: int) -> None:
    output = Path(settings.output_dir)
    flags = ["--local_tasks", str(output / "tasks.yaml"), "--output_dir", str(output / "evaluation")]
    flags += ["--model", model, "--name", name, "--max_length", str(max_length)]
    run_mteb.main([*flags, "--trust_remote_code", str(settings.trust_remote_code)])


def index_documents(settings: RetrievalArguments, model: Path) -> None:
    flags = ["index", "--index", str(Path(settings.output_dir, "index")), "--model", str(model)]
    flags += ["--source", settings.documents, "--column", settings.column]
    flags += ["--trust_remote_code", str(settings.trust_remote_code)]
    semantic_search.main(flags if settings.id_column is None else [*flags, "--id_column", settings.id_column])


def read_scores(output: Path) -> dict[str, float]:
    """nDCG@10 of the three models on the held-out pairs, by the names of their evaluations."""
    files = {name: output / "evaluation" / name / "HeldOutPairs.json" for name in STAGES}
    return {name: json.loads(file.read_text(encoding="utf-8"))["score"] for name, file in files.items()}


def report(settings: RetrievalArguments, scores: dict[str, float], best: str, model: str) -> float:
    """Print nDCG@10 on the held-out pairs for the models, BM25 and hybrid search, and write it to `report.json`.

    Returns:
        The weight of BM25 that is best for the indexed model; 0 if the model alone is best.
    """
    output = Path(settings.output_dir)
    train, held_out = (Dataset.from_parquet(str(output / name)) for name in ("pairs.parquet", "pairs_held_out.parquet"))
    texts = list(dict.fromkeys([*held_out["positive"], *train["positive"]]))
    encoder = PassageEncoder(EmbeddingSettings(model), trust_remote_code=settings.trust_remote_code)
    by_words, by_weight = ndcg_with_words(
        encoder, held_out["query"][:], held_out["positive"][:], texts, KEYWORD_WEIGHTS
    )
    by_weight = {0.0: scores[best]} | by_weight
    scores = {words: scores[name] for name, words in STAGES.items()} | {BM25: by_words}
    scores |= {HYBRID.format(weight): by_weight[weight] for weight in KEYWORD_WEIGHTS}
    found = {"queries": len(held_out), "texts": len(texts), "ndcg_at_10": scores, "indexed": best}
    write_json(output / "report.json", found)
    print(
        f"nDCG@10 of {len(held_out):,} held-out queries among {len(texts):,} texts, also in {output / 'report.json'}:"
    )
    for words, score in scores.items():
        print(f"  {words:<32}{score:.3f}")
    print(f"The index is that of the best model, {model}.")
    return max(by_weight, key=by_weight.get)


if __name__ == "__main__":
    run_script(main)

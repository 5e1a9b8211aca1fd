"""Small runs of the four recipes that train embedding models and rerankers."""

import json
from pathlib import Path

from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel

from neobert_hf.common.fingerprints import file_checksum
from tests.helpers import examples
from tests.helpers.models import ROOT


SMALL = {
    "max_length": 48,
    "max_steps": 12,
    "warmup_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "seed": 0,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "eval_steps": 6,
    # Every checkpoint gets a model card, which takes longer than the steps.
    "save_steps": 6,
    "report_to": "none",
}

# Recipe, configuration, and the class that loads the model.
KINDS = {
    "dense": ("finetune_embeddings", "small.yaml", SentenceTransformer),
    "sparse": ("train_sparse_encoder", "sparse.yaml", SparseEncoder),
    "multi_vector": ("train_multi_vector_encoder", "multi_vector.yaml", MultiVectorEncoder),
    "reranker": ("train_reranker", "reranker.yaml", CrossEncoder),
}


RECIPES = KINDS | {"contextual": ("train_contextual", "contextual_small.yaml", SentenceTransformer)}


def to_flags(kind: str, settings: dict) -> list[str]:
    """The command line of a small run, with these settings beside those of `SMALL` and of the kind's configuration."""
    return examples.to_flags({"config": ROOT / "configs" / "embeddings" / RECIPES[kind][1]} | SMALL | settings)


def run(kind: str, settings: dict) -> list[dict]:
    """Train in this process and return the log."""
    examples.load_example(RECIPES[kind][0]).main(to_flags(kind, settings))
    return json.loads((Path(settings["output_dir"]) / "log.json").read_text())


def load(kind: str, folder: Path, **options):
    """The model that a run left in this folder."""
    return RECIPES[kind][2](str(folder / "model"), device="cpu", **options)


def files_of(output: Path) -> dict[str, str]:
    """A checksum of the log and of every file of the model."""
    files = [output / "log.json", *(file for file in output.glob("model/**/*") if file.is_file())]
    return {str(file.relative_to(output)): file_checksum(file) for file in files}


def losses_of(log: list[dict]) -> list[float]:
    return [entry["loss"] for entry in log if "loss" in entry]


def record_prompts(monkeypatch) -> list[tuple[str | None, str]]:
    """Every text that models read from now on, after what stood before it."""
    seen, preprocess = [], BaseModel.preprocess

    def record(self, inputs, prompt=None, **kwargs):
        seen.extend((prompt, text) for text in inputs)
        return preprocess(self, inputs, prompt=prompt, **kwargs)

    monkeypatch.setattr(BaseModel, "preprocess", record)
    return seen

"""Small runs of examples/run_glue.py: an encoder, data in GLUE's form, and what a run leaves in its folder."""

import json
import random
import string
from pathlib import Path

import torch
from datasets import ClassLabel, Dataset, Features, Value
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.evaluation.glue.recipe import best_first
from neobert_hf.evaluation.glue.tasks import choose_tasks, load_task
from tests.helpers.models import ROOT


TASKS = choose_tasks(str(ROOT / "configs" / "glue" / "tasks.yaml"), ["all"])

# With dropout, so that a resume has to restore its generator.
SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_length": 64,
    "dropout": 0.1,
    "decoder_init_range": 0.2,
    "embedding_init_range": 1.0,
}
SMALL = {
    "task_config": ROOT / "configs" / "glue" / "tasks.yaml",
    "published": ROOT / "configs" / "glue" / "table3.yaml",
    "name": "small",
    "max_length": 32,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
    "eval_steps": 10,
    "use_cpu": True,
}
GRID = {
    "grid": True,
    "per_device_train_batch_size": None,
    "learning_rate": None,
    "weight_decay": None,
    "batch_sizes": "8 16",
    "learning_rates": "0.003 0.0001",
    "weight_decays": "0.01",
}

# How a second sentence begins tells its relation to the first, in MNLI, and how a sentence begins its class, in SST-2.
RELATIONS = ("1", "2 2", "3 4")
TRAINING_ROWS = 160


def save_encoder(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0, hidden_size: int = 32) -> Path:
    torch.manual_seed(seed)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    NeoBERTForMaskedLM(NeoBERTConfig(hidden_size=hidden_size, **SIZES, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rows() -> dict[str, dict[str, list[dict]]]:
    """Rows of three tasks by split, in the Hub's column names."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(50)]

    def text() -> str:
        return " ".join(draw.choices(words, k=6))

    def pairs(number):
        drawn = [draw.choice([0, 1, 2]) for _ in range(number)]
        return [{"premise": text(), "hypothesis": f"{RELATIONS[one]} {text()}", "label": one} for one in drawn]

    def sentences(number):
        return [{"sentence": f"{RELATIONS[i % 2]} {text()}", "label": i % 2} for i in range(number)]

    def similar(number):
        scores = [draw.choice([0.0, 1.5, 3.0, 5.0]) for _ in range(number)]
        return [
            {"sentence1": text(), "sentence2": " ".join(["7"] * int(score) + ["8"]), "label": score} for score in scores
        ]

    mnli = {"train": TRAINING_ROWS + 40, "validation_matched": 30, "validation_mismatched": 20}
    return {
        "mnli": {split: pairs(number) for split, number in mnli.items()},
        "sst2": {"train": sentences(TRAINING_ROWS), "validation": sentences(30)},
        "stsb": {"train": similar(TRAINING_ROWS), "validation": similar(30)},
    }


def write_rows(rows: dict[str, dict[str, list[dict]]], folder: Path) -> None:
    """As on the Hub: Parquet with named labels, the training split in two files; and SST-2 as JSON lines."""
    for task, splits in rows.items():
        (folder / task).mkdir()
        for split, part in splits.items():
            if task == "sst2":
                (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
                continue
            label = ClassLabel(names=TASKS[task].labels) if TASKS[task].labels else Value("float32")
            features = Features({name: Value("string") for name in TASKS[task].texts} | {"label": label})
            table = Dataset.from_list(part, features=features)
            if split == "train":
                table.select(range(100)).to_parquet(folder / task / "train-00000-of-00002.parquet")
                table.select(range(100, len(part))).to_parquet(folder / task / "train-00001-of-00002.parquet")
            else:
                table.to_parquet(folder / task / f"{split}.parquet")


def results_of(folder: Path) -> dict[str, dict]:
    """The results of all runs, by run."""
    results = [json.loads(file.read_text()) for file in sorted((folder / "small").glob("*/*.json"))]
    return {result["run"]: result for result in results}


def best_of(folder: Path, task: str) -> dict:
    return best_first(folder / "small", task)[0]


def model_folder(folder: Path, task: str) -> Path:
    return folder / "small" / best_of(folder, task)["run"] / "model"


def predictions_of(folder: Path, data_dir: Path, task: str, split: str) -> tuple[list, list]:
    """With Transformers alone, from the saved model."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    part = load_task(TASKS[task], str(data_dir))[split]
    texts = [part[column][:] for column in part.column_names if column != "label"]
    with torch.no_grad():
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        logits = model(**inputs).logits
    return (logits.argmax(-1) if TASKS[task].labels else logits[:, 0].double()).tolist(), part["label"][:]

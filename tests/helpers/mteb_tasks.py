"""Models, texts and runs of the tests of MTEB."""

import json
import random
from pathlib import Path

import torch
import yaml
from datasets import Dataset

from tests.helpers.examples import load_example
from tests.helpers.models import ROOT, small_model
from tests.helpers.small_tokenizer import WORDS, tiny_tokenizer


run_mteb = load_example("run_mteb")
CONFIGS = ROOT / "configs" / "mteb"
INSTRUCTIONS = yaml.safe_load((CONFIGS / "instructions.yaml").read_text())


def save_model(folder: Path, seed: int, **changes) -> str:
    """Random weights; texts of the same words have similar embeddings even so, and scores are not chance."""
    model = small_model(**changes)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def random_texts(number: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS[:10], k=generator.randint(3, 9))) for _ in range(number)]


def write_rows(file: Path, **columns) -> None:
    dataset = Dataset.from_dict(columns)
    dataset.to_parquet(file) if file.suffix == ".parquet" else dataset.to_json(file)


def run_local(local: Path, model: str, output: Path, *flags: str) -> dict:
    """Evaluate on the tasks of a folder; the results of all models in the output folder, by model and task."""
    run_mteb.main(["--model", model, "--local_tasks", str(local / "tasks.yaml"), "--output_dir", str(output), *flags])
    return results_of(output)


def results_of(output: Path) -> dict:
    """What a report compares: type, metric and score, by model and task."""
    results = {}
    for file in sorted(output.glob("*/*.json")):
        result = json.loads(file.read_text())
        found = {name: result[name] for name in ("type", "metric", "score")}
        results.setdefault(file.parent.name, {})[result["task"]] = found
    return results

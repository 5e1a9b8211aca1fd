"""Small runs of examples/run_glue.py: data in GLUE's form."""

import random
import string
from pathlib import Path

from neobert_hf.evaluation.glue.tasks import choose_tasks
from tests.helpers import task_runs
from tests.helpers.models import ROOT


TASKS = choose_tasks(str(ROOT / "configs" / "glue" / "tasks.yaml"), ["all"])
SMALL = task_runs.SMALL | {
    "task_config": ROOT / "configs" / "glue" / "tasks.yaml",
    "published": ROOT / "configs" / "glue" / "table3.yaml",
    "name": "small",
    "weight_decay": 0.01,
}
# How a second sentence begins tells its relation to the first, in MNLI, and how a sentence begins its class, in SST-2.
RELATIONS = ("1", "2 2", "3 4")


def write_rows(folder: Path) -> Path:
    """Rows of three tasks as JSON lines, in the Hub's column names."""
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(50)]

    def text() -> str:
        return " ".join(draw.choices(words, k=6))

    def mnli(label: int) -> dict:
        return {"premise": text(), "hypothesis": f"{RELATIONS[label]} {text()}", "label": label}

    def sst2(label: int) -> dict:
        return {"sentence": f"{RELATIONS[label]} {text()}", "label": label}

    def stsb(score: float) -> dict:
        return {"sentence1": text(), "sentence2": " ".join(["7"] * int(score) + ["8"]), "label": score}

    for row, labels, splits in (
        (mnli, [0, 1, 2], {"train": 200, "validation_matched": 30, "validation_mismatched": 20}),
        (sst2, [0, 1], {"train": 160, "validation": 30}),
        (stsb, [0.0, 1.5, 3.0, 5.0], {"train": 160, "validation": 30}),
    ):
        for split, number in splits.items():
            rows = [row(draw.choice(labels)) for _ in range(number)]
            task_runs.write_json_lines(folder / row.__name__ / f"{split}.jsonl", rows)
    return folder

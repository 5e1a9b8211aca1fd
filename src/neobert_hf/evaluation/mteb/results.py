"""Evaluating a model on MTEB tasks, with each result in a file of its own."""

import json
import math
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

import mteb
from mteb.abstasks import AbsTask
from mteb.results import TaskResult
from tqdm.auto import tqdm

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.fingerprints import check_same_settings
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder, parts_of
from neobert_hf.evaluation.results import ADVICE


class Results(mteb.ResultCache):
    """MTEB's cache of results, in which a result is taken only if it depends on the same as this run.

    MTEB's own knows a model by its name, and takes a result whatever prompts or data it came from. Here a file
    `<task>.json` also holds everything that its result depends on, and is written whole.

    Args:
        folder: the folder of one model.
        settings: what all results of the model depend on; `model` is its fingerprint.
        encoder: the model, with the tasks of this run.

    Raises:
        SettingsMismatch: if the folder has a result of other weights or settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], encoder: InstructionEncoder):
        super().__init__(folder)
        self.settings = settings
        self.encoder = encoder
        # A row of the report is one model, also on the tasks that are not evaluated now.
        for file in folder.rglob("*.json"):
            stored = json.loads(file.read_text(encoding="utf-8"))["settings"]
            check_same_settings(file, {name: stored[name] for name in settings}, settings, ADVICE)
        for task in encoder.tasks:
            self.load_task_result(task)

    def settings_of(self, task: AbsTask) -> dict:
        """What the result of a task depends on."""
        return self.settings | {
            "type": task.metadata.type,
            "metric": task.metadata.main_score,
            "prompts": self.encoder.prompts_of(task.metadata),
            "dataset": " ".join(sorted(part.metadata.revision for part in parts_of(task))),
            # All parts of a task make their contexts in the same way.
            "context": self.encoder.context_settings(parts_of(task)[0]),
        }

    def find(self, name: str) -> tuple[AbsTask, Path]:
        """A task, or a part of one, and the file of its result. The report has only whole tasks."""
        if name in self.encoder.tasks:
            return self.encoder.tasks[name], self.cache_path / f"{name}.json"
        return self.encoder.parts[name], self.cache_path / "parts" / f"{name}.json"

    def load_task_result(self, task_name: str, *args, **kwargs) -> TaskResult | None:
        """The result of a task; None if there is none yet."""
        task, file = self.find(task_name)
        if not file.exists():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        check_same_settings(file, content["settings"], self.settings_of(task), ADVICE)
        return TaskResult.from_dict(content["result"])

    def save_to_cache(self, task_result: TaskResult, *args, **kwargs) -> None:
        """Store the result of a whole task. MTEB also asks for it after each subset."""
        task, file = self.find(task_result.task_name)
        if task_result.get_missing_evaluations(task):
            return
        score = float(task_result.get_score())
        if not math.isfinite(score):
            raise FloatingPointError(f"The score ({task.metadata.main_score}) is {score}.")
        settings = self.settings_of(task)
        content = {"task": task_result.task_name, "type": settings["type"], "metric": settings["metric"]}
        content |= {"score": score, "settings": settings, "result": task_result.to_dict()}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, json.loads(json.dumps(content, default=_to_json)))


def _to_json(value: Any) -> float | str:
    """The dates and NumPy numbers in MTEB's results."""
    return value.isoformat() if isinstance(value, datetime) else value.item()


def evaluate(results: Results, tasks: list[AbsTask], batch_size: int) -> dict[str, str]:
    """Evaluate on the tasks that have no result yet.

    Returns:
        The error of each task that failed, by its name. The other tasks are still evaluated.
    """
    failed = {}
    options = {"cache": results, "co2_tracker": False, "show_progress_bar": False}
    encoding = {"batch_size": batch_size, "show_progress_bar": True}
    for task in tqdm(tasks, desc="Tasks", unit="task"):
        name = task.metadata.name
        try:
            # Other processes may evaluate other tasks of the same model.
            with folder_lock(results.cache_path / name):
                mteb.evaluate(results.encoder, task, encode_kwargs=encoding, **options)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
    return failed

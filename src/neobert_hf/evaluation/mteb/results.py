"""Evaluating on MTEB tasks one by one, each result in a file of its own.

MTEB's cache knows a model by its name only, which all local models share, writes in place, and takes a result whatever
prompt or data it came from. Here a file holds what the result depends on and is written whole or not at all.
"""

import json
import math
import traceback
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import mteb
from mteb.abstasks import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.results import TaskResult
from tqdm.auto import tqdm

from neobert_hf.common.atomic_writes import write_text
from neobert_hf.common.results import check_same_settings, read_result
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder


@dataclass
class Settings:
    """What a result depends on, besides the task.

    Args:
        model: its fingerprint.
        dtype: of the encoder.
        max_length: tokens of a text.
        truncate_dim: dimensions that are kept; all if None.
    """

    model: str
    dtype: str
    max_length: int | None
    truncate_dim: int | None


# Of a result file.
KEYS = {"task", "type", "metric", "score", "settings", "result"}


def _plain(value) -> float | str:
    # Beside Python's own types there are dates and numbers of NumPy.
    return value.isoformat() if isinstance(value, datetime) else value.item()


def subtasks(task: AbsTask) -> list[AbsTask]:
    """The tasks that are evaluated for it: its parts, or itself."""
    return task.metadata.tasks if isinstance(task, AbsTaskAggregate) else [task]


class Results:
    """The results of one model, a JSON file each.

    Args:
        folder: of this model.
        settings: of this run. Results of other settings are refused, not overwritten and not reported.
        encoder: the model.
    """

    def __init__(self, folder: Path, settings: Settings, encoder: InstructionEncoder):
        self.folder = folder
        self.settings = settings
        self.encoder = encoder

    def check(self, tasks: list[AbsTask]) -> None:
        """Read all results that there are, before work begins.

        Raises:
            ResultError: if a file is of another model or other settings, or one of these tasks of another prompt or
                other data.
        """
        for file in self.folder.rglob("*.json"):
            stored = read_result(file, KEYS)["settings"]
            check_same_settings(file, {key: stored.get(key) for key in asdict(self.settings)}, asdict(self.settings))
        for task in tasks:
            for part in (task, *subtasks(task)):
                self._load(part, task)

    def evaluate(self, tasks: list[AbsTask], batch_size: int) -> dict[str, str]:
        """Evaluate on the tasks that have no result yet.

        Returns:
            The error of each task that failed, by its name. It does not keep the others from being evaluated.
        """
        failed = {}
        with tqdm(tasks, desc="Tasks", unit="task") as progress:
            for task in progress:
                progress.set_postfix_str(task.metadata.name)
                try:
                    self._evaluate(task, batch_size)
                except Exception as error:
                    traceback.print_exc()
                    failed[task.metadata.name] = f"{type(error).__name__}: {error}"
        return failed

    def _evaluate(self, task: AbsTask, batch_size: int) -> None:
        if self._load(task, task) is not None:
            return
        results = []
        for part in subtasks(task):
            result = self._load(part, task)
            if result is None:
                (result,) = mteb.evaluate(
                    self.encoder,
                    part,
                    cache=None,
                    co2_tracker=False,
                    encode_kwargs={"batch_size": batch_size, "show_progress_bar": True},
                    show_progress_bar=False,
                ).task_results
                self._save(part, task, result)
            results.append(result)
        if isinstance(task, AbsTaskAggregate):
            self._save(task, task, task.combine_task_results(results))

    def _file(self, part: AbsTask, task: AbsTask) -> Path:
        folder = self.folder / "parts" if part is not task else self.folder
        return folder / f"{part.metadata.name}.json"

    def _settings(self, part: AbsTask) -> dict:
        return asdict(self.settings) | {
            "prompt": self.encoder.prompt(part.metadata.name, None),
            "dataset": " ".join(sorted(subtask.metadata.revision for subtask in subtasks(part))),
        }

    def _load(self, part: AbsTask, task: AbsTask) -> TaskResult | None:
        file = self._file(part, task)
        if not file.is_file():
            return None
        content = read_result(file, KEYS)
        check_same_settings(file, content["settings"], self._settings(part))
        return TaskResult.from_dict(content["result"])

    def _save(self, part: AbsTask, task: AbsTask, result: TaskResult) -> None:
        scores = [score["main_score"] for split in result.scores.values() for score in split]
        score = float(sum(scores) / len(scores))
        if not math.isfinite(score):
            raise FloatingPointError(f"The score ({part.metadata.main_score}) is {score}.")
        content = {
            "task": part.metadata.name,
            "type": part.metadata.type,
            "metric": part.metadata.main_score,
            "score": score,
            "settings": self._settings(part),
            "result": result.to_dict(),
        }
        file = self._file(part, task)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(content, indent=1, default=_plain) + "\n")

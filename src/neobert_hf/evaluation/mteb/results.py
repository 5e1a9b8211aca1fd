"""Evaluating a model on MTEB tasks one by one, with each result in a file of its own.

MTEB's cache identifies a model only by its name, which all local models share. It writes in place, and reuses a result
whatever prompt or data it came from. Here a file also holds everything that its result depends on, and is written whole
or not at all.
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

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.fingerprints import check_same_settings
from neobert_hf.common.results import ADVICE, read_result
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder


# The keys of a result file.
RESULT_KEYS = {"task", "type", "metric", "score", "settings", "result"}


@dataclass
class ResultSettings:
    """Settings that the results of a model depend on, besides the task. `model` is its fingerprint."""

    model: str
    dtype: str
    max_length: int | None
    truncate_dim: int | None


def parts_of(task: AbsTask) -> list[AbsTask]:
    """The tasks that are evaluated for a task: its parts (12 of CQADupstackRetrieval), or the task itself."""
    return task.metadata.tasks if isinstance(task, AbsTaskAggregate) else [task]


class ResumableEvaluation:
    """The evaluation of one model. Results that are already in its folder are not computed again.

    Args:
        folder: the folder of this model: `<task>.json`, and `parts/<part>.json` for a task of several parts.
        settings: the settings of this run. Results of other settings are refused: neither overwritten nor reported.
        encoder: the model.
    """

    def __init__(self, folder: Path, settings: ResultSettings, encoder: InstructionEncoder):
        self.folder = folder
        self.settings = settings
        self.encoder = encoder

    def check(self, tasks: list[AbsTask]) -> None:
        """Before work begins, refuse results of another model or other settings, or of other prompts or data."""
        current = asdict(self.settings)
        for file in self.folder.rglob("*.json"):
            stored = read_result(file, RESULT_KEYS)["settings"]
            check_same_settings(file, {key: stored.get(key) for key in current}, current, ADVICE)
        for task in tasks:
            for part in (task, *parts_of(task)):
                self._load(part, self._file(task, part))

    def run(self, tasks: list[AbsTask], batch_size: int) -> dict[str, str]:
        """Evaluate on the tasks that have no result yet.

        Returns:
            The error of each task that failed, by its name. The other tasks are still evaluated.
        """
        failed = {}
        with tqdm(tasks, desc="Tasks", unit="task") as progress:
            for task in progress:
                progress.set_postfix_str(task.metadata.name)
                try:
                    # Other processes may evaluate other tasks of the same model.
                    with folder_lock(self.folder / task.metadata.name):
                        if self._load(task, self._file(task)) is None:
                            self._evaluate(task, batch_size)
                except Exception as error:
                    traceback.print_exc()
                    failed[task.metadata.name] = f"{type(error).__name__}: {error}"
        return failed

    def _evaluate(self, task: AbsTask, batch_size: int) -> None:
        results = []
        for part in parts_of(task):
            file = self._file(task, part)
            result = self._load(part, file)
            if result is None:
                encoding = {"batch_size": batch_size, "show_progress_bar": True}
                self.encoder.make_contexts(part, batch_size)
                options = {"cache": None, "co2_tracker": False, "show_progress_bar": False}
                (result,) = mteb.evaluate(self.encoder, part, encode_kwargs=encoding, **options).task_results
                self._save(part, file, result)
            results.append(result)
        if isinstance(task, AbsTaskAggregate):
            self._save(task, self._file(task), task.combine_task_results(results))

    def _file(self, task: AbsTask, part: AbsTask | None = None) -> Path:
        if part is None or part is task:
            return self.folder / f"{task.metadata.name}.json"
        return self.folder / "parts" / f"{part.metadata.name}.json"

    def _settings_of(self, task: AbsTask) -> dict:
        documents = self.encoder.document_prompts.get(task.metadata.name) or None
        # Each part of a task has its own contexts, but all are made in the same way.
        context = self.encoder.context_settings(parts_of(task)[0]) or None
        return asdict(self.settings) | {
            "prompt": self.encoder.prompt(task.metadata.name, None),
            "dataset": " ".join(sorted(part.metadata.revision for part in parts_of(task))),
            "document_prompt": documents,
            "context": context,
        }

    def _load(self, task: AbsTask, file: Path) -> TaskResult | None:
        if not file.is_file():
            return None
        content = read_result(file, RESULT_KEYS)
        stored, current = content["settings"], self._settings_of(task)
        # With another task type, the score on the same data is another metric.
        scored = {"type": task.metadata.type, "metric": task.metadata.main_score}
        check_same_settings(file, {name: content[name] for name in scored} | stored, scored | current, ADVICE)
        return TaskResult.from_dict(content["result"])

    def _save(self, task: AbsTask, file: Path, result: TaskResult) -> None:
        scores = [score["main_score"] for split in result.scores.values() for score in split]
        score = float(sum(scores) / len(scores))
        if not math.isfinite(score):
            raise FloatingPointError(f"The score ({task.metadata.main_score}) is {score}.")
        content = {
            "task": task.metadata.name,
            "type": task.metadata.type,
            "metric": task.metadata.main_score,
            "score": score,
            "settings": self._settings_of(task),
            "prompts": self.encoder.prompts_of(task.metadata),
            "result": result.to_dict(),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, json.loads(json.dumps(content, default=_to_json)))


def _to_json(value) -> float | str:
    """Convert the dates and NumPy numbers in MTEB's results."""
    return value.isoformat() if isinstance(value, datetime) else value.item()

"""The results of one model on GLUE: a JSON file for each run, in a folder that several machines may share.

A result file is written, whole, when its run is finished. A run with a result is never repeated.
"""

import shutil
import time
from dataclasses import asdict
from pathlib import Path

from neobert_hf.common.fingerprints import check_same_settings
from neobert_hf.common.results import ADVICE, read_result
from neobert_hf.evaluation.glue.runs import Run
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints, delete_checkpoint


# The keys that every result file has.
KEYS = {"run", "task", "score", "metrics", "hyperparameters", "settings"}

# Training arguments that differ between the runs of a task by design: they are in the file's name or follow from it.
RUN_ARGUMENTS = {"per_device_train_batch_size", "learning_rate", "weight_decay", "seed", "max_steps", "eval_steps"}


class Results:
    """The results of one model in its folder: `<task>/<run>.json`, and next to it a folder of the run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, run: Run) -> Path:
        return self.folder / f"{run.name}.json"

    def run_folder(self, run: Run) -> Path:
        return self.folder / run.name

    def of_task(self, task: str, settings: dict | None = None) -> list[dict]:
        """Read all results of a task.

        Raises:
            ResultError: if a file is not a result.
            SettingsMismatch: if it has other settings than these (or, without them, than the first file). Settings of a
                single run are not compared.
        """
        results = {file: read_result(file, KEYS) for file in sorted((self.folder / task).glob("bs*_seed*.json"))}
        # `start` may differ, too: it names the run of another task that was the best at that time.
        of_runs = RUN_ARGUMENTS | {"start"}
        for file, result in results.items():
            stored = {name: value for name, value in result["settings"].items() if name not in of_runs}
            settings = stored if settings is None else settings
            check_same_settings(file, stored, settings, ADVICE)
        return list(results.values())

    def check_model(self, model: str) -> None:
        """A row of the report is one model: the results of all its tasks must be of the model with this fingerprint.

        Raises:
            SettingsMismatch: naming the first file of another model.
        """
        for file in sorted(self.folder.glob("*/bs*_seed*.json")):
            stored = read_result(file, KEYS)["settings"]
            check_same_settings(file, {"model": stored.get("model")}, {"model": model}, ADVICE)

    def best_first(self, task: str) -> list[dict]:
        """All results of a task that have a score, as `of_task` reads them."""
        scored = [result for result in self.of_task(task) if result["score"] is not None]
        return sorted(scored, key=lambda result: -result["score"])

    def find(self, run: Run) -> dict | None:
        """The result of a run, if it is finished."""
        file = self.file(run)
        if not file.is_file():
            return None
        result = read_result(file, KEYS)
        # Another run may have the same file name, which shows only six digits of each value.
        check_same_settings(file, result["hyperparameters"], asdict(run.hyperparameters), ADVICE)
        return result

    def delete_leftovers(self, run: Run) -> None:
        """Delete the checkpoints of a finished run, and every model of the task that a better one has replaced."""
        for checkpoint in complete_checkpoints(self.run_folder(run)):
            delete_checkpoint(checkpoint)
        # Delete only what a finished run has beaten: no process waits for it, and none deletes the best model.
        for result in self.best_first(run.task)[1:]:
            shutil.rmtree(self.folder / result["run"] / "model", ignore_errors=True)

    def best_model(self, task: str, weights: str) -> tuple[str, Path]:
        """The name of the best run of a task, and the folder of its model.

        Args:
            weights: the fingerprint of the weights from which it must have been trained.
        """
        results = self.best_first(task)
        if not results or not (model := self.folder / results[0]["run"] / "model").is_dir():
            found = f"{len(results)} results but no model of the best" if results else "no result with a score"
            raise CheckpointError(
                f"{self.folder / task} holds {found}, but another task starts from its best model: run `--task {task}` "
                "first, or set `transfer` to false."
            )
        name = results[0]["run"]
        stored = results[0]["settings"].get("model")
        check_same_settings(self.folder / f"{name}.json", {"model": stored}, {"model": weights}, ADVICE)
        return name, model

    def wait_for(self, runs: list[Run], seconds: float = 10) -> None:
        """Wait until all of these runs have a result, including runs of other processes and machines.

        Looks every `seconds` seconds, and prints what is missing at once and then every ten minutes.
        """
        waited = 0.0
        while missing := [run.name for run in runs if not self.file(run).is_file()]:
            if waited % 600 == 0:
                print(
                    f"waiting for {len(missing)} runs of other processes or shards: {', '.join(missing[:5])}"
                    f"{', ...' if len(missing) > 5 else ''}. If nothing runs them, start their shard, or the same "
                    "command without `--shard`.",
                    flush=True,
                )
            time.sleep(seconds)
            waited += seconds

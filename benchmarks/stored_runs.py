"""Results of single runs, which no other machine has to make again."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

from circumstances import processor

from neobert_hf.common.atomic_writes import write_json


class StoredRuns:
    """What single runs found, in a JSON file that is committed beside the page that they make.

    A benchmark of many trainings takes longer than one machine is at hand. So what a run found is stored as soon as it
    is there, under a name that tells all that it depends on: model, data, flags, seed. What the file holds is not run
    again, on this machine or another one, and `circumstances` tells where and when the runs of a page were made.

    Args:
        file: written after each run; several threads may share it, several processes may not.
    """

    def __init__(self, file: Path):
        self.file, self.lock, self.used = file, Lock(), set()
        self.runs = json.loads(file.read_text()) if file.exists() else {}

    def result(self, name: str, run: Callable[[], Any]) -> Any:
        """What the run of this name found, which JSON can hold; `run` makes it if it is not stored."""
        if name not in self.runs:
            found = run()
            with self.lock:
                self.runs[name] = {"found": found, "date": str(date.today()), "processor": processor()}
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.file, self.runs)
        self.used.add(name)
        # As a file gives it, whether it has just been made or not.
        return json.loads(json.dumps(self.runs[name]["found"]))

    def circumstances(self) -> str:
        """When and where the runs were made that this process has asked for."""
        places = sorted({(self.runs[name]["date"], self.runs[name]["processor"]) for name in self.used})
        return f"Runs of {', '.join(f'{day} ({place})' for day, place in places)}."

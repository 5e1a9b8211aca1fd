"""Stored results of single runs, which no other machine has to repeat."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

from circumstances import processor

from neobert_hf.common.files import write_json


class StoredRuns:
    """The results of single runs, in a JSON file that is committed next to the page made from them.

    A benchmark with many trainings takes longer than one machine is available. So each result is stored at once, under
    a name that contains everything it depends on: model, data, flags, seed. A stored run is not repeated, on this
    machine or another one, and `circumstances` says where and when the runs of a page were made.

    Args:
        file: written after each run; several threads may share it, several processes may not.
    """

    def __init__(self, file: Path):
        self.file, self.lock, self.used = file, Lock(), set()
        self.runs = json.loads(file.read_text()) if file.exists() else {}

    def result(self, name: str, run: Callable[[], Any]) -> Any:
        """The stored result of the run with this name (JSON values); if there is none, `run` makes it."""
        if name not in self.runs:
            found = run()
            with self.lock:
                self.runs[name] = {"found": found, "date": str(date.today()), "processor": processor()}
                self.file.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.file, self.runs)
        self.used.add(name)
        # As read from a file, even if it was just made.
        return json.loads(json.dumps(self.runs[name]["found"]))

    def circumstances(self) -> str:
        """When and where the runs that this process has used were made."""
        places = sorted({(self.runs[name]["date"], self.runs[name]["processor"]) for name in self.used})
        return f"Runs of {', '.join(f'{day} ({place})' for day, place in places)}."

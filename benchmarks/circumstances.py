"""What every page of results says of how it was made."""

import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import version

from stored_runs import StoredRuns


def circumstances(script: str, *packages: str, precision: str = "float32", runs: StoredRuns | None = None) -> str:
    """When, where, with what and by which command a page was made.

    Args:
        packages: whose versions matter, beside torch and Transformers.
        runs: what the page is made of, if that is stored: it tells days and processors.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", *packages))
    return (
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), {precision}; Python "
        f"{platform.python_version()}, {versions}. Not measured on GPU. Command: "
        f"`{shlex.join(['python', f'benchmarks/{script}.py', *sys.argv[1:]])}`."
        + (f" {runs.circumstances()}" if runs else "")
    )

"""What every page of results says of how it was made."""

import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path


# The precision of pages with trainings.
AS_TOLD = "trained in bfloat16 autocast where the flags say so, measured in float32"
LOSS_AS_TOLD = "trained, and losses measured, in bfloat16 autocast where the flags say so"


def circumstances(script: str, *packages: str, precision: str = "float32", runs: str = "") -> str:
    """When, where, with what and by which command a page was made.

    Args:
        packages: whose versions matter, beside torch and Transformers.
        runs: days and processors of the runs that the page is made of, as `StoredRuns` tells them.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", *packages))
    return (
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), {precision}; Python "
        f"{platform.python_version()}, {versions}. Not measured on GPU. Command: "
        f"`{shlex.join(['python', f'benchmarks/{script}.py', *sys.argv[1:]])}`." + (f" {runs}" if runs else "")
    )


def processor() -> str:
    """The name of the CPU, as Linux tells it."""
    told = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = [line.split(":")[1].strip() for line in told if line.startswith("model name")]
    return model[0] if model else platform.processor()

"""The line on every page of results about how the page was made."""

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
    """When, where, with which versions and by which command a page was made.

    Args:
        packages: packages whose versions matter, besides torch and Transformers.
        runs: days and processors of the runs behind the page, as `StoredRuns` gives them.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", *packages))
    return (
        f"{date.today()}; {os.cpu_count()} cores ({platform.machine()}), {precision}; Python "
        f"{platform.python_version()}, {versions}. Not measured on GPU. Command: "
        f"`{shlex.join(['python', f'benchmarks/{script}.py', *sys.argv[1:]])}`." + (f" {runs}" if runs else "")
    )


def processor() -> str:
    """The name of the CPU, as Linux reports it but for its trade marks: "Intel Xeon", "AMD EPYC"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return model[0].replace("(R)", "").removesuffix(" Processor") if model else platform.processor()

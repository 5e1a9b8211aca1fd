"""benchmarks/kernel_counts.py, in a process of its own: it changes torch."""

import subprocess
import sys

from tests.helpers.models import ROOT


def test_kernels_and_bytes_of_a_layer():
    output = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kernel_counts.py"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in output.splitlines() if line.startswith("  ")]
    assert output.count("kernels") == 4
    # Four products, and RoPE as one multiplication between two changes of dtype.
    assert {row[1] for row in rows if row[0] == "mm"} == {"4"}
    assert {row[1] for row in rows if row[0] == "_to_copy"} == {"2"}
    assert {row[1] for row in rows if row[0] == "_varlen_attn"} == {"1"}

"""benchmarks/kernel_counts.py, in a process of its own: it changes torch."""

import re
import subprocess
import sys

from tests.helpers.models import ROOT


def test_kernels_and_bytes_of_a_layer():
    output = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "kernel_counts.py"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in output.splitlines() if line.startswith("  ")]
    totals = re.findall(r": (\d+) kernels, ([\d.]+) kB a token", output)
    assert len(totals) == 4 and all(kernels == "14" and 98 <= float(moved) <= 102 for kernels, moved in totals), totals
    # Four products, and RoPE as one multiplication between two changes of dtype.
    assert {row[1] for row in rows if row[0] == "mm"} == {"4"}
    assert {row[1] for row in rows if row[0] == "_to_copy"} == {"2"}
    assert {row[1] for row in rows if row[0] == "_varlen_attn"} == {"1"}

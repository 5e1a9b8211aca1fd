"""Promise 6: the tests that Transformers has for its own models pass, but for the departures listed beside them.

They are in suite_of_transformers.py, which runs in a process of its own: it needs markers that ours has not.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.helpers.models import ROOT


# Of 5.23, on a CPU: 108 tests pass, and the others do not apply (no GPU, no decoder, no images, no experts).
FEWEST = 105


def find_suite(cache: Path) -> Path:
    """The tests of the installed release, from its source distribution, which is downloaded into `cache` once."""
    release = f"transformers-{transformers.__version__}"
    folder = cache / release / "tests"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        command += ["--dest", str(cache), release.replace("-", "==")]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=180)
        except subprocess.SubprocessError as error:
            pytest.skip(f"pip cannot download the source of {release}: {error}")
        with tarfile.open(cache / f"{release}.tar.gz") as file:
            file.extractall(cache, [each for each in file if "/tests/" in each.name], filter="data")
        # A module of the suite imports its own folder, which in a checkout has this empty file.
        (folder / "__init__.py").touch()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_suite_of_transformers_passes(pytestconfig):
    pytest.importorskip("parameterized")
    folder = find_suite(Path(pytestconfig.cache.mkdir("transformers_suite")))
    suite = Path(__file__).with_name("suite_of_transformers.py")
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-q", "--tb=short"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(suite)],
        cwd=ROOT,
        env=environment | {"TRANSFORMERS_SUITE": str(folder)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-12000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= FEWEST, run.stdout[-2000:]

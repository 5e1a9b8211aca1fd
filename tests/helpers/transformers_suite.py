"""The tests that Transformers has for the models inside it, of the release that is installed.

The wheel holds none. The source distribution holds the files `tests/test_*.py`, with the mixins of which every model's
tests are made, but not the folders below `tests/` that they import a little from. For these there are empty stand-ins,
so that the parts which need them are left out: exporters, pipelines with models from the Hub, generation.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import transformers
from filelock import FileLock


# A folder `tests` of a checkout of Transformers, for those who have one. It is complete.
VARIABLE = "TRANSFORMERS_TESTS"
PACKAGE = "transformers_tests"
DOWNLOAD_SECONDS = 180


class NoSuiteError(Exception):
    """The mixins cannot be had; the message says why."""


def find_suite(cache: Path) -> Path:
    """The folder that holds `test_modeling_common.py`, downloaded into `cache` once.

    Raises:
        NoSuiteError: if there is none.
    """
    if given := os.environ.get(VARIABLE):
        folder = Path(given)
    else:
        cache.mkdir(parents=True, exist_ok=True)
        folder = cache / f"transformers-{transformers.__version__}" / "tests"
        with FileLock(cache / ".lock"):
            if not folder.is_dir():
                _download(cache)
    if not (folder / "test_modeling_common.py").is_file():
        raise NoSuiteError(f"{folder} has no test_modeling_common.py: set {VARIABLE} to `tests` of a checkout")
    return folder


def _download(cache: Path) -> None:
    version = transformers.__version__
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    try:
        subprocess.run(
            [*command, "--dest", str(cache), f"transformers=={version}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or f"{error}").strip().splitlines()[-1]
        raise NoSuiteError(f"pip cannot download the source of transformers {version}: {said}") from error
    archive = next(cache.glob(f"transformers-{version}.tar.gz"))
    with tarfile.open(archive) as file:
        members = [member for member in file.getmembers() if "/tests/" in member.name]
        file.extractall(cache, members, filter="data")
    # A module of the suite imports its own folder, which in a checkout has this empty file.
    (cache / f"transformers-{version}" / "tests" / "__init__.py").touch()


def load_suite(folder: Path) -> types.ModuleType:
    """The modules of the folder as a package; its own name, `tests`, is that of ours."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(folder)]
        sys.modules[PACKAGE] = package
        _stand_in(folder, "exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
        _stand_in(folder, "generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
        _stand_in(folder, "utils.test_configuration_utils", config_common_kwargs={"return_dict": False})
        _stand_in(folder, "distributed_testing_utils", run_distributed=None)
    return importlib.import_module(f"{PACKAGE}.test_modeling_common")


def load_module(name: str) -> types.ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def _stand_in(folder: Path, name: str, **contents) -> None:
    """A module with nothing but `contents`, where the folder has no such file."""
    if folder.joinpath(*name.split(".")).with_suffix(".py").is_file():
        return
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        path = f"{PACKAGE}.{'.'.join(parts[:number])}"
        module = sys.modules.setdefault(path, types.ModuleType(path))
        module.__path__ = []
    vars(module).update(contents)

"""docs/clients.md, made of the tests of this folder.

A row is a test with the marker `clients`, which names the distribution: its docstring says what it checks, and the
statement that ends with `# in the table` is what a user writes. `fails=True` stands at a test that sees an error, whose
docstring says why; packages that do not install are in `NOT_INSTALLED`.
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from neobert_hf.common.report import markdown_table
from tests.helpers.models import ROOT


PAGE = ROOT / "docs" / "clients.md"
FOLDER = Path(__file__).parent
IN_THE_TABLE = "# in the table"

# Release: what it requires that is not among the constraints.
NOT_INSTALLED = {
    "adapters 1.3.0": "transformers~=4.57.6",
    "flair 0.15.1": "transformers<5.0.0,>=4.25.0",
    "optimum-intel 2.2.0": "transformers<5.6,>=4.51",
    "optimum-onnx 0.1.0": "transformers<4.58.0,>=4.36",
    "pylate 1.6.0": "transformers<=5.3.0,>=4.41.0",
    "spacy-transformers 1.4.0": "transformers<4.53.3,>=3.4.0",
}

BEGINNING = """\
# Clients

These libraries work with a NeoBERT model unchanged. A test of each compares its numbers with those of the plain model.
`make clients` installs them into `.venv-clients`, runs the tests and, if all pass, writes this page: do not edit it.
These {tests} tests need 3 GB of disk, a package index, and five minutes of an otherwise idle CPU core; `.ci/run`
leaves them out.

The lines of code are from the tests in `tests/clients/`, after `import neobert_hf`; `encoder`, `classifier`,
`masked_lm` and `folder` are folders of saved models. All tests ran on a CPU in float32, with small random models, torch
{torch} and Transformers {transformers}. Not tested: bfloat16 and float16, GPUs, the published weights, several
processes, and servers (of vectors or of models) other than those that run inside a test.
"""

FAILING = """
## Clients that fail

"""

ENDING = """
transformers-interpret passes `position_ids` that are all 0 as the baseline of its attributions, which is an error here.
A 0 marks the start of a packed document, so a row of zeros would mean as many documents of one token, and would give
wrong numbers without a warning. Captum, on which transformers-interpret is built, attributes to the embeddings without
such `position_ids`.
"""


@dataclass(frozen=True)
class ClientTest:
    """A test of a client.

    Args:
        name: as in pytest's reports, `tests/clients/test_search.py::test_faiss`.
        distribution: the client's name on PyPI.
        text: the docstring.
        line: the statement that a user writes, on one line; None if the client fails.
    """

    name: str
    distribution: str
    text: str
    line: str | None


def client_tests() -> list[ClientTest]:
    """All of them, by distribution, and then as they stand in the files."""
    tests = []
    for file in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(f"tests.clients.{file.stem}")
        functions = [value for name, value in vars(module).items() if name.startswith("test_")]
        tests += [_read(f"{file.relative_to(ROOT).as_posix()}::{test.__name__}", test) for test in functions]
    return sorted(tests, key=lambda test: test.distribution)


def build_page(versions: Mapping[str, str]) -> str:
    """The page, with these versions of the distributions."""
    tests = client_tests()
    working = [
        (test.distribution, versions[test.distribution], f"`{test.line}`", test.text) for test in tests if test.line
    ]
    failing = [(test.distribution, versions[test.distribution], test.text) for test in tests if not test.line]
    for release, requirement in NOT_INSTALLED.items():
        needed = Requirement(requirement)
        assert versions[needed.name] not in needed.specifier, f"{release} may install now: test it"
        failing.append((*release.split(), f"It requires `{requirement}`."))
    tables = [
        markdown_table(("Client", "Version", "One line", "What the test checks"), working),
        markdown_table(("Client", "Version", "Why"), sorted(failing)),
    ]
    beginning = BEGINNING.format(tests=len(tests), torch=versions["torch"], transformers=versions["transformers"])
    first, second = ("\n".join(table) + "\n" for table in tables)
    return beginning + "\n" + first + FAILING + second + ENDING


def _read(name: str, test: Callable) -> ClientTest:
    (marker,) = (mark for mark in test.pytestmark if mark.name == "clients")
    text = " ".join(inspect.getdoc(test).split())
    return ClientTest(name, *marker.args, text, None if marker.kwargs.get("fails") else _line_in_the_table(test))


def _line_in_the_table(test: Callable) -> str:
    source = inspect.getsource(test)
    ends = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith(IN_THE_TABLE)]
    statements = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt) and [node.end_lineno] == ends
    ]
    assert statements, f"{test.__name__} must have one statement that ends with `{IN_THE_TABLE}`"
    # The innermost: a test or a function of it may end on the same line.
    return ast.unparse(max(statements, key=lambda node: node.lineno))

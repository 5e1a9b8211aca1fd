"""Small checkpoints of every kind; and after a run in which all tests of this folder passed, docs/clients.md."""

import os
from importlib.metadata import version

import pytest
from packaging.version import Version

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.common.files import write_text
from tests.helpers.onnx_checkpoints import save_checkpoint


# No client may ask a server, which would take minutes where there is no network.
os.environ |= dict.fromkeys(
    ("ANONYMIZED_TELEMETRY", "HAYSTACK_TELEMETRY_ENABLED", "INFINITY_ANONYMOUS_USAGE_STATS"), "False"
)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.getoption("markexpr") != "clients":
        return
    # Not at the top: it imports the tests, whose assertions pytest rewrites only if it is the first to do so.
    from tests.clients.page import PAGE, build_page, client_tests

    tests = client_tests()
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", ())}
    if missing := sum(test.name not in passed for test in tests):
        terminalreporter.write_line(f"{PAGE} is not written: {missing} of {len(tests)} tests failed or did not run.")
        return
    names = {test.distribution for test in tests} | {"torch", "transformers"}
    write_text(PAGE, build_page({name: Version(version(name)).public for name in names}))
    terminalreporter.write_line(f"{PAGE} is written.")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Saves a small random model with its tokenizer, and returns the folder."""

    def save(cls, **changes) -> str:
        return str(save_checkpoint(tmp_path_factory.mktemp(cls.__name__), cls, **changes))

    return save


@pytest.fixture(scope="session")
def encoder(checkpoint) -> str:
    return checkpoint(NeoBERTModel)


@pytest.fixture(scope="session")
def masked_lm(checkpoint) -> str:
    return checkpoint(NeoBERTForMaskedLM)


@pytest.fixture(scope="session")
def classifier(checkpoint) -> str:
    return checkpoint(NeoBERTForSequenceClassification, num_labels=2)

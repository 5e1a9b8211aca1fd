"""docs/clients.md says what the tests of clients say, for the versions of their constraints."""

import re

from tests.clients.page import FOLDER, PAGE, build_page, client_tests


PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (FOLDER / "constraints.txt").read_text(), re.MULTILINE))


def test_every_client_test_has_its_row():
    """If not, `make clients` writes the page."""
    assert PAGE.read_text(encoding="utf-8") == build_page(PINS)


def test_what_is_installed_is_what_is_tested():
    named = set(re.findall(r"^[\w.-]+", (FOLDER / "requirements.txt").read_text(), re.MULTILINE))
    assert {test.distribution for test in client_tests()} <= named <= PINS.keys()

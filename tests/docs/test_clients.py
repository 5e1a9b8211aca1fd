"""docs/clients.md names the clients that tests run, in the versions of their constraints."""

import re

from tests.helpers.models import ROOT


def test_every_client_of_the_page_is_tested():
    page, folder = (ROOT / "docs" / "clients.md").read_text(), ROOT / "tests" / "clients"
    works, _ = page.split("## Clients that fail")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", works, re.MULTILINE)
    tested = "".join(file.read_text() for file in folder.glob("test_*.py"))
    assert {name for name, _ in rows} == set(re.findall(r'mark\.clients\("([\w-]+)"', tested))
    constraints = (folder / "constraints.txt").read_text().split()
    assert all(f"{name}=={version}" in constraints for name, version in rows)

"""The pages are true to the repository, and the site of them builds."""

import re
import subprocess
import sys

from tests.helpers.models import ROOT
from tests.helpers.pages import pages


def test_site_builds_without_a_warning(tmp_path):
    """Links lead somewhere, and every module has a page."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "neobert_hf.modeling_neobert.NeoBERTForMaskedLM" in (tmp_path / "api/model/index.html").read_text()
    for module in (ROOT / "src/neobert_hf").glob("*/**/[a-z]*.py"):
        room = module.relative_to(ROOT / "src/neobert_hf").parts[0]
        name = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts)
        assert f'id="{name}"' in (tmp_path / "api" / room / "index.html").read_text(), name


def test_files_named_in_pages_exist():
    """And the folders of the README's tree."""
    for page in pages():
        for name in re.findall(r"(?<![\w/.])(?:configs|examples|tests|benchmarks)/[\w/]+\.\w+", page.read_text()):
            assert (ROOT / name).is_file(), f"{page}: {name}"
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[0]
    folders = re.findall(r"`([\w/]+)/`", tree)
    assert len(folders) >= 7
    for folder in folders:
        assert (ROOT / folder).is_dir() or (ROOT / "src" / "neobert_hf" / folder).is_dir(), folder


def test_every_client_of_the_page_is_tested():
    """In the versions of its constraints."""
    page, folder = (ROOT / "docs" / "clients.md").read_text(), ROOT / "tests" / "clients"
    works, _ = page.split("## Clients that fail")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", works, re.MULTILINE)
    tested = "".join(file.read_text() for file in folder.glob("test_*.py"))
    assert {name for name, _ in rows} == set(re.findall(r'mark\.clients\("([\w-]+)"', tested))
    constraints = (folder / "constraints.txt").read_text().split()
    assert all(f"{name}=={version}" in constraints for name, version in rows)

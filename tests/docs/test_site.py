"""The site builds without a warning, with a page for every module."""

import subprocess
import sys

from tests.helpers.models import ROOT


def test_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "neobert_hf.modeling_neobert.NeoBERTForMaskedLM" in (tmp_path / "api/model/index.html").read_text()
    for module in (ROOT / "src/neobert_hf").glob("*/**/[a-z]*.py"):
        room = module.relative_to(ROOT / "src/neobert_hf").parts[0]
        name = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts)
        assert f'id="{name}"' in (tmp_path / "api" / room / "index.html").read_text(), name

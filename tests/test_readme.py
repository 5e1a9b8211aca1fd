"""The README's commands and code run, on a small model in place of the published one."""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, small_model
from huggingface_hub import ModelCard, ModelCardData
from test_transformers import tiny_tokenizer

from neobert_hf import NeoBERTForMaskedLM


README = (ROOT / "README.md").read_text()


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_blocks_run_in_order(tmp_path):
    small_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    blocks = code_blocks(README, "python")
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(compile(block.replace("chandar-lab/NeoBERT", str(tmp_path)), "README.md", "exec"), names)
    assert names["states"].shape[-1] == 64 and (names["states"][1, 4:] == 0).all()
    assert names["loss"].isfinite()


def test_make_targets_exist():
    targets = re.findall(r"^make (\w+)", "\n".join(code_blocks(README, "bash")), re.MULTILINE)
    assert set(targets) == {"demo", "test"}
    for target in [*targets, "slow", "lint", "bench"]:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_files_named_in_the_layout_exist():
    for name in re.findall(r"`([\w/]+\.(?:py|md|txt))`", README.split("## Layout")[1]):
        assert any(ROOT.glob(f"**/{Path(name).name}")), name


def test_card_template_is_a_valid_card():
    card = ModelCard.from_template(
        ModelCardData(license="mit"),
        template_path=str(ROOT / "hub_card" / "README.md"),
        model_name="someone/NeoBERT",
        num_hidden_layers=28,
        hidden_size=768,
        num_parameters="245M",
        max_length="4,096",
    )
    assert "{{" not in card.content and card.data.license == "mit"

"""README.md: short, true to the repository, and its code runs."""

import re

from tests.helpers.models import ROOT
from tests.helpers.pages import blocks_of


README = ROOT / "README.md"
WANTS = "embed distil classify adapt long_texts search own_documents pretrain evaluate serve publish".split()


def test_length():
    lines = README.read_text().splitlines()
    assert len(lines) <= 130 and max(map(len, lines)) <= 120


def test_code_runs(runner):
    runner.run(README)
    names = runner.names
    assert names["states"].shape[-1] == 64 and (names["states"][1, 8:] == 0).all()
    assert names["classifier"].num_labels == 3
    assert names["encoder"].get_embedding_dimension() == 64


def test_a_guide_for_every_want():
    assert re.findall(r"^\|.*\]\(docs/guides/(\w+)\.md\) \|$", README.read_text(), re.MULTILINE) == WANTS


def test_it_says_at_once_that_the_published_model_gives_no_embeddings():
    """Before any code."""
    beginning = README.read_text().split("```")[0]
    assert "not an embedding model" in beginning and "examples/finetune_embeddings.py" in beginning


def test_make_targets_are_those_of_a_newcomer():
    commands = [words for block in blocks_of(README) if block.language == "bash" for words in block.commands()]
    assert [words[1] for words in commands if words[0] == "make"] == ["demo", "test", "docs"]


def test_folders_of_the_tree_exist():
    tree = README.read_text().split("## The tree")[1].split("```")[0]
    folders = re.findall(r"`([\w/]+)/`", tree)
    assert len(folders) >= 8
    for folder in folders:
        assert (ROOT / folder).is_dir() or (ROOT / "src" / "neobert_hf" / folder).is_dir(), folder

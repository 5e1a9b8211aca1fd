"""README.md: true to the repository, and its code runs."""

import re
import shlex

from tests.helpers.models import ROOT


README = ROOT / "README.md"
GUIDES = {"search", "embed", "distil", "fine_tune", "pretrain", "long_texts", "evaluate", "serve", "publish"}


def test_code_runs(runner):
    """The first lines search with the model of the package; the others take a small one in place of the published."""
    runner.run(README)
    names = runner.names
    scores = names["model"].similarity(
        names["model"].encode_query("why does my kitten nap so much?"), names["model"].encode_document(names["texts"])
    )
    assert scores.argmax() == 0 and scores[0, 0] > 0.5
    assert names["states"].shape[-1] == 64 and (names["states"][1, 8:] == 0).all()
    assert names["classifier"].num_labels == 3


def test_a_command_and_a_guide_for_every_want(runner):
    """Each command is read by its own script, to the last flag."""
    rows = re.findall(r"^\| .* \| `(.*)` \| \[.*\]\(docs/guides/(\w+)\.md.*\) \|$", README.read_text(), re.MULTILINE)
    assert len(rows) >= 13 and {guide for _, guide in rows} == GUIDES
    runner.read_only = ("python", "accelerate", "neobert-hf")
    for command, _ in rows:
        runner.run_command(shlex.split(command))


def test_folders_of_the_tree_exist():
    tree = README.read_text().split("## The tree")[1].split("```")[0]
    folders = re.findall(r"`([\w/]+)/`", tree)
    assert len(folders) >= 7
    for folder in folders:
        assert (ROOT / folder).is_dir() or (ROOT / "src" / "neobert_hf" / folder).is_dir(), folder

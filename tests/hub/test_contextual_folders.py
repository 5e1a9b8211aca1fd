"""Folders of contextual models: checked, published and loaded again; neither converted nor exported."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from neobert_hf.cli import main
from neobert_hf.embeddings.contextual import build_contextual_encoder, embed_context
from neobert_hf.hub.card import MARK
from neobert_hf.hub.doctor import diagnose
from neobert_hf.hub.publish import PublishSettings, build_folder
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


TEXTS = ["a text", "another text", "words and more words", "x"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """As training leaves a model, here of random weights."""
    folder = tmp_path_factory.mktemp("contextual")
    small_model(vocab_size=200).save_pretrained(folder / "encoder")
    small_tokenizer(200, model_input_names=["input_ids", "attention_mask"]).save_pretrained(folder / "encoder")
    torch.manual_seed(0)
    context = {"context_size": 4, "context_dropout": 0.1, "soft_prompts": 2, "text_position": 0}
    model = build_contextual_encoder(str(folder / "encoder"), 64, **context)
    model.prompts = {"query": "find: ", "document": ""}
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module")
def published(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "me" / "contextual"
    folder.mkdir(parents=True)
    build_folder(PublishSettings(str(trained), "me/contextual"), folder)
    return folder


def embeddings_of(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    """Of both stages, with and without a context and a prompt."""
    context = embed_context(model, TEXTS, seed=0)
    options = {"convert_to_tensor": True, "device": "cpu"}
    return {
        "context": context,
        "first stage": model.encode(TEXTS, **options),
        "queries": model.encode_query(TEXTS, dataset_embeddings=context, **options),
        "documents": model.encode_document(TEXTS, dataset_embeddings=context, **options),
        "no context": model.encode_document(TEXTS, dataset_embeddings=context[:0], **options),
    }


def test_what_was_published_encodes_to_the_same_bits(trained, published):
    expected = embeddings_of(SentenceTransformer(str(trained), device="cpu"))
    found = embeddings_of(SentenceTransformer(str(published), device="cpu", trust_remote_code=True))
    assert len({tensor.numpy().tobytes() for tensor in expected.values()}) == 5
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert (published / "contextual_neobert.py").is_file()


STRANGER = """
import importlib.util, sys, torch
from sentence_transformers import SentenceTransformer

assert importlib.util.find_spec("neobert_hf") is None
model = SentenceTransformer(sys.argv[1], device="cpu", trust_remote_code=True)
expected = torch.load(sys.argv[2])
found = model.encode_query(
    ["a text", "another text", "words and more words", "x"], dataset_embeddings=expected["context"],
    convert_to_tensor=True,
)
assert torch.equal(found, expected["queries"])
"""


@pytest.mark.slow
def test_without_the_package_the_code_of_the_folder_does_the_same(trained, published, tmp_path):
    torch.save(embeddings_of(SentenceTransformer(str(trained), device="cpu")), tmp_path / "expected.pt")
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", STRANGER, str(published), str(tmp_path / "expected.pt")]
    clean = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": sys.path[0]}
    subprocess.run(command, check=True, env=clean, cwd=tmp_path, timeout=1500)


def test_the_card_says_how_it_is_used(published, monkeypatch):
    card = ModelCard.load(published / "README.md")
    assert card.data.pipeline_tag == "feature-extraction" and "contextual" in card.data.tags
    # Whoever copies the lines sees scores.
    monkeypatch.chdir(published.parent.parent)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", card.text.split(MARK)[1], re.DOTALL):
        exec(code, names)
    assert names["queries"].shape == (1, 64) and names["documents"].shape == (2, 64)


def statuses(folder: Path) -> dict[str, str]:
    return {finding.check: f"{finding.status} {finding.text}" for finding in diagnose(folder)}


def change_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["second_stage.layer_norm.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(**changes):
    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changes))

    return damage


DAMAGES = {
    "second stage": (change_weights, "outputs", "second_stage"),
    "position": (change_config(text_position=4), "outputs", "second_stage"),
    "class": (change_config(architectures=["NeoBERTModel"]), "config", "NeoBERTContextualModel"),
    "code": (lambda folder: (folder / "contextual_neobert.py").unlink(), "code", "contextual_neobert.py"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage, published, tmp_path):
    change, check, message = DAMAGES[damage]
    shutil.copytree(published, tmp_path / "folder")
    change(tmp_path / "folder")
    found = statuses(tmp_path / "folder")[check]
    assert found.startswith("FAIL") and message in found


def test_a_healthy_folder(published):
    found = statuses(published)
    assert all(text.startswith("ok") for text in found.values()), found


def test_neither_exported_nor_converted_to_the_original(trained, tmp_path):
    assert "neobert_contextual" in main(["export", str(trained), str(tmp_path / "out")])
    assert "NeoBERTContextualModel" in main(["convert", str(trained), str(tmp_path / "out"), "--to", "original"])
    assert not list(tmp_path.iterdir())

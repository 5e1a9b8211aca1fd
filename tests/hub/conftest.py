"""Models as training leaves them, and the packages of npm, which several tests share."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from neobert_hf.embeddings.contextual import build_contextual_encoder
from tests.helpers.models import small_model
from tests.helpers.small_tokenizer import small_tokenizer


JAVASCRIPT = Path(__file__).parent / "transformers_js"


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    small_model(vocab_size=200).save_pretrained(folder)
    small_tokenizer(200, model_input_names=["input_ids", "attention_mask"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def embedding_folder(encoder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    modules = [Transformer(str(encoder)), Pooling(64, pooling_mode="mean")]
    SentenceTransformer(modules=modules).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def contextual_folder(encoder, tmp_path_factory) -> Path:
    """As training leaves it, here of random weights."""
    folder = tmp_path_factory.mktemp("contextual")
    torch.manual_seed(0)
    context = {"context_size": 2, "context_dropout": 0.1, "soft_prompts": 2, "text_position": 0}
    model = build_contextual_encoder(str(encoder), 64, **context)
    model.prompts = {"query": "find: ", "document": ""}
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The pinned packages, installed once and kept."""
    installed = JAVASCRIPT / "node_modules"
    if shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    if not (installed / "playwright-core").is_dir():
        partial = JAVASCRIPT / "node_modules.partial"
        partial.mkdir(exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(JAVASCRIPT / name, partial / name)
        # Its install script would fetch CUDA libraries; the binding for the CPU is in the package.
        environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL": "skip"}
        command = ["npm", "ci", "--ignore-scripts"]
        done = subprocess.run(command, cwd=partial, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install transformers.js here: {done.stderr[-300:]}")
        shutil.rmtree(installed, ignore_errors=True)
        (partial / "node_modules").rename(installed)
        shutil.rmtree(partial)
    return installed

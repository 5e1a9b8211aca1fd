"""Models as training leaves them, and the packages of npm, which several tests share."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.contextual.model import build_contextual_encoder
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.models import save_checkpoint


JAVASCRIPT = Path(__file__).parent / "transformers_js"


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("masked_lm"), NeoBERTForMaskedLM)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def embedder(encoder, tmp_path_factory) -> Path:
    """An embedding model for 32 tokens, with prompts and a linear layer behind its pooling."""
    folder = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(0)
    linear = Dense(64, 64, activation_function=torch.nn.Identity())
    torch.nn.init.normal_(linear.linear.bias)
    modules = [*build_encoder(str(encoder), max_length=32), linear, Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": "dogs and ", "document": ""}).save(str(folder))
    return folder


@pytest.fixture(scope="session")
def contextual(encoder, tmp_path_factory) -> Path:
    """A contextual model of random weights."""
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
    # Without the lock, two workers of pytest install into one folder.
    with FileLock(JAVASCRIPT / ".npm.lock"):
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
            (partial / "node_modules").rename(installed)
            shutil.rmtree(partial)
    return installed

"""Exported folders in transformers.js, on onnxruntime's own binding for Node: the ids and numbers of PyTorch."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, pipeline

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.onnx_checkpoints import export, save_checkpoint


pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")

# It installs 45 packages with npm.
pytestmark = pytest.mark.slow

TEXTS = ["A query about cats!", "a document (of 12 words), héllo", "x"]
MASKED = ["cats and [MASK]ogs", "[MASK] e i o u"]
LARGEST_ERROR = {"fp32": 1e-5, "fp16": 1e-2, "q8": 1e-1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("javascript")
    save_checkpoint(folder / "encoder")
    build_encoder(str(folder / "encoder"), max_length=32).save(str(folder / "embed"))
    save_checkpoint(folder / "fill", NeoBERTForMaskedLM)
    head = {"classifier_init_range": 0.3, "num_hidden_layers": 1, "num_labels": 3}
    save_checkpoint(folder / "classify", NeoBERTForSequenceClassification, **head)
    export(folder / "embed", folder / "embed-onnx")
    export(folder / "fill", folder / "fill-onnx")
    export(folder / "classify", folder / "classify-onnx", precisions=["float32"])
    return folder


@pytest.fixture(scope="module")
def results(folders, node_modules) -> dict:
    """What transformers.js gives, by folder and dtype; one process for all."""
    pooled = {"pooling": "mean", "normalize": True}
    requests = [
        *(("feature-extraction", "embed-onnx", dtype, TEXTS, pooled) for dtype in LARGEST_ERROR),
        *(("fill-mask", "fill-onnx", dtype, MASKED, {"top_k": 5}) for dtype in LARGEST_ERROR),
        ("text-classification", "classify-onnx", "fp32", TEXTS, {"top_k": 3}),
    ]
    keys = ("task", "folder", "dtype", "texts", "options")
    (folders / "requests.json").write_text(json.dumps([dict(zip(keys, request)) for request in requests]))
    command = ["node", "check.mjs", folders, folders / "requests.json"]
    done = subprocess.run(command, cwd=node_modules.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {request[1:3]: result for request, result in zip(requests, json.loads(done.stdout))}


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_embeddings(folders, results, dtype):
    model = SentenceTransformer(str(folders / "embed"), device="cpu")
    assert results["embed-onnx", dtype]["ids"] == model.tokenizer(TEXTS)["input_ids"]
    expected = model.encode(TEXTS, normalize_embeddings=True)
    assert np.abs(np.array(results["embed-onnx", dtype]["output"]) - expected).max() <= LARGEST_ERROR[dtype]


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_filled_masks(folders, results, dtype):
    assert results["fill-onnx", dtype]["ids"] == AutoTokenizer.from_pretrained(folders / "fill")(MASKED)["input_ids"]
    for wanted, got in zip(pipeline("fill-mask", str(folders / "fill"))(MASKED), results["fill-onnx", dtype]["output"]):
        scores = np.array([[guess["score"] for guess in guesses] for guesses in (wanted, got)])
        assert np.abs(scores[0] - scores[1]).max() <= LARGEST_ERROR[dtype]
        if dtype == "fp32":
            assert [guess["sequence"] for guess in wanted] == [guess["sequence"] for guess in got]


def test_classes(folders, results):
    expected = pipeline("text-classification", str(folders / "classify"), top_k=3)(TEXTS)
    for wanted, got in zip(expected, results["classify-onnx", "fp32"]["output"]):
        assert [guess["label"] for guess in wanted] == [guess["label"] for guess in got]
        assert np.allclose([guess["score"] for guess in wanted], [guess["score"] for guess in got], rtol=0, atol=1e-5)

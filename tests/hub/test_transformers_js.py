"""Exported folders in transformers.js, on onnxruntime's own binding for Node."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, pipeline

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForQuestionAnswering, NeoBERTForSequenceClassification
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.onnx_checkpoints import export, save_checkpoint


pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")

# It installs 45 packages with npm.
pytestmark = pytest.mark.slow

TEXTS = ["A query about cats!", "a document (of 12 words), héllo", "x"]
MASKED = ["cats and [MASK]ogs", "[MASK] e i o u"]
QUESTION = ["who has cats", "bob has cats, and eve has dogs"]
DTYPES = {"fp32": 1e-5, "fp16": 1e-2, "q8": 1e-1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("javascript")
    save_checkpoint(folder / "encoder")
    build_encoder(str(folder / "encoder"), max_length=32).save(str(folder / "embed"))
    save_checkpoint(folder / "fill", NeoBERTForMaskedLM)
    head = {"classifier_init_range": 0.3, "num_hidden_layers": 1}
    save_checkpoint(folder / "classify", NeoBERTForSequenceClassification, num_labels=3, **head)
    save_checkpoint(folder / "answer", NeoBERTForQuestionAnswering, **head)
    for name in ("embed", "fill"):
        export(folder / name, folder / f"{name}-onnx")
    for name in ("classify", "answer"):
        export(folder / name, folder / f"{name}-onnx", precisions=["float32"])
    return folder


@pytest.fixture(scope="module")
def results(folders, node_modules) -> dict:
    """What transformers.js gives, by folder and dtype; one process for all."""
    pooled = {"pooling": "mean", "normalize": True}
    requests = [
        *(("feature-extraction", "embed-onnx", dtype, TEXTS, pooled) for dtype in DTYPES),
        *(("fill-mask", "fill-onnx", dtype, MASKED, {"top_k": 5}) for dtype in DTYPES),
        ("text-classification", "classify-onnx", "fp32", TEXTS, {"top_k": 3}),
        ("question-answering", "answer-onnx", "fp32", QUESTION, {"top_k": 3}),
    ]
    keys = ("task", "folder", "dtype", "texts", "options")
    (folders / "requests.json").write_text(json.dumps([dict(zip(keys, request)) for request in requests]))
    command = ["node", "check.mjs", folders, folders / "requests.json"]
    done = subprocess.run(command, cwd=node_modules.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {request[1:3]: result for request, result in zip(requests, json.loads(done.stdout))}


def test_token_ids_are_the_same(folders, results):
    for (folder, _), texts in zip(results, [TEXTS] * 3 + [MASKED] * 3 + [TEXTS, QUESTION]):
        tokenizer = AutoTokenizer.from_pretrained(folders / folder)
        assert results[folder, "fp32"]["ids"] == tokenizer(texts)["input_ids"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_the_same(folders, results, dtype):
    expected = SentenceTransformer(str(folders / "embed"), device="cpu").encode(TEXTS, normalize_embeddings=True)
    assert np.abs(np.array(results["embed-onnx", dtype]["output"]) - expected).max() <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_filling_is_the_same(folders, results, dtype):
    expected = pipeline("fill-mask", str(folders / "fill"))(MASKED)
    for wanted, got in zip(expected, results["fill-onnx", dtype]["output"]):
        scores = np.abs(np.array([guess["score"] for guess in wanted]) - [guess["score"] for guess in got])
        assert scores.max() <= DTYPES[dtype]
        if dtype == "fp32":
            assert [guess["token"] for guess in wanted] == [guess["token"] for guess in got]
            assert [guess["sequence"] for guess in wanted] == [guess["sequence"] for guess in got]


def test_classification_is_the_same(folders, results):
    expected = pipeline("text-classification", str(folders / "classify"), top_k=3)(TEXTS)
    for wanted, got in zip(expected, results["classify-onnx", "fp32"]["output"]):
        assert [guess["label"] for guess in wanted] == [guess["label"] for guess in got]
        assert np.allclose([guess["score"] for guess in wanted], [guess["score"] for guess in got], rtol=0, atol=1e-5)


@torch.no_grad()
def test_answers_are_the_same(folders, results):
    tokenizer = AutoTokenizer.from_pretrained(folders / "answer")
    inputs = tokenizer(*QUESTION, return_tensors="pt", return_token_type_ids=False)
    outputs = NeoBERTForQuestionAnswering.from_pretrained(folders / "answer")(**inputs)
    ids = inputs["input_ids"][0].tolist()
    # transformers.js' softmax runs over the context and [CLS], which is then no answer.
    context = range(ids.index(tokenizer.sep_token_id) + 1, len(ids) - 1)
    start, end = (logits[0, [0, *context]].softmax(-1)[1:] for logits in (outputs.start_logits, outputs.end_logits))
    spans = [(float(start[i] * end[j]), i, j) for i in range(len(context)) for j in range(i, len(context))]
    answers = results["answer-onnx", "fp32"]["output"]
    assert len(answers) == 3
    for got, (score, first, last) in zip(answers, sorted(spans, reverse=True)):
        assert got["score"] == pytest.approx(score, abs=1e-5)
        assert got["answer"] == tokenizer.decode(ids[context[first] : context[last] + 1])

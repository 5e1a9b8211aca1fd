"""The page of `neobert-hf export --space` in Chromium: the tokens, vectors, ranking and guesses of PyTorch."""

import json
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import pipeline

from neobert_hf import cli
from tests.helpers.models import ROOT


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,  # It installs packages with npm, and starts a browser.
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

TRAINED = ROOT / "benchmarks" / "models" / "small_33m_tokens"
TEXTS = [
    "Send an e-mail, in héllo.",
    "Open a file and read it.",
    "Sort a list of numbers.",
    "Wait for a thread to end.",
]
QUERY = "reading from a file"
SENTENCE = "The function returns a [MASK] of strings."


@pytest.fixture(scope="module")
def embedding_model() -> SentenceTransformer:
    """The trained encoder with prompts, which a page has to put before the texts."""
    prompts = {"query": "query: ", "document": "text: "}
    return SentenceTransformer(str(TRAINED), device="cpu", prompts=prompts, model_kwargs={"dtype": "float32"})


@pytest.fixture(scope="module")
def spaces(embedding_model, tmp_path_factory, node_modules) -> Path:
    """A page with each of the models, and one with both; the library lies beside them."""
    folder = tmp_path_factory.mktemp("spaces")
    embedding_model.save(str(folder / "embedding"))
    for name, model in (("search", folder / "embedding"), ("fill", TRAINED)):
        assert cli.main(["export", str(model), str(folder / name), "--space"]) in (0, None)
    shutil.copytree(folder / "search", folder / "both")
    shutil.copytree(folder / "fill" / "model", folder / "both" / "masked")
    for name, changes in (("search", {}), ("fill", {}), ("both", {"fill": {"model": "masked"}})):
        settings = json.loads((folder / name / "settings.json").read_text())
        settings |= {"library": "../library/"} | changes
        (folder / name / "settings.json").write_text(json.dumps(settings))
    (folder / "library").mkdir()
    for file in ("@huggingface/transformers/dist/transformers.min.js", *(
        f"onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.{kind}" for kind in ("mjs", "wasm")
    )):  # fmt: skip
        shutil.copy(node_modules / file, folder / "library")
    return folder


@pytest.fixture(scope="module")
def address(spaces):
    with ThreadingHTTPServer(("localhost", 0), partial(SimpleHTTPRequestHandler, directory=spaces)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", ["search", "fill", "both"])
def test_the_page_computes_what_pytorch_does(name, address, embedding_model, node_modules, tmp_path):
    request = {"texts": TEXTS, "query": QUERY, "sentence": SENTENCE, "picture": str(tmp_path / "browser.png")}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = ["node", "browser.mjs", f"{address}/{name}/", CHROMIUM, tmp_path / "request.json"]
    done = subprocess.run(command, cwd=node_modules.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)

    assert all(
        url.startswith(f"{address}/library/") for url in page["outside"]
    )  # The page loads nothing from elsewhere.
    assert page["visible"] == (["search", "fill"] if name == "both" else [name])
    assert page["ids"] == embedding_model.tokenizer(TEXTS)["input_ids"]
    assert (tmp_path / "browser.png").stat().st_size > 10_000
    if name in ("search", "both"):
        expected = embedding_model.encode(TEXTS, normalize_embeddings=True)
        assert np.abs(np.array(page["vectors"]) - expected).max() <= 5e-3
        query = embedding_model.encode_query(QUERY, normalize_embeddings=True)
        scores = embedding_model.encode_document(TEXTS, normalize_embeddings=True) @ query
        order = scores.argsort()[::-1]
        assert [text for text, _ in page["ranking"]] == [TEXTS[index] for index in order]
        assert np.abs(np.array([float(score) for _, score in page["ranking"]]) - scores[order]).max() <= 5e-3
    if name in ("fill", "both"):
        expected = pipeline("fill-mask", str(TRAINED), dtype="float32")(SENTENCE)
        assert [text for text, _ in page["guesses"]] == [guess["token_str"] for guess in expected]
        scores = np.array([guess["score"] for guess in expected])
        assert np.abs(np.array([float(score) for _, score in page["guesses"]]) - scores).max() <= 5e-3

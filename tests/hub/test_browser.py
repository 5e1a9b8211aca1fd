"""The page of `neobert-hf export --space` in Chromium: the tokens, vectors, ranking and guesses of PyTorch."""

import json
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import pipeline

from tests.helpers.examples import status_of


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,  # It installs packages with npm, and starts a browser.
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

TEXTS = ["Send an e-mail, in héllo.", "Open a file.", "Sort a list.", "Wait for it to end."]
QUERY, SENTENCE = "a file", "a [MASK] of strings."
LIBRARY = ["@huggingface/transformers/dist/transformers.min.js"]
LIBRARY += [f"onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.{kind}" for kind in ("mjs", "wasm")]


@pytest.fixture(scope="module")
def address(embedder, masked_lm, tmp_path_factory, node_modules):
    """A page with each of the models, and one with both; the library lies beside them."""
    folder = tmp_path_factory.mktemp("spaces")
    for name, model in (("search", embedder), ("fill", masked_lm)):
        assert status_of(["export", str(model), str(folder / name), "--space"]) == 0
    shutil.copytree(folder / "search", folder / "both")
    shutil.copytree(folder / "fill" / "model", folder / "both" / "masked")
    for name, changes in (("search", {}), ("fill", {}), ("both", {"fill": {"model": "masked"}})):
        file = folder / name / "settings.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"library": "../library/"} | changes))
    (folder / "library").mkdir()
    for file in LIBRARY:
        shutil.copy(node_modules / file, folder / "library")
    with ThreadingHTTPServer(("localhost", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


def same(rows: list[tuple[str, str]], expected: dict[str, float]) -> bool:
    """Whether the rows of a list have these scores, of three digits, and the best first."""
    scores, wanted = [float(score) for _, score in rows], [expected[text] for text, _ in rows]
    assert np.allclose(scores, wanted, rtol=0, atol=5e-3)
    return len(rows) == len(expected) and scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("name", ["search", "fill", "both"])
def test_the_page_computes_what_pytorch_does(name, address, embedder, masked_lm, node_modules, tmp_path):
    request = {"texts": TEXTS, "query": QUERY, "sentence": SENTENCE, "picture": str(tmp_path / "browser.png")}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = ["node", "browser.mjs", f"{address}/{name}/", CHROMIUM, tmp_path / "request.json"]
    done = subprocess.run(command, cwd=node_modules.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)

    # It loads nothing from elsewhere.
    assert all(url.startswith(f"{address}/library/") for url in page["outside"])
    assert page["visible"] == (["search", "fill"] if name == "both" else [name])
    model = SentenceTransformer(str(embedder), device="cpu")
    assert page["ids"] == model.tokenizer(TEXTS)["input_ids"]
    assert (tmp_path / "browser.png").stat().st_size > 10_000
    if name != "fill":
        assert np.abs(np.array(page["vectors"]) - model.encode(TEXTS)).max() <= 5e-3
        assert same(page["ranking"], dict(zip(TEXTS, model.encode_document(TEXTS) @ model.encode_query(QUERY))))
    if name != "search":
        guesses = pipeline("fill-mask", str(masked_lm))(SENTENCE)
        assert same(page["guesses"], {guess["token_str"]: guess["score"] for guess in guesses})

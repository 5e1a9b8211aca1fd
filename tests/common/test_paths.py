"""Folders that are no whole models: each recipe names what is missing before it reads the data."""

import json
import shutil

import pytest

from neobert_hf.common.paths import check_model_exists
from neobert_hf.embeddings import finetune_embeddings, train_reranker
from neobert_hf.evaluation.glue.recipe import run_glue
from neobert_hf.evaluation.pseudo_perplexity import pseudo_perplexity
from neobert_hf.search import index
from neobert_hf.tasks import classify
from tests.helpers.models import save_encoder
from tests.helpers.small_tokenizer import small_tokenizer


ROWS = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(20)]
PAIRS = [{"query": f"q {number}", "positive": f"p {number}"} for number in range(20)]
RECIPES = {
    "classify": (classify, {"data": ROWS}, "model"),
    "finetune_embeddings": (finetune_embeddings, {"pairs": PAIRS}, "model"),
    "train_reranker": (train_reranker, {"pairs": PAIRS}, "model"),
    "index": (index, {"source": ROWS, "name": "rows"}, "model"),
    "pseudo_perplexity": (pseudo_perplexity, {"source": ROWS, "text_column": "text"}, "models"),
    "run_glue": (run_glue, {"task": "sst2", "config": "glue/paper.yaml", "data_dir": "nowhere"}, "model"),
}
LOST = {
    "config.json": "no config.json",
    "model.safetensors": "no weights",
    "tokenizer.json": "The tokenizer of .* cannot be loaded",
    # PEFT saves adapters without the model.
    "all but adapters": "the adapters of a model alone",
}


@pytest.fixture(scope="module", params=LOST)
def folder(request, tmp_path_factory):
    folder = save_encoder(tmp_path_factory.mktemp("model"), small_tokenizer())
    if request.param == "all but adapters":
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        shutil.move(folder / "model.safetensors", folder / "adapter_model.safetensors")
        (folder / "config.json").unlink()
    else:
        (folder / request.param).unlink()
        if request.param == "tokenizer.json":
            (folder / "tokenizer_config.json").unlink()
    return folder, LOST[request.param]


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_model_lacks_is_named_before_work(folder, name, tmp_path):
    recipe, data, setting = RECIPES[name]
    place, message = folder
    if name == "run_glue" and "tokenizer" in message:
        pytest.skip("the data are read first")
    given = [f"m={place}"] if setting == "models" else place
    output = {"index" if name == "index" else "output_dir": tmp_path / "run"}
    with pytest.raises((OSError, ValueError), match=message) as error:
        recipe(**data, **{setting: given}, **output)
    # An error that a library raises comes with a traceback.
    assert "neobert_hf" in str(error.traceback[-1].path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["https://huggingface.co/chandar-lab/NeoBERT", "model.safetensors"])
def test_an_address_or_a_file_is_no_folder_of_a_model(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(OSError, match=f"`model` is '{place}', (an address|which is a file)"):
        check_model_exists(place, "model")

"""Linear layers after the pooling of an embedding model: a further training goes on with them and saves them."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from torch.testing import assert_close

from neobert_hf.embeddings.models import build_encoder, saved_linear_layers
from tests.helpers.embedding_runs import run


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["all weights", "adapters"])
def test_training_goes_on_with_it_and_keeps_it(data, encoder, tmp_path, settings):
    """With LoRA and after an interruption, too."""
    start, output = tmp_path / "start", tmp_path / "run"
    linear = Dense(32, 32, activation_function=torch.nn.Identity())
    SentenceTransformer(modules=[*build_encoder(str(encoder), 48), linear]).save(str(start))
    settings |= {"model": start, "datasets": data / "datasets.yaml", "eval_strategy": "no", "learning_rate": 1e-2}
    settings |= {"output_dir": output, "max_steps": 6, "save_steps": 3}
    run("dense", settings)
    (output / "model").rename(tmp_path / "whole")
    (output / "checkpoint-6").rename(tmp_path / "checkpoint-6")
    (output / "log.json").unlink()
    run("dense", settings)
    folders = (start, output / "checkpoint-3", tmp_path / "whole", output / "model")
    before, half, whole, resumed = (saved_linear_layers(str(folder))[0].linear.weight for folder in folders)
    assert not torch.equal(before, half) and not torch.equal(half, whole)
    assert_close(resumed, whole, atol=0, rtol=0)


def test_an_embedding_model_keeps_its_pooling(data, encoder, tmp_path):
    start = tmp_path / "start"
    SentenceTransformer(modules=[build_encoder(str(encoder), 48)[0], Pooling(32, pooling_mode="cls")]).save(str(start))
    settings = {"model": start, "datasets": data / "datasets.yaml", "output_dir": tmp_path / "run", "max_steps": 1}
    run("dense", settings | {"eval_strategy": "no"})
    model = SentenceTransformer(str(tmp_path / "run" / "model"))
    assert model[1].pooling_mode == "cls"
    assert build_encoder(str(encoder), 48)[1].pooling_mode == "mean"


def test_a_layer_of_single_tokens_is_none_of_the_embedding(encoder, tmp_path):
    """As late interaction has one: behind the pooling it would say a size that the embeddings do not have."""
    layer = Dense(32, 8, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    SentenceTransformer(modules=[*build_encoder(str(encoder), 48), layer]).save(str(tmp_path / "model"))
    assert saved_linear_layers(str(tmp_path / "model")) == []

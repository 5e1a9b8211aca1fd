"""The modules of an embedding model after its encoder: a further training goes on with them and saves them."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from torch.testing import assert_close

from neobert_hf.embeddings.models import build_encoder
from tests.helpers.embedding_runs import run


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["all weights", "adapters"])
def test_training_goes_on_with_pooling_and_linear_layer(data, encoder, tmp_path, settings):
    """With LoRA and after an interruption, too."""
    start, output = tmp_path / "start", tmp_path / "run"
    linear = Dense(32, 32, activation_function=torch.nn.Identity())
    modules = [build_encoder(str(encoder), 48)[0], Pooling(32, pooling_mode="cls"), linear]
    SentenceTransformer(modules=modules).save(str(start))
    settings |= {"model": start, "datasets": data / "datasets.yaml", "eval_strategy": "no", "learning_rate": 1e-2}
    settings |= {"output_dir": output, "max_steps": 6, "save_steps": 3}
    run("dense", settings)
    (output / "model").rename(tmp_path / "whole")
    (output / "checkpoint-6").rename(tmp_path / "checkpoint-6")
    (output / "log.json").unlink()
    run("dense", settings)
    folders = (start, output / "checkpoint-3", tmp_path / "whole", output / "model")
    models = [SentenceTransformer(str(folder), device="cpu") for folder in folders]
    assert all(model[1].pooling_mode == "cls" for model in models)
    before, half, whole, resumed = (model[2].linear.weight for model in models)
    assert not torch.equal(before, half) and not torch.equal(half, whole)
    assert_close(resumed, whole, atol=0, rtol=0)

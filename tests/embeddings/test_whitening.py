"""The linear layer that whitens: what it makes of embeddings, and that no later step loses it."""

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from torch.testing import assert_close

from neobert_hf.embeddings.models import build_encoder
from neobert_hf.embeddings.whitening import trained_layers, whitening_layer
from tests.helpers.embedding_runs import run


def random_states(texts: int) -> torch.Tensor:
    """Nearly parallel embeddings: a large mean, and directions whose lengths differ by a factor of 10."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q
    return 50 + torch.randn(texts, 8, generator=generator) * torch.logspace(-0.5, 0.5, 8) @ directions


def test_all_directions_become_equally_long():
    states = random_states(20_000)
    output = whitening_layer(states)({"sentence_embedding": states})["sentence_embedding"].detach()
    assert_close(output.mean(0), torch.zeros(8), atol=1e-3, rtol=0)
    # What the shrinking leaves to be desired: least of the longest directions, most of the shortest.
    assert_close(output.T.cov(), torch.eye(8), atol=0.05, rtol=0)
    lengths = output.var(0)
    assert lengths[0] == lengths.max() and lengths[-1] == lengths.min()


def test_few_texts_are_not_blown_up():
    """Of 6 texts 8 directions cannot be known: without the shrinking, two would be divided by 0."""
    layer = whitening_layer(random_states(6))
    assert layer.linear.weight.isfinite().all()
    others = random_states(20_000)[6:]
    assert layer({"sentence_embedding": others})["sentence_embedding"].var(0).max() < 10


@pytest.mark.parametrize("texts", [1, 2])
def test_too_few_texts_are_refused(texts):
    with pytest.raises(ValueError, match=f"The embeddings of {texts} texts, for `whiten`, .*or set `whiten` to 0"):
        whitening_layer(random_states(texts))


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["all weights", "adapters"])
def test_training_begins_with_it_and_keeps_it(data, encoder, tmp_path, settings):
    """A run that is interrupted, too; and a second run takes it over from the first one's model."""
    common = {"datasets": data / "datasets.yaml", "eval_strategy": "no", "learning_rate": 1e-2} | settings
    first = common | {"model": encoder, "output_dir": tmp_path / "first", "max_steps": 6, "save_steps": 3}
    run("dense", first)
    (tmp_path / "first" / "model").rename(tmp_path / "whole")
    for folder in ("checkpoint-6",):
        (tmp_path / "first" / folder).rename(tmp_path / folder)
    (tmp_path / "first" / "log.json").unlink()
    run("dense", first)
    (layer,), (resumed,) = trained_layers(str(tmp_path / "whole")), trained_layers(str(tmp_path / "first" / "model"))
    assert_close(resumed.linear.weight, layer.linear.weight, atol=0, rtol=0)
    (begun,) = trained_layers(str(tmp_path / "first" / "checkpoint-3"))
    assert not torch.equal(begun.linear.weight, layer.linear.weight)

    run(
        "dense",
        common
        | {"model": tmp_path / "whole", "output_dir": tmp_path / "second", "max_steps": 1, "learning_rate": 1e-9},
    )
    (kept,) = trained_layers(str(tmp_path / "second" / "model"))
    assert_close(kept.linear.weight, layer.linear.weight, atol=1e-6, rtol=0)
    texts = ["a list", "a function of two numbers"]
    before, after = (
        SentenceTransformer(str(tmp_path / name), device="cpu").encode(texts) for name in ("whole", "second/model")
    )
    assert_close(after, before, atol=1e-4, rtol=0)


def test_an_embedding_model_keeps_its_pooling(data, encoder, tmp_path):
    start = tmp_path / "start"
    SentenceTransformer(modules=[build_encoder(str(encoder), 48)[0], Pooling(32, pooling_mode="cls")]).save(str(start))
    settings = {"model": start, "datasets": data / "datasets.yaml", "output_dir": tmp_path / "run", "max_steps": 1}
    run("dense", settings | {"eval_strategy": "no"})
    model = SentenceTransformer(str(tmp_path / "run" / "model"))
    assert model[1].pooling_mode == "cls"
    assert build_encoder(str(encoder), 48)[1].pooling_mode == "mean"


def test_zero_is_no_layer(data, encoder, tmp_path):
    settings = {
        "model": encoder,
        "datasets": data / "datasets.yaml",
        "output_dir": tmp_path,
        "max_steps": 1,
        "whiten": 0,
    }
    run("dense", settings | {"eval_strategy": "no"})
    assert trained_layers(str(tmp_path / "model")) == []
    assert not any("linear" in name for name in load_file(tmp_path / "model" / "model.safetensors"))


def test_a_layer_of_single_tokens_is_none_of_the_embedding(encoder, tmp_path):
    """As late interaction has one: behind the pooling it would say a size that the embeddings do not have."""
    layer = Dense(32, 8, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    SentenceTransformer(modules=[*build_encoder(str(encoder), 48), layer]).save(str(tmp_path / "model"))
    assert trained_layers(str(tmp_path / "model")) == []

"""LoRA: what is trained, that a checkpoint brings it back, and that the merged model is the one that was trained."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.embeddings.adapters import add_lora
from neobert_hf.embeddings.models import build_encoder, build_reranker
from neobert_hf.training.adapters import describe_adapters, linear_layers, load_adapters, merge_adapters
from neobert_hf.training.run_checkpoints import CheckpointError
from tests.helpers.embedding_runs import losses_of, run, to_flags
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder


TEXTS = ["a list of words", "for loops and x"]
PAIRS = [("how to sort", "a list"), ("x", "for loops")]


def with_adapters(model, rank: int = 4):
    settings = SimpleNamespace(lora_rank=rank, lora_alpha=None, lora_dropout=0.1)
    add_lora(model, SimpleNamespace(settings=settings, arguments=SimpleNamespace(seed=0), finished=False))
    return model


def train_somehow(model) -> None:
    """What is trained gets other values; PEFT's second matrices are zeros at first."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) / 10)


def outputs(model) -> torch.Tensor:
    model.eval()
    return torch.as_tensor(model.predict(PAIRS) if isinstance(model, CrossEncoder) else model.encode(TEXTS))


@pytest.mark.parametrize("build", [build_encoder, build_reranker])
@pytest.mark.parametrize("name", ["neobert", "bert", "deberta_v3", "modernbert"])
def test_the_merged_model_is_the_trained_one(encoder, tokenizer, tmp_path, name, build):
    if name != "neobert":
        save_other_encoder(name, tmp_path / name, tokenizer)
    path = str(encoder if name == "neobert" else tmp_path / name)
    torch.manual_seed(0)
    model = build(path, 24)
    names, before = set(model.state_dict()), outputs(model)
    with_adapters(model)
    # Without adapters some sums are made in place, in another order.
    assert torch.allclose(outputs(model), before, atol=2e-6)
    train_somehow(model)
    trained = outputs(model)
    assert (trained - before).abs().max() > 1e-3
    model.save_pretrained(str(tmp_path / "checkpoint"))
    merge_adapters(model.transformers_model)
    # Sums of float32 in another order.
    assert torch.allclose(outputs(model), trained, atol=2e-6) and set(model.state_dict()) == names
    model.save_pretrained(str(tmp_path / "merged"))
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert torch.equal(outputs(type(model)(str(tmp_path / "merged"), device="cpu")), outputs(model))
    torch.manual_seed(0)
    again = with_adapters(build(path, 24))
    load_adapters(again.transformers_model, tmp_path / "checkpoint")
    assert torch.equal(outputs(again), trained)


def test_only_the_linear_layers_of_the_blocks_get_adapters(encoder, tmp_path):
    model = with_adapters(build_encoder(str(encoder), 24))
    layers = linear_layers(build_encoder(str(encoder), 24).transformers_model)
    assert {name.split(".", 2)[2] for name in layers} == {"qkv", "wo", "ffn.w12", "ffn.w3"} and len(layers) == 8
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(trained) == 16 and all(".lora_" in name for name in trained)
    count = sum(weight.numel() for weight in trained.values())
    frozen = sum(weight.numel() for weight in build_encoder(str(encoder), 24).parameters())
    line = describe_adapters(model)
    assert f"{count:,} parameters are trained in place of {frozen:,};" in line
    # 4 bytes of a frozen weight, 16 of a trained one.
    assert f"take {(4 * frozen + 16 * count) / 1e6:,.1f} MB in place of {16 * frozen / 1e6:,.1f} MB" in line
    model.save_pretrained(str(tmp_path / "checkpoint"))
    with pytest.raises(CheckpointError, match="holds other adapters than the model has: classifier.bias is in one"):
        other = build_reranker(str(encoder), 24)
        load_adapters(with_adapters(other).transformers_model, tmp_path / "checkpoint")


def test_a_run_with_adapters_leaves_a_plain_model(settings, encoder, tmp_path, capsys):
    changes = {"lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 2e-2, "gradient_checkpointing": True}
    changes |= {"max_steps": 12, "save_steps": 6}
    flags = to_flags("dense", settings(**changes))
    flags[1] = str(ROOT / "configs/embeddings/lora.yaml")
    load_example("finetune_embeddings").main(flags)
    output = tmp_path / "run"
    losses = losses_of(json.loads((output / "log.json").read_text()))
    assert sum(losses[-4:]) < sum(losses[:4]) - 1
    assert "LoRA: 2,816 parameters" in capsys.readouterr().out
    assert not list((output / "model").glob("adapter*"))
    before, after = load_file(encoder / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[f"model.{name}"])}
    assert {name.split(".", 2)[2] for name in changed} == {"qkv.weight", "wo.weight", "ffn.w12.weight", "ffn.w3.weight"}
    # The last checkpoint holds adapters alone, loads with PEFT, and is the same model.
    assert not (output / "checkpoint-12" / "model.safetensors").exists()
    models = [SentenceTransformer(str(output / name), device="cpu") for name in ("model", "checkpoint-12")]
    assert torch.allclose(*map(outputs, models), atol=2e-6) and models[0].prompts == models[1].prompts
    with pytest.raises(SettingsMismatch, match="lora_rank: 4 there, 8 now"):
        run("dense", settings(**changes | {"lora_rank": 8, "mini_batch_size": 8}))


def test_a_rank_above_that_of_the_weights_is_refused(settings):
    with pytest.raises(ValueError, match="`lora_rank` is 33; .* 32"):
        run("dense", settings(lora_rank=33))


@pytest.mark.parametrize("name, value", [("lora_alpha", 8.0), ("lora_dropout", 0.1)])
def test_settings_of_adapters_need_a_rank(settings, name, value):
    for kind in ("dense", "reranker"):
        with pytest.raises(ValueError, match=f"`{name}`.* `lora_rank`"):
            run(kind, settings(**{name: value}))

"""LoRA: a checkpoint brings back what was trained, and the merged model is the one that was trained."""

import json

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.embeddings.models import build_encoder, build_reranker
from neobert_hf.training.adapters import LoraArguments, add_adapters, load_adapters, merge_adapters
from tests.helpers.embedding_runs import losses_of, run, to_flags
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder


TEXTS = ["a list of words", "for loops and x"]
PAIRS = [("how to sort", "a list"), ("x", "for loops")]


def with_adapters(model, rank: int = 4):
    settings = LoraArguments(lora_rank=rank, lora_dropout=0.1)
    add_adapters(model.transformers_model, settings, seed=0, with_head=isinstance(model, CrossEncoder))
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


@pytest.mark.parametrize(
    "name, build",
    [("neobert", build_encoder), ("neobert", build_reranker), ("deberta_v3", build_encoder), ("bert", build_reranker)],
)
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


def test_a_run_with_adapters_leaves_a_plain_model(settings, encoder, tmp_path):
    changes = {"lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 2e-2, "gradient_checkpointing": True}
    changes |= {"max_steps": 12, "save_steps": 6}
    flags = to_flags("dense", settings(**changes))
    flags[1] = str(ROOT / "configs/embeddings/lora.yaml")
    load_example("finetune_embeddings").main(flags)
    output = tmp_path / "run"
    losses = losses_of(json.loads((output / "log.json").read_text()))
    assert sum(losses[-4:]) < sum(losses[:4]) - 1
    assert not list((output / "model").glob("adapter*"))
    before, after = load_file(encoder / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[f"model.{name}"])}
    assert {name.split(".", 2)[2] for name in changed} == {"qkv.weight", "wo.weight", "ffn.w12.weight", "ffn.w3.weight"}
    # The last checkpoint holds adapters alone, loads with PEFT, and is the same model.
    assert not (output / "checkpoint-12" / "model.safetensors").exists()
    models = [SentenceTransformer(str(output / name), device="cpu") for name in ("model", "checkpoint-12")]
    assert torch.allclose(*map(outputs, models), atol=2e-6) and models[0].prompts == models[1].prompts
    with pytest.raises(SettingsMismatch, match="lora_rank"):
        run("dense", settings(**changes | {"lora_rank": 8, "mini_batch_size": 8}))

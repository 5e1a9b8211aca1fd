"""LoRA: the merged model is the one that was trained, and a run that was interrupted ends with the same bits."""

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer

from neobert_hf.embeddings.models import build
from neobert_hf.training.adapters import LoraArguments, add_adapters, merge_adapters
from tests.helpers.embedding_runs import losses_of, run
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder
from tests.helpers.pretraining_runs import assert_same_weights, interrupted_copy


TEXTS = ["a list of words", "for loops and x"]
PAIRS = [("how to sort", "a list"), ("x", "for loops")]


def outputs(model) -> torch.Tensor:
    model.eval()
    return torch.as_tensor(model.predict(PAIRS) if isinstance(model, CrossEncoder) else model.encode(TEXTS))


@pytest.mark.parametrize("name, kind", [("neobert", CrossEncoder), ("deberta_v3", SentenceTransformer)])
def test_the_merged_model_is_the_trained_one(encoder, tokenizer, tmp_path, name, kind):
    if name != "neobert":
        save_other_encoder(name, tmp_path / name, tokenizer)
    model = build(kind, str(encoder if name == "neobert" else tmp_path / name), 24)
    names, before = set(model.state_dict()), outputs(model)
    settings = LoraArguments(lora_rank=4, lora_dropout=0.1)
    add_adapters(model.transformers_model, settings, seed=0, with_head=kind is CrossEncoder)
    # Without adapters some sums are made in place, in another order.
    assert torch.allclose(outputs(model), before, atol=2e-6)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) / 10)
    trained = outputs(model)
    assert (trained - before).abs().max() > 1e-3
    merge_adapters(model.transformers_model)
    # Sums of float32 in another order.
    assert torch.allclose(outputs(model), trained, atol=2e-6) and set(model.state_dict()) == names
    model.save_pretrained(str(tmp_path / "merged"))
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert torch.equal(outputs(kind(str(tmp_path / "merged"), device="cpu")), outputs(model))


def test_a_run_with_adapters_leaves_a_plain_model(settings, encoder, tmp_path):
    changes = {"lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 2e-2, "gradient_checkpointing": True}
    log = run("dense", settings(config=ROOT / "configs/embeddings/lora.yaml", **changes))
    output, losses = tmp_path / "run", losses_of(log)
    assert sum(losses[-4:]) < sum(losses[:4]) - 1
    assert not list((output / "model").glob("adapter*"))
    before, after = load_file(encoder / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    changed = {name for name in after if not torch.equal(after[name], before[f"model.{name}"])}
    assert {name.split(".", 2)[2] for name in changed} == {"qkv.weight", "wo.weight", "ffn.w12.weight", "ffn.w3.weight"}
    # The last checkpoint holds adapters alone, loads with PEFT, and is the same model.
    assert not (output / "checkpoint-12" / "model.safetensors").exists()
    models = [SentenceTransformer(str(output / name), device="cpu") for name in ("model", "checkpoint-12")]
    assert torch.allclose(*map(outputs, models), atol=2e-6) and models[0].prompts == models[1].prompts


def test_a_resumed_run_with_adapters_ends_with_the_same_bits(settings, tmp_path):
    """Of a reranker, whose new head is trained as a whole beside them."""
    changes = settings(max_steps=6, save_steps=3, lora_rank=4, eval_strategy="no")
    run("reranker", changes | {"output_dir": tmp_path / "whole"})
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=3)
    run("reranker", changes)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")

"""LoRA: the merged model is the one that was trained, and a run that was interrupted ends with the same bits."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.embeddings.models import build, build_encoder
from neobert_hf.training.adapters import LoraArguments, add_adapters, merge_adapters
from tests.helpers.embedding_runs import assert_same_weights, losses_of, run, to_flags
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder


TEXTS = ["a list of words", "for loops and x"]
PAIRS = [("how to sort", "a list"), ("x", "for loops")]


def outputs(model) -> torch.Tensor:
    model.eval()
    return torch.as_tensor(model.predict(PAIRS) if isinstance(model, CrossEncoder) else model.encode(TEXTS))


def test_a_rank_above_the_size_of_a_layer_is_refused(encoder):
    model = build(SentenceTransformer, str(encoder), 24).transformers_model
    with pytest.raises(ValueError, match="lora_rank"):
        add_adapters(model, LoraArguments(lora_rank=10_000), seed=0)


@pytest.mark.parametrize(
    "name, kind",
    [("neobert", SentenceTransformer), ("neobert", CrossEncoder), ("deberta_v3", SentenceTransformer)],
)
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


@pytest.mark.parametrize("kind", ["dense", "reranker"])
def test_training_goes_on_with_all_modules(data, encoder, tmp_path, kind):
    """Those after the encoder are trained and saved as well, with adapters and after an interruption, too."""
    start, output = str(encoder), tmp_path / "run"
    if kind == "dense":
        start = str(tmp_path / "start")
        linear = Dense(32, 32, activation_function=torch.nn.Identity())
        modules = [build_encoder(str(encoder), 48)[0], Pooling(32, pooling_mode="cls"), linear]
        SentenceTransformer(modules=modules).save(start)
    settings = {"model": start, "datasets": data / "datasets.yaml", "eval_strategy": "no", "learning_rate": 1e-2}
    settings |= {"output_dir": output, "max_steps": 6, "save_steps": 3, "lora_rank": 4}
    run(kind, settings)
    shutil.copytree(output, tmp_path / "whole")
    for name in ("model", "checkpoint-6"):
        shutil.rmtree(output / name)
    run(kind, settings)
    assert_same_weights(output, tmp_path / "whole")
    if kind == "dense":
        paths = (start, output / "model", tmp_path / "whole" / "model")
        models = [SentenceTransformer(str(path), device="cpu") for path in paths]
        before, after, whole = (model[2].linear.weight for model in models)
        assert models[1][1].pooling_mode == "cls" and not torch.equal(before, after) and torch.equal(after, whole)

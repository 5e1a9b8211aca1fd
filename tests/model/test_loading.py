"""Loading is right or fails. The released code fails each of these under Transformers 5."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.modeling_neobert import rotary_table
from tests.helpers.models import ragged_batch, small_config, small_model


def outputs_of(model) -> torch.Tensor:
    ids, mask = ragged_batch()
    with torch.no_grad():
        return model.eval()(ids, attention_mask=mask).logits.float()


LOADERS = {
    "plain": lambda path: NeoBERTForMaskedLM.from_pretrained(path),
    "auto": lambda path: AutoModelForMaskedLM.from_pretrained(path),
    "device_map": lambda path: NeoBERTForMaskedLM.from_pretrained(path, device_map="cpu"),
    "device_map_auto": lambda path: NeoBERTForMaskedLM.from_pretrained(path, device_map="auto"),
    "dtype": lambda path: NeoBERTForMaskedLM.from_pretrained(path, dtype=torch.float32),
    "meta": lambda path: load_on_meta(path),
    "to_empty": lambda path: load_to_empty(path),
}


def load_on_meta(path):
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(path))
    model.load_state_dict(load_file(path / "model.safetensors"), assign=True)
    return model


def load_to_empty(path):
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(path))
    model.to_empty(device="cpu")
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model


@pytest.mark.parametrize("loader", LOADERS)
def test_loaded_model_is_the_saved_one(loader, mlm_checkpoint):
    saved = small_model(NeoBERTForMaskedLM)
    loaded = LOADERS[loader](mlm_checkpoint)
    for (name, left), (_, right) in zip(saved.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    # No buffer exists that a loader could leave uninitialised: rotation is computed from the config.
    assert not list(loaded.named_buffers()) and not list(saved.named_buffers())
    left, right = (rotary_table(m.config, torch.arange(64)[None], 64) for m in (saved, loaded))
    assert torch.equal(left, right) and right.isfinite().all() and right.dtype == torch.float32
    assert (right[0, 1:] != 0).all()
    assert torch.equal(outputs_of(saved), outputs_of(loaded))


@pytest.mark.parametrize("loader", ["from_pretrained", "to", "half_device_map"])
def test_bfloat16_keeps_the_rotation_in_float32(loader, mlm_checkpoint):
    """A table cast with the model would be off by 0.4% of the angle: whole turns beyond a few hundred tokens."""
    if loader == "to":
        model = small_model(NeoBERTForMaskedLM).to(torch.bfloat16)
    else:
        kwargs = {"device_map": "cpu"} if loader == "half_device_map" else {}
        model = AutoModelForMaskedLM.from_pretrained(mlm_checkpoint, dtype=torch.bfloat16, **kwargs)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    cos = rotary_table(model.config, torch.tensor([[4095]]), 4096)[..., 0]
    angles = 4095 / 10000 ** (torch.arange(0, 16, 2).double() / 16)
    assert (cos - angles.cos()).abs().max() < 5e-4  # float32 rounding of an angle of 4,095
    reference = outputs_of(small_model(NeoBERTForMaskedLM))
    assert torch.cosine_similarity(outputs_of(model)[0], reference[0], dim=-1).min() > 0.99


def test_loading_does_not_initialise_loaded_weights_again(mlm_checkpoint):
    """Neither at loading nor afterwards: the original's raw `.data` initialisation did it with 0 missing keys."""
    loaded = NeoBERTForMaskedLM.from_pretrained(mlm_checkpoint)
    before = {name: p.clone() for name, p in loaded.named_parameters()}
    loaded.init_weights()
    loaded.apply(loaded._init_weights)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, before[name]), name


def test_a_new_head_is_initialised_and_the_backbone_loaded(mlm_checkpoint):
    model, info = NeoBERTForSequenceClassification.from_pretrained(
        mlm_checkpoint, num_labels=3, output_loading_info=True
    )
    assert set(info["missing_keys"]) == {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"}
    saved = small_model(NeoBERTForMaskedLM).model
    for (name, left), (_, right) in zip(saved.named_parameters(), model.model.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert 0.01 < model.dense.weight.std() < 0.03 and (model.classifier.bias == 0).all()


def test_initialisation_is_the_published_one():
    config = small_config(vocab_size=4000, embedding_init_range=0.02, decoder_init_range=0.01)
    model = NeoBERTForMaskedLM(config)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            width = 0.02 if "encoder.weight" in name else 0.01
            assert width * 0.98 < p.abs().max() <= width, name
            assert abs(p.std() / (width / 3**0.5) - 1) < 0.05, f"{name} is not uniform"


def test_backbone_and_heads_exchange_checkpoints(mlm_checkpoint, tmp_path):
    backbone, info = NeoBERTModel.from_pretrained(mlm_checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"]
    backbone.save_pretrained(tmp_path / "backbone")
    classifier = NeoBERTForTokenClassification.from_pretrained(tmp_path / "backbone")
    assert torch.equal(classifier.model.encoder.weight, small_model(NeoBERTForMaskedLM).model.encoder.weight)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


QKV = "model.transformer_encoder.1.qkv.weight"
DAMAGES = {
    "missing": (lambda t: t.pop(QKV), "missing: " + QKV.replace("model.", "(model.)?")),
    "unknown": (lambda t: t.update({"model.extra.weight": torch.ones(2)}), "unknown: (model.)?extra.weight"),
    "unknown_layer": (
        lambda t: t.update({"model.transformer_encoder.7.wo.weight": torch.ones(64, 64)}),
        "unknown: .*transformer_encoder.7.wo.weight",
    ),
    "shape": (lambda t: t.update({QKV: torch.ones(192, 32)}), "qkv.weight|size mismatch|ignore_mismatched"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("cls", [NeoBERTModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_damaged_checkpoints_are_errors(damage, cls, mlm_checkpoint):
    change, message = DAMAGES[damage]
    rewrite(mlm_checkpoint, change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        cls.from_pretrained(mlm_checkpoint)


def test_mismatched_sizes_are_for_heads_only(mlm_checkpoint, tmp_path):
    NeoBERTForSequenceClassification(small_config(num_labels=4)).save_pretrained(tmp_path / "four")
    model = NeoBERTForSequenceClassification.from_pretrained(
        tmp_path / "four", num_labels=2, ignore_mismatched_sizes=True
    )
    assert model.classifier.weight.shape == (2, 64)
    rewrite(mlm_checkpoint, DAMAGES["shape"][0])
    with pytest.raises(ValueError, match="of another shape: .*qkv.weight"):
        NeoBERTForMaskedLM.from_pretrained(mlm_checkpoint, ignore_mismatched_sizes=True)


def test_missing_decoder_is_an_error_and_half_a_head_too(tmp_path):
    small_model().save_pretrained(tmp_path / "backbone")
    with pytest.raises(ValueError, match="missing: decoder.bias, decoder.weight"):
        NeoBERTForMaskedLM.from_pretrained(tmp_path / "backbone")
    small_model(NeoBERTForSequenceClassification).save_pretrained(tmp_path / "classifier")
    rewrite(tmp_path / "classifier", lambda t: t.pop("dense.bias"))
    with pytest.raises(ValueError, match="missing: dense.bias"):
        NeoBERTForSequenceClassification.from_pretrained(tmp_path / "classifier")


def test_a_classifier_of_another_head_is_not_taken(tmp_path):
    small_model(NeoBERTForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unknown: dense.bias, dense.weight"):
        NeoBERTForTokenClassification.from_pretrained(tmp_path)
    assert NeoBERTModel.from_pretrained(tmp_path)
    small_model(NeoBERTForMaskedLM).save_pretrained(tmp_path / "mlm")
    rewrite(tmp_path / "mlm", lambda t: t.update({"decoder.scale": torch.ones(2)}))
    with pytest.raises(ValueError, match="unknown: decoder.scale"):
        NeoBERTForMaskedLM.from_pretrained(tmp_path / "mlm")
    rewrite(tmp_path, lambda t: t.update({"classifier.out_proj.weight": torch.ones(2, 64)}))
    with pytest.raises(ValueError, match="unknown: classifier.out_proj.weight"):
        NeoBERTForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("form", ["sharded", "state_dict", "subfolder", "from_config"])
def test_other_ways_to_load(form, mlm_checkpoint, tmp_path):
    saved = small_model(NeoBERTForMaskedLM)
    if form == "sharded":
        saved.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
        assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / "shards")
    elif form == "state_dict":
        model = NeoBERTForMaskedLM.from_pretrained(None, config=saved.config, state_dict=saved.state_dict())
    elif form == "subfolder":
        model = AutoModelForMaskedLM.from_pretrained(tmp_path, subfolder="mlm")
    else:
        model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(mlm_checkpoint))
        model.load_state_dict(saved.state_dict())
    assert torch.equal(outputs_of(model), outputs_of(saved))


def test_resize_token_embeddings(mlm_checkpoint, tmp_path):
    model = NeoBERTForMaskedLM.from_pretrained(mlm_checkpoint)
    before = outputs_of(model)
    model.resize_token_embeddings(108, mean_resizing=False)
    assert model.config.vocab_size == model.model.config.vocab_size == 108
    assert model.model.encoder.weight.shape == model.decoder.weight.shape == (108, 64)
    assert model.decoder.bias.shape == (108,)
    assert model.decoder.weight.data_ptr() != model.model.encoder.weight.data_ptr()
    assert torch.allclose(outputs_of(model)[..., :100], before, atol=1e-5)
    assert model(torch.tensor([[107]])).logits.isfinite().all()
    model.save_pretrained(tmp_path / "resized")
    assert torch.equal(outputs_of(NeoBERTForMaskedLM.from_pretrained(tmp_path / "resized")), outputs_of(model))


@pytest.mark.parametrize("tied", [False, True])
def test_tying(tied, tmp_path):
    model = small_model(NeoBERTForMaskedLM, tie_word_embeddings=tied)
    assert (model.decoder.weight is model.model.encoder.weight) == tied
    model.save_pretrained(tmp_path / "tied")
    loaded = NeoBERTForMaskedLM.from_pretrained(tmp_path / "tied")
    assert (loaded.decoder.weight is loaded.model.encoder.weight) == tied
    assert torch.equal(outputs_of(loaded), outputs_of(model))
    # A file keeps a shared tensor once, and one that is not shared stays apart from the embeddings.
    loaded.config.tie_word_embeddings = not tied
    with pytest.raises(ValueError, match=f"`tie_word_embeddings` is {not tied}, but the decoder has"):
        loaded.save_pretrained(tmp_path / "other")
    if not tied:
        with pytest.raises(ValueError, match="is True, but the decoder has a weight of its own: set it to False"):
            NeoBERTForMaskedLM.from_pretrained(tmp_path / "tied", tie_word_embeddings=True)


@pytest.mark.parametrize("variant", ["published", "layernorm_abs"])
@pytest.mark.parametrize("kind", ["masked_lm", "sequence_classification"])
def test_original_checkpoints_go_both_ways(shared, variant, kind, tmp_path):
    """Same names, same bytes, same keys: what is saved here loads in the original code."""
    cls = NeoBERTForMaskedLM if kind == "masked_lm" else NeoBERTForSequenceClassification
    folder = shared / "reference" / variant / ("" if kind == "masked_lm" else kind)
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    model.save_pretrained(tmp_path)
    original, saved = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(original) == set(saved)
    assert all(torch.equal(original[name], saved[name]) for name in original)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    dropped = {"kwargs", "trust_remote_code", "pretrained_model_name_or_path"}
    # `auto_map` names the code that is saved beside it, which is this package's.
    changed = {"transformers_version", "architectures", "auto_map"}
    for key in set(before) - dropped - changed:
        assert after[key] == before[key], key
    assert not dropped & set(after)


def test_published_size():
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig())
    tensors = model.state_dict()
    assert len(tensors) == 172
    assert sum(x.numel() for x in tensors.values()) == 245_136_954
    assert tensors["model.transformer_encoder.27.ffn.w12.weight"].shape == (4096, 768)
    assert tensors["model.transformer_encoder.27.qkv.weight"].shape == (2304, 768)


def test_remote_code_needs_nothing_but_transformers(mlm_checkpoint, tmp_path):
    """The same files served from a repository: in a process that cannot import the package."""
    # Saved with the model: the files that the model file imports, and nothing else of the package.
    code = {"attention", "checkpoint_checks", "configuration", "cpu", "gradients", "input_checks", "modeling"}
    code |= {"packing", "rotary"}
    assert {file.name for file in mlm_checkpoint.glob("*.py")} == {f"{name}_neobert.py" for name in code}
    ids, mask = ragged_batch()
    torch.save((ids, mask), tmp_path / "batch.pt")
    script = f"""
        import sys
        sys.modules["neobert_hf"] = None  # any import of it fails
        import torch
        from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
        ids, mask = torch.load({str(tmp_path / "batch.pt")!r})
        model = AutoModelForMaskedLM.from_pretrained({str(mlm_checkpoint)!r}, trust_remote_code=True).eval()
        assert "transformers_modules" in type(model).__module__
        AutoModelForSequenceClassification.from_pretrained({str(mlm_checkpoint)!r}, trust_remote_code=True)
        backbone = AutoModel.from_pretrained({str(mlm_checkpoint)!r}, trust_remote_code=True).eval()
        labels = ids.masked_fill(mask == 0, -100)
        with torch.no_grad():
            outputs = model(ids, attention_mask=mask, labels=labels)
            hidden = backbone(ids, attention_mask=mask).last_hidden_state
        torch.save((outputs.logits, outputs.loss, hidden), {str(tmp_path / "out.pt")!r})
    """
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)
    logits, loss, hidden = torch.load(tmp_path / "out.pt")
    model = small_model(NeoBERTForMaskedLM)
    with torch.no_grad():
        here = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        assert torch.equal(here.logits, logits) and torch.equal(here.loss, loss)
        assert torch.equal(model.model(ids, attention_mask=mask).last_hidden_state, hidden)


def test_saving_keeps_the_dtype_for_both_readers(tmp_path):
    small_model().to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert AutoModel.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 64


@pytest.mark.hub
@torch.no_grad()
def test_published_checkpoint():
    """Golden values of ../shared/reference/README.md; downloads 1 GB."""
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained("chandar-lab/NeoBERT")
    assert tokenizer("hello world")["input_ids"] == [101, 7592, 2088, 102]
    model = AutoModel.from_pretrained("chandar-lab/NeoBERT")
    inputs = tokenizer("NeoBERT is the most efficient model of its kind!", return_tensors="pt")
    expected = torch.tensor([-1.9510369, -0.9967884, -1.2037753, 0.2429775, -0.1231154])
    assert torch.allclose(model(**inputs).last_hidden_state[0, 0, :5], expected, atol=1e-4)
    fill = pipeline("fill-mask", "chandar-lab/NeoBERT")
    assert fill("The capital of France is [MASK].")[0]["token_str"] == "paris"
    assert fill("Paris is the capital of [MASK].")[0]["token_str"] == "france"

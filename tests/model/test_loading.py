"""Promises 1 and 4: checkpoints go both ways, load in every way that Transformers has, or fail and name the tensor."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, pipeline

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from tests.helpers.models import ragged_batch, small_config, small_model
from tests.model.reference import KINDS, VARIANTS, write_reference


IDS, MASK = ragged_batch()


@torch.no_grad()
def outputs_of(model) -> torch.Tensor:
    return model.eval()(IDS, attention_mask=MASK)[0].float()


def rewrite(path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def on_meta(path):
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(path))
    model.load_state_dict(load_file(path / "model.safetensors"), assign=True)
    return model


LOADERS = {
    "plain": NeoBERTForMaskedLM.from_pretrained,
    "device_map": lambda path: NeoBERTForMaskedLM.from_pretrained(path, device_map="auto"),
    "meta": on_meta,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_the_loaded_model_is_the_saved_one(loader, mlm_checkpoint):
    loaded = LOADERS[loader](mlm_checkpoint)
    # No buffer exists that a loader could leave uninitialised: rotation is computed from the config.
    assert not list(loaded.named_buffers())
    assert torch.equal(outputs_of(loaded), outputs_of(small_model(NeoBERTForMaskedLM)))


def test_loaded_weights_are_not_initialised_again(mlm_checkpoint):
    """The original's raw `.data` initialisation did it with 0 missing keys."""
    loaded = NeoBERTForMaskedLM.from_pretrained(mlm_checkpoint)
    loaded.apply(loaded._init_weights)
    assert torch.equal(outputs_of(loaded), outputs_of(small_model(NeoBERTForMaskedLM)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_original_checkpoints_go_both_ways(variant, kind, tmp_path):
    """Same names, same bytes, same keys: what is saved here loads in the original code."""
    cls = NeoBERTForMaskedLM if kind == "masked_lm" else NeoBERTForSequenceClassification
    folder = write_reference(tmp_path / "original", variant, kind)
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    model.save_pretrained(tmp_path / "saved")
    original, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert set(original) == set(saved) and all(torch.equal(original[name], saved[name]) for name in original)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "saved"))
    dropped = {"kwargs", "trust_remote_code", "pretrained_model_name_or_path"}
    # `auto_map` names the code that is saved beside it, which is this package's.
    changed = {"transformers_version", "architectures", "auto_map"}
    # Transformers 5 writes `dtype`, older releases `torch_dtype`.
    assert after.get("dtype", after.get("torch_dtype")) == before["torch_dtype"]
    for key in set(before) - dropped - changed - {"torch_dtype"}:
        assert after[key] == before[key], key
    assert not dropped & set(after)


def test_the_published_size():
    with torch.device("meta"):
        tensors = NeoBERTForMaskedLM(NeoBERTConfig()).state_dict()
    assert len(tensors) == 172 and sum(x.numel() for x in tensors.values()) == 245_136_954
    assert tensors["model.transformer_encoder.27.ffn.w12.weight"].shape == (4096, 768)
    assert tensors["model.transformer_encoder.27.qkv.weight"].shape == (2304, 768)


def test_initialisation_is_the_published_one():
    config = small_config(vocab_size=4000, embedding_init_range=0.02, decoder_init_range=0.01)
    for cls in (NeoBERTForMaskedLM, NeoBERTForSequenceClassification):
        for name, p in cls(config).named_parameters():
            if "norm" in name:
                assert (p == 1).all(), name
            elif name.endswith("bias"):
                assert (p == 0).all(), name
            elif name.startswith(("dense", "classifier")):
                assert 0.01 < p.std() < 0.03, name
            else:
                width = 0.02 if "encoder.weight" in name else 0.01
                assert width * 0.98 < p.abs().max() <= width, name
                assert abs(p.std() / (width / 3**0.5) - 1) < 0.05, f"{name} is not uniform"


QKV, BLOCK = "transformer_encoder.1.qkv.weight", "transformer_encoder.7.wo.weight"
DAMAGES = {
    "missing": (lambda t: t.pop(f"model.{QKV}"), QKV),
    "block left over": (lambda t: t.update({f"model.{BLOCK}": torch.ones(64, 64)}), BLOCK),
    "head left over": (lambda t: t.update({"head.weight": torch.ones(2)}), "head.weight"),
    "misshaped": (lambda t: t.update({f"model.{QKV}": torch.ones(192, 32)}), QKV),
    "nan": (lambda t: t[f"model.{QKV}"].view(-1)[7:8].fill_(torch.nan), QKV),
    "infinite": (lambda t: t["model.encoder.weight"].view(-1)[7:8].fill_(torch.inf), "encoder.weight"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("cls", [NeoBERTModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_damaged_checkpoints(damage, cls, mlm_checkpoint, caplog):
    transformers.utils.logging.enable_propagation()
    change, name = DAMAGES[damage]
    rewrite(mlm_checkpoint, change)
    with pytest.raises((ValueError, RuntimeError)) as error:
        cls.from_pretrained(mlm_checkpoint)
    # Transformers' own error of a shape names the tensor in the report above it.
    assert name in str(error.value) + caplog.text


def test_mismatched_sizes_are_for_heads_only(mlm_checkpoint, tmp_path):
    NeoBERTForSequenceClassification(small_config(num_labels=4)).save_pretrained(tmp_path / "four")
    options = {"num_labels": 2, "ignore_mismatched_sizes": True}
    model = NeoBERTForSequenceClassification.from_pretrained(tmp_path / "four", **options)
    assert model.classifier.weight.shape == (2, 64)
    rewrite(mlm_checkpoint, DAMAGES["misshaped"][0])
    with pytest.raises(ValueError, match=QKV):
        NeoBERTForMaskedLM.from_pretrained(mlm_checkpoint, ignore_mismatched_sizes=True)


HEADS = {
    NeoBERTForSequenceClassification: {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"},
    NeoBERTForMultipleChoice: {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"},
    NeoBERTForTokenClassification: {"classifier.weight", "classifier.bias"},
    NeoBERTForQuestionAnswering: {"qa_outputs.weight", "qa_outputs.bias"},
}


def is_new(name: str, tensor: torch.Tensor) -> bool:
    return bool((tensor == 0).all()) if name.endswith("bias") else bool(0.01 < tensor.std() < 0.03)


@pytest.mark.parametrize("backbone", [NeoBERTForMaskedLM, NeoBERTModel])
@pytest.mark.parametrize("cls", HEADS)
def test_a_new_head_on_a_loaded_backbone(cls, backbone, tmp_path):
    small_model(backbone).save_pretrained(tmp_path)
    model, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == HEADS[cls]
    assert torch.equal(outputs_of(model.model), outputs_of(NeoBERTModel.from_pretrained(tmp_path)))
    assert all(is_new(name, model.get_parameter(name)) for name in HEADS[cls])


# Multiple choice has the same head as sequence classification, with one output.
PAIRS = [(source, target) for source in HEADS for target in HEADS if HEADS[source] != HEADS[target]]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_head_of_another_task_is_not_taken(source, target, tmp_path):
    """Where the shapes agree, only the other parts of the head tell the two apart."""
    trained = small_model(source)
    trained.save_pretrained(tmp_path)
    alike = NeoBERTForMultipleChoice not in (source, target)
    model = target.from_pretrained(tmp_path, **{} if alike else {"ignore_mismatched_sizes": True})
    assert torch.equal(outputs_of(model.model), outputs_of(trained.model))
    foreign = dict(trained.named_parameters())
    for name in HEADS[target]:
        tensor = model.get_parameter(name)
        assert is_new(name, tensor), name
        assert name.endswith("bias") or name not in foreign or not torch.equal(tensor[:1], foreign[name][:1])


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        (NeoBERTModel, None),
        (NeoBERTForMaskedLM, "decoder.bias"),
        (NeoBERTForSequenceClassification, "classifier.bias"),
        (NeoBERTForSequenceClassification, "dense.bias"),
        (NeoBERTForTokenClassification, "classifier.weight"),
        (NeoBERTForQuestionAnswering, "qa_outputs.bias"),
    ],
)
def test_a_decoder_or_a_part_of_a_head_that_is_missing(source, lost, tmp_path):
    small_model(source).save_pretrained(tmp_path)
    if lost:
        rewrite(tmp_path, lambda t: t.pop(lost))
    with pytest.raises(ValueError, match=lost or "decoder.bias, decoder.weight"):
        (source if lost else NeoBERTForMaskedLM).from_pretrained(tmp_path)


def test_threads_load_side_by_side(tmp_path):
    """Transformers switches tying off and the default dtype over for all threads while one of them loads."""
    small_model(NeoBERTForMaskedLM, tie_word_embeddings=True).save_pretrained(tmp_path)
    dtypes = [torch.float32, torch.float16] * 10
    with ThreadPoolExecutor(4) as executor:
        models = list(executor.map(lambda dtype: NeoBERTForMaskedLM.from_pretrained(tmp_path, dtype=dtype), dtypes))
    assert [model.dtype for model in models] == dtypes
    assert all(model.decoder.weight is model.model.encoder.weight for model in models)
    assert torch.get_default_dtype() == torch.float32


def test_remote_code_needs_nothing_but_transformers(mlm_checkpoint, tmp_path):
    """The same files served from a repository: in a process that cannot import the package."""
    names = {"configuration", "cpu", "modeling"}
    assert {file.name for file in mlm_checkpoint.glob("*.py")} == {f"{name}_neobert.py" for name in names}
    torch.save((IDS, MASK), tmp_path / "batch.pt")
    script = f"""
        import sys
        sys.modules["neobert_hf"] = None  # any import of it fails
        import torch
        from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForTokenClassification
        ids, mask = torch.load({str(tmp_path / "batch.pt")!r})
        options = {{"pretrained_model_name_or_path": {str(mlm_checkpoint)!r}, "trust_remote_code": True}}
        model = AutoModelForMaskedLM.from_pretrained(**options).eval()
        assert "transformers_modules" in type(model).__module__
        AutoModelForTokenClassification.from_pretrained(**options)
        long = AutoModel.from_pretrained(**options, rope_parameters={{"rope_type": "yarn", "factor": 2.0}})
        assert long.config.max_length == 128
        with torch.no_grad():
            outputs = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
            packed = model.prepare_for_inference()(ids, attention_mask=mask).logits
        torch.save((outputs.logits, outputs.loss, packed), {str(tmp_path / "out.pt")!r})
    """
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)
    logits, loss, packed = torch.load(tmp_path / "out.pt")
    with torch.no_grad():
        here = small_model(NeoBERTForMaskedLM)(IDS, attention_mask=MASK, labels=IDS.masked_fill(MASK == 0, -100))
    assert torch.equal(here.logits, logits) and torch.equal(here.loss, loss)
    assert torch.allclose(packed, logits, atol=1e-5)


@pytest.mark.hub
@torch.no_grad()
def test_the_published_checkpoint():
    """Golden values of the original code; downloads 1 GB."""
    tokenizer = AutoTokenizer.from_pretrained("chandar-lab/NeoBERT")
    assert tokenizer("hello world")["input_ids"] == [101, 7592, 2088, 102]
    model = AutoModel.from_pretrained("chandar-lab/NeoBERT")
    inputs = tokenizer("NeoBERT is the most efficient model of its kind!", return_tensors="pt")
    expected = torch.tensor([-1.9510369, -0.9967884, -1.2037753, 0.2429775, -0.1231154])
    assert torch.allclose(model(**inputs).last_hidden_state[0, 0, :5], expected, atol=1e-4)
    fill = pipeline("fill-mask", "chandar-lab/NeoBERT")
    assert fill("The capital of France is [MASK].")[0]["token_str"] == "paris"
    assert fill("Paris is the capital of [MASK].")[0]["token_str"] == "france"

"""Promises 1 and 4: checkpoints load in every way that Transformers has, or fail and name the tensor."""

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


def initialised_again(path):
    """The original's raw `.data` initialisation overwrote what was loaded, with 0 missing keys."""
    model = NeoBERTForMaskedLM.from_pretrained(path)
    return model.apply(model._init_weights)


LOADERS = {
    "plain": NeoBERTForMaskedLM.from_pretrained,
    "device_map": lambda path: NeoBERTForMaskedLM.from_pretrained(path, device_map="auto"),
    "meta": on_meta,
    "initialised again": initialised_again,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_the_loaded_model_is_the_saved_one(loader, mlm_checkpoint):
    loaded = LOADERS[loader](mlm_checkpoint)
    # No buffer exists that a loader could leave uninitialised: rotation is computed from the config.
    assert not list(loaded.named_buffers())
    assert torch.equal(outputs_of(loaded), outputs_of(small_model(NeoBERTForMaskedLM)))


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


SOURCES = [NeoBERTModel, NeoBERTForMaskedLM, *HEADS]
# Multiple choice has the same head as sequence classification, with one output.
PAIRS = [(source, target) for source in SOURCES for target in HEADS if HEADS.get(source) != HEADS[target]]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_head_that_the_checkpoint_lacks_is_new(source, target, tmp_path):
    """Also if it has one of another task: where the shapes agree, only its other parts tell the two apart."""
    trained = small_model(source)
    trained.save_pretrained(tmp_path)
    same_width = NeoBERTForMultipleChoice not in (source, target)
    model = target.from_pretrained(tmp_path, **{} if same_width else {"ignore_mismatched_sizes": True})
    assert torch.equal(outputs_of(model.base_model), outputs_of(trained.base_model))
    foreign = dict(trained.named_parameters())
    for name in HEADS[target]:
        tensor = model.get_parameter(name)
        assert (tensor == 0).all() if name.endswith("bias") else 0.01 < tensor.std() < 0.03, name
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

"""What runs a model: pipelines, exports, quantizers, offloading."""

from functools import partial

import pytest
import torch

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.hub import export
from tests.clients.plain import TEXTS, logits, same, tokens, vectors
from tests.helpers.examples import load_example
from tests.helpers.models import ragged_batch


@torch.no_grad()
def plain(folder: str, cls, texts=TEXTS):
    return cls.from_pretrained(folder).eval()(**tokens(folder, texts))


@pytest.mark.clients("transformers")
def test_pipelines(encoder, masked_lm, classifier, checkpoint):
    """Answers, features and probabilities are those of the plain model; texts are batched where a pipeline can."""
    from transformers import pipeline

    found = pipeline("fill-mask", masked_lm)("a [MASK] dog", top_k=3)
    best = plain(masked_lm, NeoBERTForMaskedLM, ["a [MASK] dog"]).logits[0, 2].softmax(-1).topk(3)
    assert [answer["token"] for answer in found] == best.indices.tolist()
    assert same([answer["score"] for answer in found], best.values)
    features = pipeline("feature-extraction", encoder)(TEXTS[0], return_tensors=True)
    assert same(features, plain(encoder, NeoBERTModel, TEXTS[:1]).last_hidden_state)

    found = pipeline("text-classification", classifier, top_k=None)(TEXTS, batch_size=4)
    scores = [[row["score"] for row in sorted(rows, key=lambda row: row["label"])] for rows in found]
    assert same(scores, logits(classifier).softmax(-1))
    folder = checkpoint(NeoBERTForTokenClassification, num_labels=3)
    found = pipeline("token-classification", folder, ignore_labels=[])(TEXTS[0])
    expected = plain(folder, NeoBERTForTokenClassification, TEXTS[:1]).logits[0, 1:-1].softmax(-1)
    assert same([token["score"] for token in found], expected.max(-1).values)

    # The score of a label is that of entailment for the text and the label's sentence as a pair.
    folder = checkpoint(NeoBERTForSequenceClassification, label2id={"contradiction": 0, "entailment": 1})
    labels, form = ["a cat", "the dog"], "it is {}"
    found = pipeline("zero-shot-classification", folder)(TEXTS[0], labels, hypothesis_template=form)
    scores = dict(zip(found["labels"], found["scores"]))
    entailment = logits(folder, [(TEXTS[0], form.format(label)) for label in labels])[:, 1]
    assert same([scores[label] for label in labels], entailment.softmax(0))


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)


def torchao(model, scheme: str):
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, scheme)())
    return model


def quanto(model):
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)
    return model


def bitsandbytes(model):
    from transformers import AutoModelForMaskedLM, BitsAndBytesConfig

    settings, folder = BitsAndBytesConfig(load_in_8bit=True), model.name_or_path
    return AutoModelForMaskedLM.from_pretrained(folder, quantization_config=settings, device_map="cpu").eval()


QUANTIZERS = {
    "dynamic": (dynamic, pytest.mark.clients("torch")),
    "weights": (partial(torchao, scheme="Int8WeightOnlyConfig"), pytest.mark.clients("torchao")),
    "activations": (partial(torchao, scheme="Int8DynamicActivationInt8WeightConfig"), pytest.mark.clients("torchao")),
    "quanto": (quanto, pytest.mark.clients("optimum-quanto")),
    "bitsandbytes": (bitsandbytes, pytest.mark.clients("bitsandbytes")),
}


@torch.no_grad()
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, (_, mark) in QUANTIZERS.items()])
def test_quantizers(name, masked_lm):
    """The logits have a cosine of more than 0.99 with the plain ones, and are not the same."""
    ids, mask = ragged_batch()
    model, quantized = (NeoBERTForMaskedLM.from_pretrained(masked_lm).eval() for _ in range(2))
    quantized = QUANTIZERS[name][0](quantized)
    got, expected = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (quantized, model))
    assert torch.cosine_similarity(got.flatten(), expected.flatten(), dim=0) > 0.99 and not torch.equal(got, expected)


@pytest.mark.clients("openvino")
def test_openvino(encoder, tmp_path):
    """The exported file's hidden states are the plain ones; vectors of its int8 file have a cosine of 0.99 to them."""
    import openvino

    export(model=encoder, output_dir=tmp_path / "exported", precisions=["float32", "int8"])
    file, expected = tmp_path / "exported/onnx/model.onnx", plain(encoder, NeoBERTModel).last_hidden_state
    inputs = {name: tokens(encoder)[name].numpy() for name in ("input_ids", "attention_mask")}
    # On some CPUs it would round to bfloat16 unasked.
    assert same(openvino.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)[0], expected)
    # And as the example does it.
    example = load_example("onnx_inference").OnnxModel
    expected = vectors(encoder)
    assert same(example(tmp_path / "exported", engine="openvino").encode(TEXTS, batch_size=3), expected)
    found = example(tmp_path / "exported", "int8", engine="openvino").encode(TEXTS, batch_size=3)
    cosines = torch.cosine_similarity(torch.from_numpy(found), torch.from_numpy(expected))
    assert cosines.min() >= 0.99 and not same(found, expected)


@pytest.mark.clients("accelerate")
@torch.no_grad()
def test_offloading(masked_lm, tmp_path):
    """With all weights on disk, or loaded into an empty model with one block on disk, the logits are the plain ones."""
    from accelerate import disk_offload, init_empty_weights, load_checkpoint_and_dispatch

    expected = plain(masked_lm, NeoBERTForMaskedLM).logits
    model = NeoBERTForMaskedLM.from_pretrained(masked_lm).eval()
    disk_offload(model, offload_dir=tmp_path / "all", execution_device=torch.device("cpu"))
    assert same(model(**tokens(masked_lm)).logits, expected)
    with init_empty_weights():
        empty = NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(masked_lm)).eval()
    placed = dict.fromkeys(("model.encoder", "model.transformer_encoder.0", "model.layer_norm", "decoder"), "cpu")
    placed |= {"model.transformer_encoder.1": "disk"}
    model = load_checkpoint_and_dispatch(empty, masked_lm, device_map=placed, offload_folder=tmp_path / "one")
    assert same(model(**tokens(masked_lm)).logits, expected)


@pytest.mark.clients("accelerate")
@torch.no_grad()
def test_compiled_regions(masked_lm):
    """For 1 to 8 ragged texts the logits are the plain ones, and nothing is compiled after the third."""
    from accelerate.utils import compile_regions
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = NeoBERTForMaskedLM.from_pretrained(masked_lm).eval()
    # No code is generated: what is tested are the graphs.
    compiled = compile_regions(model, backend="aot_eager", dynamic=True)
    counters.clear()
    graphs = []
    for number in range(1, 9):
        inputs = tokens(masked_lm, (TEXTS * 2)[:number])
        assert same(compiled(**inputs).logits, model(**inputs).logits)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[2] == graphs[-1]

"""What runs a model: pipelines, exports, quantizers, offloading."""

import copy

import pytest
import torch

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from tests.clients.plain import TEXTS, logits, same, tokens, vectors
from tests.helpers.examples import load_example
from tests.helpers.models import ragged_batch, small_model


IDS, MASK = ragged_batch()


@torch.no_grad()
def plain(folder: str, cls, texts=TEXTS):
    return cls.from_pretrained(folder).eval()(**tokens(folder, texts))


@pytest.mark.clients("transformers")
def test_fill_mask(masked_lm):
    """Tokens and their probabilities are those of the plain logits."""
    from transformers import pipeline

    found = pipeline("fill-mask", masked_lm)("a [MASK] dog", top_k=3)  # in the table
    best = plain(masked_lm, NeoBERTForMaskedLM, ["a [MASK] dog"]).logits[0, 2].softmax(-1).topk(3)
    assert [answer["token"] for answer in found] == best.indices.tolist()
    assert same([answer["score"] for answer in found], best.values)


@pytest.mark.clients("transformers")
def test_feature_extraction(encoder):
    """The features are the plain hidden states."""
    from transformers import pipeline

    features = pipeline("feature-extraction", encoder)(TEXTS[0], return_tensors=True)  # in the table
    assert same(features, plain(encoder, NeoBERTModel, TEXTS[:1]).last_hidden_state)


@pytest.mark.clients("transformers")
def test_text_classification(classifier):
    """In batches of ragged texts the probabilities are those of the plain logits."""
    from transformers import pipeline

    found = pipeline("text-classification", classifier, top_k=None)(TEXTS, batch_size=4)  # in the table
    scores = [[row["score"] for row in sorted(rows, key=lambda row: row["label"])] for rows in found]
    assert same(scores, logits(classifier).softmax(-1))


@pytest.mark.clients("transformers")
def test_token_classification(checkpoint):
    """The probability of each token is that of the plain logits."""
    from transformers import pipeline

    folder = checkpoint(NeoBERTForTokenClassification, num_labels=3)
    found = pipeline("token-classification", folder, ignore_labels=[])(TEXTS[0])  # in the table
    expected = plain(folder, NeoBERTForTokenClassification, TEXTS[:1]).logits[0, 1:-1].softmax(-1)
    assert same([token["score"] for token in found], expected.max(-1).values)


@pytest.mark.clients("transformers")
def test_zero_shot_classification(checkpoint):
    """The score of a label is the plain model's entailment score for text and label sentence as a pair."""
    from transformers import pipeline

    folder = checkpoint(NeoBERTForSequenceClassification, label2id={"contradiction": 0, "entailment": 1})
    labels, form = ["a cat", "the dog"], "it is {}"
    found = pipeline("zero-shot-classification", folder)(TEXTS[0], labels, hypothesis_template=form)  # in the table
    scores = dict(zip(found["labels"], found["scores"]))
    entailment = logits(folder, [(TEXTS[0], form.format(label)) for label in labels])[:, 1]
    assert same([scores[label] for label in labels], entailment.softmax(0))


@pytest.mark.clients("torch")
def test_torch_export():
    """A program exported with dynamic batch size and length gives the plain logits for another shape."""
    model = small_model(NeoBERTForMaskedLM)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    shapes = {"input_ids": free, "attention_mask": free}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)  # in the table
    other, mask = ragged_batch((20, 5))
    with torch.no_grad():
        got, expected = (m(input_ids=other, attention_mask=mask).logits for m in (program.module(), model))
    assert same(got[mask.bool()], expected[mask.bool()])


@pytest.mark.clients("torch")
@torch.no_grad()
def test_dynamic_quantization():
    """The logits have a cosine of more than 0.99 with the plain ones."""
    model = small_model(NeoBERTForMaskedLM)
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)  # in the table
    assert isinstance(quantized.decoder, torch.ao.nn.quantized.dynamic.Linear)
    assert similar(quantized, model)


@pytest.mark.clients("torchao")
@torch.no_grad()
def test_torchao_weights():
    """With weights in int8 the logits have a cosine of more than 0.99 with the plain ones, and are not the same."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = small_model(NeoBERTForMaskedLM)
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8WeightOnlyConfig())  # in the table
    assert similar(quantized, model)


@pytest.mark.clients("torchao")
@torch.no_grad()
def test_torchao_activations():
    """With weights and activations in int8 the logits have a cosine of more than 0.99, and are not the same."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = small_model(NeoBERTForMaskedLM)
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())  # in the table
    assert similar(quantized, model)


def similar(quantized, model) -> bool:
    got, expected = (m(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()] for m in (quantized, model))
    cosines = torch.cosine_similarity(got.flatten(), expected.flatten(), dim=0)
    return 0.99 < cosines and not torch.equal(got, expected)


@pytest.mark.clients("optimum-quanto")
@torch.no_grad()
def test_quanto():
    """With frozen int8 weights the logits have a cosine of more than 0.99 with the plain ones."""
    from optimum.quanto import freeze, qint8, quantize

    model = small_model(NeoBERTForMaskedLM)
    quantized = copy.deepcopy(model)
    quantize(quantized, weights=qint8)  # in the table
    freeze(quantized)
    assert similar(quantized, model)


@pytest.mark.clients("bitsandbytes")
@torch.no_grad()
def test_bitsandbytes(masked_lm):
    """Loaded in 8 bits, the logits have a cosine of more than 0.99 with the plain ones."""
    from transformers import AutoModelForMaskedLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_8bit=True)
    quantized = AutoModelForMaskedLM.from_pretrained(
        masked_lm, quantization_config=settings, device_map="cpu"
    )  # in the table
    assert similar(quantized.eval(), NeoBERTForMaskedLM.from_pretrained(masked_lm).eval())


@pytest.mark.clients("onnxruntime")
def test_onnxruntime(encoder, tmp_path):
    """The exported file's hidden states are the plain ones, to the export's tolerance of 1e-5."""
    import onnxruntime

    from tests.helpers.onnx_checkpoints import export

    export(encoder, tmp_path / "exported", precisions=["float32"])
    session = onnxruntime.InferenceSession(tmp_path / "exported/onnx/model.onnx")  # in the table
    inputs = tokens(encoder)
    (states,) = session.run(None, {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")})
    assert same(states, plain(encoder, NeoBERTModel).last_hidden_state)


@pytest.mark.clients("openvino")
def test_openvino(encoder, tmp_path):
    """The exported file's hidden states are the plain ones; vectors of its int8 file have a cosine of 0.99 to them."""
    import openvino

    from tests.helpers.onnx_checkpoints import export

    export(encoder, tmp_path / "exported", precisions=["float32", "int8"])
    # On some CPUs it would round to bfloat16 unasked.
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.compile_model(tmp_path / "exported/onnx/model.onnx", "CPU", exact)  # in the table
    inputs = tokens(encoder)
    states = model({name: inputs[name].numpy() for name in ("input_ids", "attention_mask")})[0]
    assert same(states, plain(encoder, NeoBERTModel).last_hidden_state)
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
    """With all weights offloaded to disk, the logits are the plain ones."""
    from accelerate import disk_offload

    model = NeoBERTForMaskedLM.from_pretrained(masked_lm).eval()
    disk_offload(model, offload_dir=tmp_path, execution_device=torch.device("cpu"))  # in the table
    assert same(model(**tokens(masked_lm)).logits, plain(masked_lm, NeoBERTForMaskedLM).logits)


@pytest.mark.clients("accelerate")
@torch.no_grad()
def test_dispatch(masked_lm, tmp_path):
    """Empty weights that are loaded block by block, with one block on disk, give the plain logits."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        empty = NeoBERTForMaskedLM(NeoBERTConfig.from_pretrained(masked_lm)).eval()
    placed = dict.fromkeys(("model.encoder", "model.transformer_encoder.0", "model.layer_norm", "decoder"), "cpu")
    placed |= {"model.transformer_encoder.1": "disk"}
    model = load_checkpoint_and_dispatch(empty, masked_lm, device_map=placed, offload_folder=tmp_path)  # in the table
    assert same(model(**tokens(masked_lm)).logits, plain(masked_lm, NeoBERTForMaskedLM).logits)


@pytest.mark.clients("accelerate")
@torch.no_grad()
def test_compiled_regions(masked_lm):
    """For 1 to 8 texts the logits are the plain ones, and nothing is compiled after the third (no code generated)."""
    from accelerate.utils import compile_regions
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = NeoBERTForMaskedLM.from_pretrained(masked_lm, unpad=False).eval()
    compiled = compile_regions(model, backend="aot_eager")  # in the table
    counters.clear()
    graphs = []
    for number in range(1, 9):
        inputs = tokens(masked_lm, (TEXTS * 2)[:number])
        assert same(compiled(**inputs).logits, model(**inputs).logits)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[2] == graphs[-1]

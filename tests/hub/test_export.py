"""`neobert-hf export`: ONNX files give the numbers of PyTorch and of Sentence Transformers."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from transformers import pipeline

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.common.files import FolderInUse, folder_lock
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT, ragged_batch, small_model
from tests.helpers.small_tokenizer import small_tokenizer


# Exports take a minute each where the machine is busy.
pytestmark = pytest.mark.slow


onnx = pytest.importorskip("onnx", reason="pip install 'neobert_hf[export]'")
pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")

import onnx_ir  # noqa: E402
import onnxruntime  # noqa: E402

from neobert_hf.cli import main  # noqa: E402
from neobert_hf.hub import export as export_module  # noqa: E402
from neobert_hf.hub.export import FILES, LARGEST_ERROR, ONE_ANSWER_A_ROW  # noqa: E402
from tests.helpers.onnx_checkpoints import export, save_checkpoint  # noqa: E402


# Of many lengths, in no order; the last is cut at 32 tokens, like the encoder's. Batches of three have padding.
TEXTS = ["cats and dogs " * 3, "a query", "x", "", "the " * 20, "a long document about many cats and as many dogs " * 2]


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory):
    """A masked language model, and its export in all precisions."""
    folder = tmp_path_factory.mktemp("masked_lm")
    save_checkpoint(folder / "model", NeoBERTForMaskedLM)
    assert main(["export", str(folder / "model"), str(folder / "exported")]) is None
    return folder


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory):
    """A Sentence Transformers model, and its export in float32."""
    folder = tmp_path_factory.mktemp("embeddings")
    encoder = build_encoder(str(save_checkpoint(folder / "encoder")), max_length=32)
    prompts = {"query": "dogs and ", "document": ""}
    SentenceTransformer(modules=[*encoder, Normalize()], prompts=prompts).save(str(folder / "model"))
    export(folder / "model", folder / "exported", precisions=["float32"])
    return folder


def run_file(folder, ids, mask, precision="float32") -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(folder / "onnx" / FILES[precision])
    return session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})


@torch.no_grad()
def run_model(model, ids, mask, outputs) -> list[np.ndarray]:
    results = model.float().eval()(ids, attention_mask=mask)
    return [results[name].numpy() for name in outputs]


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def use_traced(monkeypatch, file) -> None:
    """A trace takes seconds: take one that is there already."""
    monkeypatch.setattr(export_module, "trace", lambda module, batch: onnx_ir.load(file))


def test_the_layout_is_that_of_transformers_js(masked_lm):
    exported = masked_lm / "exported"
    files = sorted(str(file.relative_to(exported)) for file in exported.rglob("*") if file.is_file())
    names = ("model.onnx", "model_fp16.onnx", "model_quantized.onnx")
    assert files == ["config.json", *(f"onnx/{name}" for name in names), "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        model = onnx.load(exported / "onnx" / name)
        signature = {
            value.name: (value.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in dims])
            for value in [*model.graph.input, *model.graph.output]
            for dims in [value.type.tensor_type.shape.dim]
        }
        axes = ["batch_size", "sequence_length"]
        ids, floats = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
        assert signature == {"input_ids": (ids, axes), "attention_mask": (ids, axes), "logits": (floats, [*axes, 100])}


def test_weights_have_the_precision_of_their_file(masked_lm):
    """All matrices and embeddings, 65,000 numbers; what is left in float32 are scales."""
    largest = {}
    for name in ("model.onnx", "model_fp16.onnx", "model_quantized.onnx"):
        for weight in onnx.load(masked_lm / "exported" / "onnx" / name).graph.initializer:
            kind, size = onnx.TensorProto.DataType.Name(weight.data_type), int(np.prod(weight.dims))
            largest[name, kind] = max(size, largest.get((name, kind), 0))
    assert largest["model.onnx", "FLOAT"] == largest["model_fp16.onnx", "FLOAT16"] == 64 * 192
    assert largest["model_quantized.onnx", "INT8"] == 64 * 192
    assert largest.get(("model_fp16.onnx", "FLOAT"), 0) <= 192
    assert largest["model_quantized.onnx", "FLOAT"] <= 192
    # Two products with 8-bit states fit in 16 bits: what CPUs without VNNI add.
    quantized = onnx.load(masked_lm / "exported" / "onnx" / "model_quantized.onnx").graph.initializer
    matrices = [weight for weight in quantized if weight.data_type == onnx.TensorProto.INT8 and len(weight.dims) == 2]
    values = [np.abs(onnx.numpy_helper.to_array(weight).astype(int)).max() for weight in matrices]
    assert len(values) > 4 and 2 * 255 * max(values) < 2**15


# Beyond the training length (64), one token, one row, a row that is nothing but padding.
BATCHES = [(13, 7, 1, 10), (1,), (64,), (150, 9), (5, 0, 20), (3, 3, 3), tuple(range(1, 40))]


@pytest.mark.parametrize("side", ["right", "left", "anywhere"])
def test_any_batch_gives_what_pytorch_gives(masked_lm, side):
    model = NeoBERTForMaskedLM.from_pretrained(masked_lm / "model")
    for lengths in BATCHES:
        ids, mask = ragged_batch(lengths, side=side)
        (expected,) = run_model(model, ids, mask, ["logits"])
        for precision, largest in LARGEST_ERROR.items():
            (got,) = run_file(masked_lm / "exported", ids, mask, precision)
            assert error_of(got, expected) <= largest, (precision, lengths)


def test_float16_keeps_norms_and_positions_in_float32(tmp_path):
    """Hidden states of 1,300, as in the published weights, whose squares float16 lacks; and positions over 2,048."""
    model = small_model(num_hidden_layers=1)
    model.encoder.weight.data *= 1_300
    ids, mask = ragged_batch((3_000,))
    expected = run_model(model, ids, mask, ["last_hidden_state"])[0]
    export(save_checkpoint(tmp_path / "model", model=model), tmp_path / "exported", precisions=["float16"])
    (got,) = run_file(tmp_path / "exported", ids, mask, "float16")
    assert error_of(got, expected) <= LARGEST_ERROR["float16"]


HEADS = {
    "text-classification": (NeoBERTForSequenceClassification, ["logits"], {"classifier_pooling": "mean"}, "int8"),
    # With the ablation before M1 of Table 2.
    "token-classification": (
        NeoBERTForTokenClassification,
        ["logits"],
        {"num_labels": 5, "rope": False, "rms_norm": False, "hidden_act": "gelu"},
        "float32",
    ),
    "question-answering": (
        NeoBERTForQuestionAnswering,
        ["start_logits", "end_logits"],
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "float32",
    ),
}


@pytest.mark.parametrize("task", HEADS)
def test_heads_and_variants(tmp_path, task):
    cls, outputs, changes, precision = HEADS[task]
    model = small_model(cls, classifier_init_range=0.3, num_hidden_layers=1, **changes)
    # Heads with one answer a row refuse a row without a token.
    ids, mask = ragged_batch((13, 2 if task in ONE_ANSWER_A_ROW else 0, 1, 10))
    expected = run_model(model, ids, mask, outputs)
    export(save_checkpoint(tmp_path / "model", model=model), tmp_path / "exported", precisions=[precision])
    got = run_file(tmp_path / "exported", ids, mask, precision)
    assert len(got) == len(outputs)
    for wanted, found in zip(expected, got):
        assert error_of(found, wanted) <= LARGEST_ERROR[precision]


def test_the_encoder_of_a_published_checkpoint(shared, tmp_path):
    """The original's names in `architectures`, its outputs, and `auto_map` for code that the folder does not hold."""
    published = shared / "reference" / "published"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    small_tokenizer(500).save_pretrained(tmp_path)
    export(tmp_path, tmp_path / "exported", task="feature-extraction", precisions=["float32"])
    recorded = load_file(published / "expected.safetensors")
    ids, mask = recorded["input_ids"].long(), recorded["attention_mask"].long()
    (got,) = run_file(tmp_path / "exported", ids, mask)
    assert np.abs(got - recorded["last_hidden_state"].numpy())[mask.bool().numpy()].max() <= 1e-5
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["architectures"] == ["NeoBERTModel"] and "auto_map" not in config


# `examples/onnx_inference.py`


def in_a_process_without_torch(folder, calls: str):
    script = f"""import json, runpy, sys
from pathlib import Path
sys.modules |= dict.fromkeys(['torch', 'transformers', 'neobert_hf'])
model = runpy.run_path({str(ROOT / "examples" / "onnx_inference.py")!r})["OnnxModel"](Path({str(folder)!r}))
print(json.dumps({calls}))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_example_encodes_as_sentence_transformers_does(embedding_model):
    encoder = SentenceTransformer(str(embedding_model / "model"), device="cpu")
    calls = {
        f"model.encode({TEXTS!r}, batch_size=3)": encoder.encode(TEXTS),
        f"model.encode({TEXTS!r}, prompt='the ')": encoder.encode(TEXTS, prompt="the "),
        f"model.encode_query({TEXTS!r}, batch_size=2)": encoder.encode_query(TEXTS),
        f"model.encode_document({TEXTS!r})": encoder.encode_document(TEXTS),
        "model.encode('one text')": encoder.encode("one text"),
    }
    results = in_a_process_without_torch(
        embedding_model / "exported", f"[call.tolist() for call in ({', '.join(calls)})]"
    )
    for got, (call, expected) in zip(results, calls.items()):
        assert np.shape(got) == expected.shape and np.abs(np.array(got) - expected).max() <= 1e-5, call
    # The prompts make a difference.
    assert np.abs(encoder.encode(TEXTS) - encoder.encode_query(TEXTS)).max() > 0.01


# Options of the Sentence Transformers model, its pooling, length, and the side that is cut.
VARIANTS = {
    "default prompt, fewer dimensions": (
        {"prompts": {"the": "the "}, "default_prompt_name": "the", "truncate_dim": 20},
        "mean",
        32,
        "right",
    ),
    "first token": ({"prompts": {"query": "cats "}}, "cls", 32, "right"),
    "the end of shorter texts": ({}, "mean", 6, "left"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_example_follows_the_settings_of_the_model(embedding_model, tmp_path, monkeypatch, variant):
    options, pooling, length, side = VARIANTS[variant]
    use_traced(monkeypatch, embedding_model / "exported" / "onnx" / "model.onnx")
    transformer = build_encoder(str(embedding_model / "model"), max_length=32)[0]
    SentenceTransformer(modules=[transformer, Pooling(64, pooling)], **options).save(str(tmp_path / "model"))
    edit_json(tmp_path / "model" / "sentence_bert_config.json", max_seq_length=length)
    edit_json(tmp_path / "model" / "tokenizer_config.json", truncation_side=side)
    export(tmp_path / "model", tmp_path / "exported", precisions=["float32"])
    encoder = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    model = load_example("onnx_inference").OnnxModel(tmp_path / "exported")
    for name, arguments in (("encode", {}), ("encode_query", {}), ("encode", {"normalize_embeddings": True})):
        expected = getattr(encoder, name)(TEXTS, **arguments)
        np.testing.assert_allclose(getattr(model, name)(TEXTS, **arguments), expected, atol=1e-5)


def test_example_names_what_it_cannot_do(embedding_model):
    model = load_example("onnx_inference").OnnxModel(embedding_model / "exported")
    with pytest.raises(ValueError, match="'other'"):
        model.encode(["one"], prompt_name="other")
    model.pooling = {"pooling_mode": "max"}
    with pytest.raises(ValueError, match="'max'"):
        model.encode(["one"])


def test_example_fills_masks_as_the_pipeline_does(masked_lm):
    text = "cats and [MASK]ogs"
    expected = pipeline("fill-mask", str(masked_lm / "model"))(text)
    got = in_a_process_without_torch(masked_lm / "exported", f"model.fill_mask({text!r})")
    assert [token for token, _ in got] == [guess["token_str"] for guess in expected]
    assert np.allclose([guess["score"] for guess in expected], [probability for _, probability in got], atol=1e-5)


# Embedding models


def test_a_linear_layer_after_the_pooling_is_inside(tmp_path):
    """Whoever pools the file's token states gets Sentence Transformers' embeddings, and no module is applied twice."""
    encoder = build_encoder(str(save_checkpoint(tmp_path / "encoder")), max_length=32)
    linear = Dense(64, 64, activation_function=torch.nn.Identity())
    torch.nn.init.normal_(linear.linear.bias)
    model = SentenceTransformer(modules=[*encoder, linear, Normalize()])
    model.save(str(tmp_path / "model"))
    export(tmp_path / "model", tmp_path / "out", precisions=["float32"])
    example = load_example("onnx_inference").OnnxModel(tmp_path / "out")
    np.testing.assert_allclose(example.encode(TEXTS), model.encode(TEXTS), atol=2e-6)
    names = [entry["type"].rsplit(".", 1)[-1] for entry in json.loads((tmp_path / "out" / "modules.json").read_text())]
    assert names == ["Transformer", "Pooling", "Normalize"]


def test_what_text_embeddings_inference_asks_for_is_there(tmp_path, embedding_model, monkeypatch):
    """The keys without a default in `router/src/lib.rs` and `backends/ort/src/lib.rs`, of old and new versions.

    The model has the pooling of older versions of Sentence Transformers: a key for each mode. The server itself has not
    run. It pads and cuts by itself, so the tokenizer must store neither.
    """
    use_traced(monkeypatch, embedding_model / "exported" / "onnx" / "model.onnx")
    build_encoder(str(save_checkpoint(tmp_path / "encoder")), max_length=32).save(str(tmp_path / "model"))
    file = tmp_path / "model" / "1_Pooling" / "config.json"
    file.write_text('{"word_embedding_dimension": 64, "pooling_mode_cls_token": true}')
    export(tmp_path / "model", tmp_path / "out", precisions=["float32"])
    written = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    assert written["config.json"].keys() >= {"architectures", "model_type", "hidden_size", "num_hidden_layers"}
    assert written["config.json"]["max_position_embeddings"] == 64
    assert written["sentence_bert_config.json"]["max_seq_length"] == 32
    assert written["tokenizer.json"]["padding"] is written["tokenizer.json"]["truncation"] is None
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode"] == "cls"
    keys = ("pooling_mode_cls_token", "pooling_mode_mean_tokens")
    older = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens")
    assert [pooling[key] for key in (*keys, *older)] == [True, False, False, False]


# What cannot be exported


def modules_behind(*modules):
    """A model with modules behind its pooling."""

    def save(folder):
        encoder = build_encoder(str(save_checkpoint(folder.with_name("encoder"))), max_length=32)
        SentenceTransformer(modules=[*encoder, *modules]).save(str(folder))

    return save


def checkpoint(cls, **changes):
    return lambda folder: save_checkpoint(folder, cls, **changes)


def not_finite(folder):
    model = small_model()
    model.transformer_encoder[1].wo.weight.data.uniform_(2e38, 3e38)
    save_checkpoint(folder, model=model)


SQUARE = Dense(64, 64, activation_function=torch.nn.Identity())
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
# The model, the flags, and the name that the error says.
REFUSED = {
    "no head": (checkpoint(NeoBERTForMaskedLM), "--task text-classification", "dense"),
    "no decoder": (checkpoint(NeoBERTModel), "--task fill-mask", "NeoBERTForMaskedLM"),
    "no task": (checkpoint(NeoBERTForMultipleChoice), "", "feature-extraction"),
    "unknown task": (checkpoint(NeoBERTModel), "--task translation", "translation"),
    "unknown precision": (checkpoint(NeoBERTModel), "--precisions int4", "int4"),
    "two kinds of files": (checkpoint(NeoBERTModel), "--gguf --space", "--gguf"),
    "other texts count": (checkpoint(NeoBERTModel, **DYNAMIC), "", "'dynamic'"),
    # Before the pooling these would give other embeddings.
    "narrowing layer": (modules_behind(Dense(64, 8)), "", "Dense"),
    "layer behind a normalisation": (modules_behind(Normalize(), SQUARE), "", "Dense"),
    "not finite": (not_finite, "--precisions float32", "nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused(tmp_path, case):
    save, flags, name = REFUSED[case]
    save(tmp_path / "model")
    assert name in main(["export", str(tmp_path / "model"), str(tmp_path / "out"), *flags.split()])
    assert not list(tmp_path.glob("out*"))


def test_a_file_that_misses_its_tolerance_is_not_written(masked_lm, tmp_path, monkeypatch):
    """The graph has other weights than the checkpoint, by not much."""
    use_traced(monkeypatch, masked_lm / "exported" / "onnx" / "model.onnx")
    model = small_model(NeoBERTForMaskedLM)
    model.model.transformer_encoder[0].qkv.weight.data *= 1.5
    save_checkpoint(tmp_path / "model", model=model)
    for precision in ("int8", "float32"):
        with pytest.raises(ValueError, match=precision):
            export(tmp_path / "model", tmp_path / "out", precisions=[precision])
    assert not list(tmp_path.glob("out*"))


def test_an_output_that_exists_or_is_being_written_is_refused(embedding_model, tmp_path):
    command = ["export", str(embedding_model / "model")]
    assert "exported" in main([*command, str(embedding_model / "exported")])
    with folder_lock(tmp_path / "out"), pytest.raises(FolderInUse):
        main([*command, str(tmp_path / "out")])

"""`neobert-hf export`: ONNX files give the numbers of PyTorch in ONNX Runtime, also without PyTorch, and in Node."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from transformers import AutoTokenizer, pipeline

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.common.files import folder_lock
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.examples import status_of
from tests.helpers.models import ROOT, ragged_batch, save_checkpoint, small_model


# Exports take a minute each where the machine is busy.
pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx", reason="pip install 'neobert_hf[export]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")

from neobert_hf.hub.onnx_files import FILES, LARGEST_ERROR  # noqa: E402


# Of many lengths, in no order; the last is cut at 32 tokens, like the encoder's. Batches of three have padding.
TEXTS = ["cats and dogs " * 3, "a query", "x", "", "the " * 20, "a long document about many cats and as many dogs " * 2]
MASKED = "cats and [MASK]ogs"


def export(source, output, *flags: str) -> None:
    assert status_of(["export", str(source), str(output), *flags]) == 0


@pytest.fixture(scope="module")
def exported(masked_lm, embedder, tmp_path_factory):
    """The folders `fill`, of the masked language model, and `embed`, in all precisions."""
    folder = tmp_path_factory.mktemp("exported")
    export(masked_lm, folder / "fill")
    export(embedder, folder / "embed")
    return folder


def run_file(folder, ids, mask, precision="float32") -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(folder / "onnx" / FILES[precision])
    return session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})


@torch.no_grad()
def error_of(found: list[np.ndarray], model, ids, mask, outputs) -> float:
    """The largest error of the outputs, as a share of the norm of PyTorch's."""
    results = model.float().eval()(ids, attention_mask=mask)
    wanted = [results[name].numpy() for name in outputs]
    return max(np.linalg.norm(got - want) / np.linalg.norm(want) for got, want in zip(found, wanted, strict=True))


# The files


def test_the_layout_is_that_of_transformers_js(exported):
    """Each file has its precision in all matrices and embeddings; what is left in float32 are scales."""
    folder = exported / "fill"
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    names = {"model.onnx": {"FLOAT"}, "model_fp16.onnx": {"FLOAT16"}, "model_quantized.onnx": {"INT8", "UINT8"}}
    assert files == ["config.json", *(f"onnx/{name}" for name in names), "tokenizer.json", "tokenizer_config.json"]
    # It would name code that the folder does not hold.
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    axes, ids, floats = ["batch_size", "sequence_length"], onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    for name, kinds in names.items():
        graph = onnx.load(folder / "onnx" / name).graph
        signature = {
            value.name: (value.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in dims])
            for value in [*graph.input, *graph.output]
            for dims in [value.type.tensor_type.shape.dim]
        }
        assert signature == {"input_ids": (ids, axes), "attention_mask": (ids, axes), "logits": (floats, [*axes, 100])}
        matrices = [weight for weight in graph.initializer if np.prod(weight.dims) > 192]
        assert len(matrices) > 4 and {onnx.TensorProto.DataType.Name(weight.data_type) for weight in matrices} == kinds
    # Two products of int8 weights with 8-bit states fit in 16 bits: what CPUs without VNNI add.
    products = [weight for weight in matrices if weight.data_type == onnx.TensorProto.INT8]
    assert max(np.abs(onnx.numpy_helper.to_array(weight).astype(int)).max() for weight in products) <= 64


def test_what_other_servers_ask_for_is_there(exported):
    """The modules without the layer that is in the file, and what has no default in Text Embeddings Inference.

    Its `router/src/lib.rs` and `backends/ort/src/lib.rs`, of old and new versions, are the source; the server itself
    has not run. It pads and cuts by itself, so the tokenizer must store neither.
    """
    written = {file.name: json.loads(file.read_text()) for file in (exported / "embed").glob("*.json")}
    names = [entry["type"].rsplit(".", 1)[-1] for entry in written["modules.json"]]
    assert names == ["Transformer", "Pooling", "Normalize"]
    assert written["config.json"].keys() >= {"architectures", "model_type", "hidden_size", "num_hidden_layers"}
    assert written["config.json"]["max_position_embeddings"] == 64
    assert written["sentence_bert_config.json"]["max_seq_length"] == 32
    assert written["tokenizer.json"]["padding"] is written["tokenizer.json"]["truncation"] is None
    pooling = json.loads((exported / "embed" / "1_Pooling" / "config.json").read_text())
    modes = ("pooling_mode", "pooling_mode_mean_tokens", "pooling_mode_cls_token")
    assert [pooling[mode] for mode in modes] == ["mean", True, False]


# ONNX Runtime


# Beyond the training length (64), one token, one row, a row that is nothing but padding.
BATCHES = [(13, 7, 1, 10), (1,), (64,), (150, 9), (5, 0, 20), (3, 3, 3), tuple(range(1, 40))]


@pytest.mark.parametrize("side", ["right", "left", "anywhere"])
def test_any_batch_gives_what_pytorch_gives(masked_lm, exported, side):
    model = NeoBERTForMaskedLM.from_pretrained(masked_lm)
    for lengths in BATCHES:
        ids, mask = ragged_batch(lengths, side=side)
        for precision, largest in LARGEST_ERROR.items():
            got = run_file(exported / "fill", ids, mask, precision)
            assert error_of(got, model, ids, mask, ["logits"]) <= largest, (precision, lengths)


def huge_states():
    """States of 1,300, as in the published weights, whose squares float16 lacks."""
    model = small_model(num_hidden_layers=1)
    model.encoder.weight.data *= 1_300
    return model


def head(cls, **changes):
    return lambda: small_model(cls, classifier_init_range=0.3, num_hidden_layers=1, **changes)


ABLATION = {"rope": False, "rms_norm": False, "hidden_act": "gelu"}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
# The model, its outputs, the precision of the file, and the lengths of a batch; float16 lacks positions over 2,048.
VARIANTS = {
    "float16": (huge_states, ["last_hidden_state"], "float16", (3_000,)),
    "text-classification": (
        head(NeoBERTForSequenceClassification, classifier_pooling="mean"), ["logits"], "int8", (13, 2, 1, 10),
    ),
    "token-classification": (
        head(NeoBERTForTokenClassification, num_labels=5, **ABLATION), ["logits"], "float32", (13, 2, 1, 10),
    ),
    "question-answering": (
        head(NeoBERTForQuestionAnswering, **YARN), ["start_logits", "end_logits"], "float32", (13, 2, 1, 10),
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_and_variants(tmp_path, variant):
    build, outputs, precision, lengths = VARIANTS[variant]
    model, (ids, mask) = build(), ragged_batch(lengths)
    export(save_checkpoint(tmp_path / "model", model=model), tmp_path / "exported", "--precisions", precision)
    got = run_file(tmp_path / "exported", ids, mask, precision)
    assert error_of(got, model, ids, mask, outputs) <= LARGEST_ERROR[precision]


# `examples/onnx_inference.py`


def example_model(folder):
    return runpy.run_path(str(ROOT / "examples" / "onnx_inference.py"))["OnnxModel"](folder)


def in_a_process_without_torch(folder, calls: str):
    script = f"""import json, runpy, sys
from pathlib import Path
sys.modules |= dict.fromkeys(['torch', 'transformers', 'neobert_hf'])
model = runpy.run_path({str(ROOT / "examples" / "onnx_inference.py")!r})["OnnxModel"](Path({str(folder)!r}))
print(json.dumps({calls}))"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_example_encodes_as_sentence_transformers_does(embedder, exported):
    """The linear layer is in the file; the prompts make a difference."""
    model = SentenceTransformer(str(embedder), device="cpu")
    calls = {
        f"model.encode({TEXTS!r}, batch_size=3)": model.encode(TEXTS),
        f"model.encode({TEXTS!r}, prompt='the ')": model.encode(TEXTS, prompt="the "),
        f"model.encode_query({TEXTS!r}, batch_size=2)": model.encode_query(TEXTS),
        f"model.encode_document({TEXTS!r})": model.encode_document(TEXTS),
        "model.encode('one text')": model.encode("one text"),
    }
    results = in_a_process_without_torch(exported / "embed", f"[call.tolist() for call in ({', '.join(calls)})]")
    for got, (call, expected) in zip(results, calls.items()):
        assert np.shape(got) == expected.shape and np.abs(np.array(got) - expected).max() <= 1e-5, call
    assert np.abs(model.encode(TEXTS) - model.encode_query(TEXTS)).max() > 0.01


def test_example_follows_the_settings_of_the_model(encoder, tmp_path):
    """A default prompt, fewer dimensions, and the first token."""
    options = {"prompts": {"the": "the "}, "default_prompt_name": "the", "truncate_dim": 20}
    modules = [build_encoder(str(encoder), max_length=6)[0], Pooling(64, "cls")]
    model = SentenceTransformer(modules=modules, device="cpu", **options)
    model.save(str(tmp_path / "model"))
    export(tmp_path / "model", tmp_path / "exported", "--precisions", "float32")
    example = example_model(tmp_path / "exported")
    for name, arguments in (("encode", {}), ("encode_query", {}), ("encode", {"normalize_embeddings": True})):
        expected = getattr(model, name)(TEXTS, **arguments)
        np.testing.assert_allclose(getattr(example, name)(TEXTS, **arguments), expected, atol=1e-5)


def test_example_fills_masks_as_the_pipeline_does(masked_lm, exported):
    expected = pipeline("fill-mask", str(masked_lm))(MASKED)
    got = in_a_process_without_torch(exported / "fill", f"model.fill_mask({MASKED!r})")
    assert [token for token, _ in got] == [guess["token_str"] for guess in expected]
    assert np.allclose([guess["score"] for guess in expected], [probability for _, probability in got], atol=1e-5)


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification", "regression"])
def test_example_classifies_as_the_pipeline_does(kind, tmp_path):
    settings = {"id2label": {0: "bad", 1: "good", 2: "neither"}, "problem_type": kind}
    folder = save_checkpoint(tmp_path / "classifier", NeoBERTForSequenceClassification, **settings)
    export(folder, tmp_path / "exported", "--precisions", "float32")
    found, expected = example_model(tmp_path / "exported"), pipeline("text-classification", str(folder), top_k=None)
    for text in TEXTS[:3]:
        got, (wanted,) = found.classify(text), expected([text])
        assert [label for label, _ in got] == [each["label"] for each in wanted]
        assert np.allclose([score for _, score in got], [each["score"] for each in wanted], atol=1e-5)


def test_example_names_a_folder_that_is_no_export(tmp_path, monkeypatch):
    for folder in (tmp_path / "nowhere", tmp_path):
        monkeypatch.setattr(sys, "argv", ["onnx_inference.py", str(folder), "a text"])
        with pytest.raises(SystemExit, match=f"`folder` is '{folder}'"):
            runpy.run_path(str(ROOT / "examples" / "onnx_inference.py"), run_name="__main__")


# transformers.js


def test_transformers_js_computes_what_pytorch_does(masked_lm, embedder, exported, node_modules, tmp_path):
    """Ids, embeddings, filled masks and classes, on onnxruntime's own binding for Node."""
    labels = {0: "bad", 1: "good", 2: "neither"}
    classifier = save_checkpoint(tmp_path / "classifier", NeoBERTForSequenceClassification, id2label=labels)
    export(classifier, exported / "classify", "--precisions", "float32")
    texts, masked = ["A query about cats!", "a document (of 12 words), héllo", "x"], [MASKED, "[MASK] e i o u"]
    largest = {"fp32": 1e-5, "fp16": 1e-2, "q8": 1e-1}
    requests = [{"task": "text-classification", "folder": "classify", "dtype": "fp32", "texts": texts}]
    for dtype in largest:
        pooled = {"pooling": "mean", "normalize": True}
        requests.append({"task": "feature-extraction", "folder": "embed", "texts": texts, "options": pooled})
        requests.append({"task": "fill-mask", "folder": "fill", "texts": masked})
        requests[-1]["dtype"] = requests[-2]["dtype"] = dtype
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    command = ["node", "check.mjs", exported, tmp_path / "requests.json"]
    done = subprocess.run(command, cwd=node_modules.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    classes, *results = json.loads(done.stdout)

    for wanted, got in zip(pipeline("text-classification", str(classifier))(texts), classes["output"], strict=True):
        assert got["label"] == wanted["label"] and abs(got["score"] - wanted["score"]) <= 1e-5
    model = SentenceTransformer(str(embedder), device="cpu")
    vectors, guesses = model.encode(texts, normalize_embeddings=True), pipeline("fill-mask", str(masked_lm))(masked)
    for dtype, embedded, filled in zip(largest, results[::2], results[1::2]):
        assert embedded["ids"] == model.tokenizer(texts)["input_ids"]
        assert np.abs(np.array(embedded["output"]) - vectors).max() <= largest[dtype]
        assert filled["ids"] == AutoTokenizer.from_pretrained(masked_lm)(masked)["input_ids"]
        for wanted, got in zip(guesses, filled["output"], strict=True):
            scores = np.array([[guess["score"] for guess in each] for each in (wanted, got)])
            assert np.abs(scores[0] - scores[1]).max() <= largest[dtype]
            if dtype == "fp32":
                assert [guess["sequence"] for guess in wanted] == [guess["sequence"] for guess in got]


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
    "no task": (checkpoint(NeoBERTForMultipleChoice), "", "feature-extraction"),
    "other texts count": (checkpoint(NeoBERTModel, **DYNAMIC), "", "'dynamic'"),
    # Before the pooling these would give other embeddings.
    "narrowing layer": (modules_behind(Dense(64, 8)), "", "Dense"),
    "layer behind a normalisation": (modules_behind(Normalize(), SQUARE), "", "Dense"),
    # No file is kept that differs from PyTorch by more than its tolerance.
    "not finite": (not_finite, "--precisions float32", "nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused(tmp_path, case):
    save, flags, name = REFUSED[case]
    save(tmp_path / "model")
    assert name in status_of(["export", str(tmp_path / "model"), str(tmp_path / "out"), *flags.split()])
    assert not list(tmp_path.glob("out*"))


def test_what_no_file_computes_and_an_output_that_is_in_use(embedder, contextual, exported, tmp_path):
    assert "neobert_contextual" in status_of(["export", str(contextual), str(tmp_path / "out")])
    assert "embed" in status_of(["export", str(embedder), str(exported / "embed")])
    with folder_lock(tmp_path / "out"):
        assert f"{tmp_path / 'out'} is being written" in status_of(["export", str(embedder), str(tmp_path / "out")])

"""`neobert-hf export`: ONNX files give the numbers of PyTorch and of Sentence Transformers."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
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
from neobert_hf.hub.export import ONE_ANSWER_A_ROW, cosine  # noqa: E402
from neobert_hf.hub.publish import PublishSettings, build_folder  # noqa: E402
from tests.helpers.onnx_checkpoints import export, save_checkpoint  # noqa: E402


# Of many lengths, in no order; the last is cut at 32 tokens, like the encoder's. Batches of three have padding.
TEXTS = ["cats and dogs " * 3, "a query", "x", "", "the " * 20, "a long document about many cats and as many dogs " * 2]


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory):
    """A masked language model, and its export in all precisions."""
    folder = tmp_path_factory.mktemp("masked_lm")
    save_checkpoint(folder / "model", NeoBERTForMaskedLM)
    export(folder / "model", folder / "exported")
    return folder


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory):
    """A Sentence Transformers model, and its export in float32 by the command line."""
    folder = tmp_path_factory.mktemp("embeddings")
    save_checkpoint(folder / "encoder")
    encoder = build_encoder(str(folder / "encoder"), max_length=32)
    prompts = {"query": "dogs and ", "document": ""}
    SentenceTransformer(modules=[*encoder, Normalize()], prompts=prompts).save(str(folder / "model"))
    assert main(["export", str(folder / "model"), str(folder / "exported"), "--precisions", "float32"]) is None
    return folder


def run_session(session, ids, mask) -> list[np.ndarray]:
    return session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})


@torch.no_grad()
def run_model(model, ids, mask, outputs) -> list[np.ndarray]:
    results = model.float().eval()(ids, attention_mask=mask)
    return [results[name].numpy() for name in outputs]


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
    folder = masked_lm / "exported" / "onnx"
    sessions = {
        precision: onnxruntime.InferenceSession(folder / name) for precision, name in export_module.FILES.items()
    }
    for lengths in BATCHES:
        ids, mask = ragged_batch(lengths, side=side)
        (expected,) = run_model(model, ids, mask, ["logits"])
        got = {precision: run_session(session, ids, mask)[0] for precision, session in sessions.items()}
        assert all(np.isfinite(output).all() for output in got.values())
        assert np.abs(got["float32"] - expected).max() <= 1e-5
        assert cosine(expected, got["float16"], mask.bool().numpy()) >= 0.9999
        assert cosine(expected, got["int8"], mask.bool().numpy()) >= 0.99


def test_float16_keeps_norms_and_positions_in_float32(tmp_path):
    """Hidden states of 1,300, as in the published weights, whose squares float16 lacks; and positions over 2,048."""
    model = small_model(num_hidden_layers=1)
    model.encoder.weight.data *= 1_300
    ids, mask = ragged_batch((3_000,))
    expected = run_model(model, ids, mask, ["last_hidden_state"])[0]
    save_checkpoint(tmp_path / "model", model=model)
    export(tmp_path / "model", tmp_path / "exported", precisions=["float16"])
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "onnx" / "model_fp16.onnx")
    assert cosine(expected, run_session(session, ids, mask)[0], mask.bool().numpy()) >= 0.9999


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
    save_checkpoint(tmp_path / "model", model=model)
    (file,) = export(tmp_path / "model", tmp_path / "exported", precisions=[precision])
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "onnx" / file.name)
    assert [output.name for output in session.get_outputs()] == outputs
    for wanted, got in zip(expected, run_session(session, ids, mask)):
        if precision == "int8":
            assert cosine(wanted, got, mask.bool().numpy()) >= 0.99
        else:
            assert np.abs(wanted - got).max() <= 1e-5


def test_the_encoder_of_a_published_checkpoint(shared, tmp_path):
    """The original's names in `architectures`, its outputs, and `auto_map` for code that the folder does not hold."""
    published = shared / "reference" / "published"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((published / name).read_bytes())
    small_tokenizer(500).save_pretrained(tmp_path)
    assert export_module.load_for_task(tmp_path)[1] == "fill-mask"
    export(tmp_path, tmp_path / "exported", task="feature-extraction", precisions=["float32"])
    recorded = load_file(published / "expected.safetensors")
    ids, mask = recorded["input_ids"].long(), recorded["attention_mask"].long()
    (got,) = run_session(onnxruntime.InferenceSession(tmp_path / "exported" / "onnx" / "model.onnx"), ids, mask)
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


VARIANTS = {
    "no prompts, no norm": ({}, "mean", None),
    "default prompt": ({"prompts": {"the": "the "}, "default_prompt_name": "the"}, "mean", None),
    "first token": ({"prompts": {"query": "cats "}}, "cls", None),
    "shorter texts": ({}, "mean", 6),
    "fewer dimensions": ({"truncate_dim": 20}, "mean", None),
    "the end of texts": ({}, "mean", 6),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_example_follows_the_settings_of_the_model(embedding_model, tmp_path, monkeypatch, variant):
    """Without a module that normalises, with a default prompt, another pooling, and a length of the module's own."""
    options, pooling, length = VARIANTS[variant]
    use_traced(monkeypatch, embedding_model / "exported" / "onnx" / "model.onnx")
    transformer = build_encoder(str(embedding_model / "model"), max_length=32)[0]
    SentenceTransformer(modules=[transformer, Pooling(64, pooling)], **options).save(str(tmp_path / "model"))
    if length:
        edit_json(tmp_path / "model" / "sentence_bert_config.json", max_seq_length=length)
    if variant == "the end of texts":
        edit_json(tmp_path / "model" / "tokenizer_config.json", truncation_side="left")
    export(tmp_path / "model", tmp_path / "exported", precisions=["float32"])
    encoder = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    model = load_example("onnx_inference").OnnxModel(tmp_path / "exported")
    for name, arguments in (("encode", {}), ("encode_query", {}), ("encode", {"normalize_embeddings": True})):
        expected = getattr(encoder, name)(TEXTS, **arguments)
        np.testing.assert_allclose(getattr(model, name)(TEXTS, **arguments), expected, atol=1e-5)


def test_example_computes_little_padding(embedding_model, monkeypatch):
    """Texts of two lengths, given in turns, make batches of one length."""
    model = load_example("onnx_inference").OnnxModel(embedding_model / "exported")
    run, shares = model.run, []
    monkeypatch.setattr(model, "run", lambda texts: (shares.append(run(texts)[1].mean()), run(texts))[1])
    texts = ["the", "the " * 9] * 4
    assert np.array_equal(model.encode(texts, batch_size=4)[::2], np.repeat(model.encode(["the"]), 4, 0))
    assert shares == [1, 1, 1]


def test_example_names_what_it_cannot_do(embedding_model, tmp_path):
    example = load_example("onnx_inference")
    with pytest.raises(ValueError, match="tensorrt"):
        example.open_session("model.onnx", "tensorrt")
    model = example.OnnxModel(embedding_model / "exported")
    with pytest.raises(ValueError, match="'other'.*query, document"):
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


# What cannot be exported


def refused(folder, message, **options):
    """The export fails and nothing is written."""
    with pytest.raises(ValueError, match=message):
        export(folder / "model", folder / "exported", **options)
    assert [file.name for file in folder.iterdir()] == ["model"]


REFUSED = {
    "no head": (NeoBERTForMaskedLM, {"task": "text-classification"}, {}, "dense"),
    "no decoder": (NeoBERTModel, {"task": "fill-mask"}, {}, "does not hold a NeoBERTForMaskedLM"),
    "no task": (NeoBERTForMultipleChoice, {}, {}, "NeoBERTForMultipleChoice.*feature-extraction, fill-mask"),
    "unknown task": (NeoBERTModel, {"task": "translation"}, {}, "'translation'.*feature-extraction"),
    "unknown precision": (NeoBERTModel, {"precisions": ["int4"]}, {}, "int4"),
    "other texts count": (NeoBERTModel, {}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused(tmp_path, case):
    cls, options, changes, message = REFUSED[case]
    save_checkpoint(tmp_path / "model", cls, **changes)
    refused(tmp_path, message, **options)


def test_an_output_that_exists_or_is_being_written_is_refused(embedding_model, tmp_path):
    command = ["export", str(embedding_model / "model")]
    assert "exported exists" in main([*command, str(embedding_model / "exported")])
    with folder_lock(tmp_path / "out"), pytest.raises(FolderInUse):
        main([*command, str(tmp_path / "out")])


def test_a_linear_layer_after_the_pooling_is_inside(tmp_path):
    """Whoever pools the file's token states gets Sentence Transformers' embeddings, and no module is applied twice."""
    encoder = build_encoder(str(save_checkpoint(tmp_path / "encoder")), max_length=32)
    linear = Dense(64, 64, activation_function=torch.nn.Identity())
    torch.nn.init.normal_(linear.linear.bias)
    model = SentenceTransformer(modules=[*encoder, linear])
    model.save(str(tmp_path / "model"))
    export(tmp_path / "model", tmp_path / "out", precisions=["float32"])
    example = load_example("onnx_inference").OnnxModel(tmp_path / "out")
    expected = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(example.encode(TEXTS, normalize_embeddings=True), expected, atol=2e-6)
    names = [entry["type"].rsplit(".", 1)[-1] for entry in json.loads((tmp_path / "out" / "modules.json").read_text())]
    assert names == ["Transformer", "Pooling"]
    # A published folder keeps the layer for PyTorch, which would then apply it once more.
    with pytest.raises(ValueError, match="Dense"):
        export_module.check_modules(tmp_path / "model")


@pytest.mark.parametrize(
    "modules", [[Dense(64, 8)], [Normalize(), Dense(64, 64, activation_function=torch.nn.Identity())]]
)
def test_layers_that_the_files_would_lack_are_refused(modules, tmp_path):
    """With another output, or behind a normalisation: before the pooling it would give other embeddings."""
    encoder = build_encoder(str(save_checkpoint(tmp_path / "encoder")), max_length=32)
    SentenceTransformer(modules=[*encoder, *modules]).save(str(tmp_path / "folder" / "model"))
    refused(tmp_path / "folder", "Dense")


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    model = small_model()
    model.transformer_encoder[1].wo.weight.data.uniform_(2e38, 3e38)
    save_checkpoint(tmp_path / "model", model=model)
    refused(tmp_path, "nan", precisions=["float32"])


def test_a_file_that_misses_its_tolerance_is_not_written(masked_lm, tmp_path, monkeypatch):
    """The graph has other weights than the checkpoint, by not much."""
    use_traced(monkeypatch, masked_lm / "exported" / "onnx" / "model.onnx")
    model = small_model(NeoBERTForMaskedLM)
    model.model.transformer_encoder[0].qkv.weight.data *= 1.5
    save_checkpoint(tmp_path / "model", model=model)
    refused(tmp_path, r"int8.*cosine with PyTorch 0\.", precisions=["int8"])
    refused(tmp_path, "float32.*1e-05", precisions=["float32"])


def test_published_folders_have_onnx_files(embedding_model, tmp_path, monkeypatch):
    use_traced(monkeypatch, embedding_model / "exported" / "onnx" / "model.onnx")
    (tmp_path / "folder").mkdir()
    settings = PublishSettings(str(embedding_model / "model"), "me/model", onnx=["float32"])
    build_folder(settings, tmp_path / "folder")
    assert (tmp_path / "folder" / "onnx" / "model.onnx").is_file()
    card = ModelCard.load(tmp_path / "folder" / "README.md")
    assert "`onnx/model.onnx` | float32 | largest difference" in card.text and "transformers.js" in card.data.tags
    # Sentence Transformers loads it as the same model.
    encoders = [SentenceTransformer(str(path)) for path in (embedding_model / "model", tmp_path / "folder")]
    assert np.array_equal(*(encoder.encode(TEXTS) for encoder in encoders))

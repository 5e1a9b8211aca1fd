"""Which export holds what of a model of Sentence Transformers: every field of every module, honoured or refused.

`same`: the exported files give the vectors of PyTorch, with what the folder says. `said`: the command prints what the
user has to do. `refused`: the error names the field.
"""

import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Module
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sentence_transformer.modules import Dense, Dropout, LayerNorm, Normalize, Pooling, Router

from neobert_hf import NeoBERTForSequenceClassification
from tests.helpers.examples import status_of
from tests.helpers.models import ROOT, save_checkpoint
from tests.helpers.small_tokenizer import small_tokenizer


pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")
pytest.importorskip("gguf")
EXPORTS = {"onnx": [], "space": ["--space", "--precisions", "float32"], "gguf": ["--gguf", "--precisions", "float32"]}


@dataclass
class Case:
    """A change to a model, and what becomes of it in each of `EXPORTS`; the refusal has `name`."""

    change: Callable[[SentenceTransformer], object]
    onnx: str
    space: str
    gguf: str
    name: str = ""


def everywhere(outcome: str, change, name: str = "") -> Case:
    return Case(change, outcome, outcome, outcome, name)


def refused(change, name: str) -> Case:
    return everywhere("refused", change, name)


def pooled(mode) -> Callable:
    return lambda model: model.__setitem__(1, Pooling(64, mode)) or setattr(model[1], "pooling_mode", mode)


def setting(place: int | None, name: str, value) -> Callable:
    """Set an attribute of a module, or of the model itself."""
    return lambda model: setattr(model if place is None else model[place], name, value)


def dense(width: int = 64, **options) -> Callable:
    options = {"activation_function": torch.nn.Identity()} | options
    return lambda model: model.append(Dense(64, width, **options))


def appended(*added) -> Callable:
    return lambda model: [model.append(module) for module in added]


def renamed_modality(model) -> None:
    model[0].modality_config["text"]["method_output_name"] = "hidden_states"


def prompted(**prompts) -> Callable:
    return lambda model: model.prompts.update(prompts)


NAMES = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
EXPANSION = {"strategy": "fixed", "length": 9}
# By module and field; a field may have several values.
TABLE = {
    "Transformer": {
        "transformer_task": [refused(setting(0, "transformer_task", "fill-mask"), "NeoBERTForMaskedLM")],
        "modality_config": [refused(renamed_modality, "hidden_states")],
        "module_output_name": [refused(setting(0, "module_output_name", "sentence_embedding"), "sentence_embedding")],
        "processing_kwargs": [refused(setting(0, "processing_kwargs", {"text": {"max_length": 4}}), "processing_kw")],
        "unpad_inputs": [everywhere("same", setting(0, "unpad_inputs", False))],
        "query_length": [refused(setting(0, "query_length", 4), "query_length")],
        "document_length": [refused(setting(0, "document_length", 4), "document_length")],
        "query_expansion": [refused(setting(0, "query_expansion", EXPANSION), "query_expansion")],
        "max_seq_length": [everywhere("same", setting(None, "max_seq_length", 6))],
        "do_lower_case": [Case(setting(0, "do_lower_case", True), "same", "same", "refused", "WordPiece")],
    },
    "Pooling": {
        "embedding_dimension": [everywhere("same", lambda model: None)],
        "pooling_mode": [
            everywhere("same", pooled("cls")),
            Case(pooled("lasttoken"), "same", "refused", "same", "lasttoken"),
            *(refused(pooled(mode), mode) for mode in ("max", "weightedmean", "mean_sqrt_len_tokens")),
            refused(pooled(("mean", "cls")), "mean"),
        ],
        "include_prompt": [refused(setting(1, "include_prompt", False), "include_prompt")],
    },
    "Dense": {
        "in_features": [Case(dense(), "same", "same", "refused", "Dense")],
        "out_features": [refused(dense(8), "Dense")],
        "bias": [Case(dense(bias=False), "same", "same", "refused", "Dense")],
        "activation_function": [refused(dense(activation_function=torch.nn.Tanh()), "Dense")],
        "use_residual": [refused(dense(use_residual=True), "Dense")],
        "module_input_name": [refused(dense(**NAMES), "Dense from and to token_embeddings")],
        "module_output_name": [refused(dense(module_output_name="other"), "Dense from and to other")],
    },
    "Normalize": {
        "module_input_name": [
            everywhere("same", appended(Normalize())),
            refused(appended(Normalize(), Dense(64, 64, activation_function=torch.nn.Identity())), "Dense"),
            refused(appended(Normalize("token_embeddings")), "Normalize from and to token_embeddings"),
        ],
        "module_output_name": [refused(appended(Normalize(module_output_name="other")), "Normalize from and to other")],
    },
    "the model": {
        "prompts": [Case(prompted(query="dogs and "), "same", "same", "said", "'dogs and '")],
        "default_prompt_name": [
            Case(
                lambda model: (prompted(own="cats and ")(model), setting(None, "default_prompt_name", "own")(model)),
                "same", "same", "said", "'cats and '",
            )
        ],
        "truncate_dim": [Case(setting(None, "truncate_dim", 20), "same", "refused", "refused", "truncate_dim")],
        "similarity_fn_name": [
            Case(setting(None, "similarity_fn_name", "dot"), "same", "refused", "said", "'dot'"),
            everywhere("same", lambda model: setting(None, "similarity_fn_name", "dot")(model.append(Normalize()))),
        ],
        "model_type": [everywhere("same", lambda model: None)],
        "__version__": [everywhere("same", lambda model: None)],
    },
    "other modules": {
        "Router": [refused(None, "Router")],
        "Dropout": [refused(appended(Dropout(0.1)), "Dropout")],
        "LayerNorm": [refused(appended(LayerNorm(64)), "LayerNorm")],
    },
}  # fmt: skip
CASES = {
    f"{module}.{field}.{number}": case
    for module, fields in TABLE.items()
    for field, cases in fields.items()
    for number, case in enumerate(cases)
}
# They take the place of the encoder, or lie between it and the pooling, as LayerNorm would.
NO_ENCODER = {"StaticEmbedding", "BoW", "WordEmbeddings", "CLIPModel"}
BETWEEN = {"CNN", "LSTM", "WeightedLayerPooling", "WordWeights"}


def test_every_field_of_every_module_is_in_the_table():
    """A new one of Sentence Transformers has to be looked at."""
    classes = {
        name: getattr(modules, name) for name in modules.__all__ if name not in ("Module", "InputModule", "Asym")
    }
    assert all(issubclass(each, Module) for each in classes.values())
    assert (
        classes.keys()
        == {"Transformer", "Pooling", "Dense", "Normalize", *TABLE["other modules"]} | NO_ENCODER | BETWEEN
    )
    for name in ("Transformer", "Pooling", "Dense", "Normalize"):
        beside = {"max_seq_length", "do_lower_case"} if name == "Transformer" else set()
        assert TABLE[name].keys() == {*classes[name].config_keys} | beside
    model = SentenceTransformer(modules=[Pooling(4)], truncate_dim=2, device="cpu")
    assert model._get_model_config().keys() == TABLE["the model"].keys()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[bool, Path]:
    """By whether its tokenizer keeps the case of letters."""
    folder = tmp_path_factory.mktemp("encoders")
    for cased in (True, False):
        save_checkpoint(folder / str(cased), num_hidden_layers=1)
        small_tokenizer(do_lower_case=not cased).save_pretrained(folder / str(cased))
    return {cased: folder / str(cased) for cased in (True, False)}


def save_changed(case_name: str, case: Case, encoders: dict, folder: Path) -> Path:
    """A model with mean pooling and a change, saved."""
    torch.manual_seed(0)
    model = SentenceTransformer(str(encoders[".do_lower_case" in case_name]), device="cpu")
    if case.change is None:
        other = SentenceTransformer(str(encoders[True]), device="cpu")
        router = Router.for_query_document(list(model), list(other))
        model = SentenceTransformer(modules=[router], device="cpu")
    else:
        case.change(model)
    for module in model:
        if isinstance(module, Dense) and module.bias:
            torch.nn.init.normal_(module.linear.bias)
    model.save(str(folder), create_model_card=False)
    file = folder / "sentence_bert_config.json"
    if ".do_lower_case" in case_name:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"do_lower_case": True}))
    return folder


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("name", CASES)
def test_each_field_is_honoured_or_refused(name, kind, encoders, tmp_path, monkeypatch, capsys):
    """Without the files of ONNX, whose numbers the next test compares."""
    case = CASES[name]
    outcome = getattr(case, kind)
    monkeypatch.setattr("neobert_hf.hub.onnx_files.write_onnx", lambda *args: {})
    save_changed(name, case, encoders, tmp_path / "model")
    status = status_of(["export", str(tmp_path / "model"), str(tmp_path / "out"), *EXPORTS[kind]])
    if outcome == "refused":
        assert isinstance(status, str) and case.name in status and not (tmp_path / "out").exists()
    else:
        assert status == 0
        assert outcome != "said" or case.name in capsys.readouterr().out


def test_a_reranker_with_prompts_is_not_exported_without_them(tmp_path):
    scorer = save_checkpoint(tmp_path / "scorer", NeoBERTForSequenceClassification, num_labels=1)
    CrossEncoder(str(scorer), device="cpu", prompts={"query": "cats "}).save_pretrained(str(tmp_path / "model"))
    assert "prompts" in status_of(["export", str(tmp_path / "model"), str(tmp_path / "out")])
    assert not list(tmp_path.glob("out*"))


TEXTS = ["Cats and dogs " * 3, "a Query", "x", "the long document about many cats and as many dogs"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "same" in (case.onnx, case.gguf)])
def test_what_is_honoured_gives_the_vectors_of_pytorch(name, encoders, tmp_path):
    case = CASES[name]
    folder = save_changed(name, case, encoders, tmp_path / "model")
    model = SentenceTransformer(str(folder), device="cpu")
    assert status_of(["export", str(folder), str(tmp_path / "onnx"), "--precisions", "float32"]) == 0
    files = runpy.run_path(str(ROOT / "examples" / "onnx_inference.py"))["OnnxModel"](tmp_path / "onnx")
    for encode in ("encode", "encode_query", "encode_document"):
        expected = getattr(model, encode)(TEXTS)
        np.testing.assert_allclose(getattr(files, encode)(TEXTS), expected, atol=1e-5)
    # transformers.js cuts texts where the tokenizer says.
    written = json.loads((tmp_path / "onnx" / "tokenizer_config.json").read_text())
    assert written["model_max_length"] == model.max_seq_length
    if case.gguf == "same":
        pytest.importorskip("xllamacpp")
        from tests.hub.test_gguf import Server

        assert status_of(["export", str(folder), str(tmp_path / "gguf"), *EXPORTS["gguf"]]) == 0
        # llama.cpp refuses texts that are too long, which the others cut.
        texts = [
            text for text in TEXTS if len(model.tokenizer(text, truncation=False)["input_ids"]) <= model.max_seq_length
        ]
        found = Server(tmp_path / "gguf" / "model-F32.gguf").embed(texts)
        np.testing.assert_allclose(found, model.encode(texts, normalize_embeddings=True), atol=1e-5)

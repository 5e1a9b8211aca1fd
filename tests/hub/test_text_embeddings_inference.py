"""An exported folder, read as the ONNX backend of Text Embeddings Inference reads it. The server itself has not run.

The Rust code is `router/src/lib.rs` and `backends/ort/src/lib.rs` of
https://github.com/huggingface/text-embeddings-inference, at commit a28ad28f39e0633749a21b74af23617fa86a0d0c and
04a021581c46f06f81237946d176b019f93be66e. A missing key is an error there, unless its type is an `Option` or it has
`#[serde(default)]`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer

from neobert_hf import NeoBERTForSequenceClassification
from neobert_hf.embeddings.models import build_encoder
from tests.helpers.onnx_checkpoints import export, save_checkpoint


# Exports and pushes of whole folders take a minute each where the machine is busy.
pytestmark = pytest.mark.slow


pytest.importorskip("onnx", reason="pip install 'neobert_hf[export]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'neobert_hf[export]'")

TEXTS = ["cats and dogs", "a document", "the " * 40, "x"]


class Refused(ValueError):
    """The server would not start."""


@dataclass
class Server:
    """What the server takes from a folder."""

    pool: str
    max_input_length: int
    prompts: dict[str, str]
    pad_token_id: int
    tokenizer: Tokenizer
    session: "onnxruntime.InferenceSession"


def parse(file: Path, required: dict[str, type], optional: dict[str, type] | None = None) -> dict:
    """As serde parses a struct: unknown keys are ignored; `usize` is an int that is not negative."""
    values = json.loads(file.read_text())
    for name, kind in {**required, **(optional or {})}.items():
        if name not in values and name in required:
            raise Refused(f"Failed to parse `{file.name}`: missing field `{name}`")
        value = values.get(name)
        if name not in required and value is None:
            continue
        if type(value) is not kind or (kind is int and value < 0):
            raise Refused(f"Failed to parse `{file.name}`: `{name}` is {value!r}, not {kind.__name__}")
    return values


def parse_texts(values: dict | None) -> dict[str, str]:
    """A `HashMap<String, String>`."""
    if not all(isinstance(value, str) for value in (values or {}).values()):
        raise Refused(f"invalid type: {values}")
    return values or {}


def find_pool(folder: Path, config: dict) -> str:
    """`get_backend_model_type`, without `--pooling`."""
    for architecture in config["architectures"]:
        if architecture.endswith("Classification"):
            if "id2label" not in config or "label2id" not in config:
                raise Refused("`config.json` does not contain `id2label`")
            return "classifier"
    file = folder / "1_Pooling" / "config.json"
    if not file.exists():
        return "cls" if "bert" in config["model_type"].lower() else "refused"
    modes = ("pooling_mode_cls_token", "pooling_mode_mean_tokens")
    # The oldest versions ask for two more, newer ones for none where they find `pooling_mode`.
    older = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens")
    pooling = parse(file, dict.fromkeys((*modes, *older), bool), {"pooling_mode_lasttoken": bool, "pooling_mode": str})
    pool = next((name for name, key in zip(("cls", "mean"), modes) if pooling[key]), None)
    if pool is None:
        raise Refused(f"Pooling config {pooling} is not supported")
    assert pooling["pooling_mode"] == pool, "Versions disagree on the pooling."
    return pool


def start(folder: Path) -> Server:
    required = {"architectures": list, "model_type": str, "max_position_embeddings": int}
    # Of `backends/ort/src/lib.rs`.
    required |= {"hidden_size": int, "num_hidden_layers": int}
    config = parse(folder / "config.json", required, {"pad_token_id": int, "id2label": dict, "label2id": dict})
    length, prompts = config["max_position_embeddings"], {}
    if (file := folder / "sentence_bert_config.json").exists():
        length = parse(file, {"max_seq_length": int})["max_seq_length"]
    if (file := folder / "config_sentence_transformers.json").exists():
        prompts = parse_texts(json.loads(file.read_text()).get("prompts"))
    settings = parse(folder / "tokenizer_config.json", {}, {"padding_side": str})
    assert settings.get("padding_side", "right") == "right"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    file = folder / "model.onnx"
    session = onnxruntime.InferenceSession(file if file.exists() else folder / "onnx" / "model.onnx")
    return Server(find_pool(folder, config), length, prompts, config.get("pad_token_id") or 0, tokenizer, session)


def run(server: Server, texts: list[str], output: str) -> tuple[np.ndarray, np.ndarray]:
    """`prepare_inputs` and the output of that name, with the mask. The model must ask for nothing but ids and mask."""
    rows = [encoding.ids for encoding in server.tokenizer.encode_batch(texts)]
    ids = np.full((len(rows), max(map(len, rows))), server.pad_token_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    assert {entry.name for entry in server.session.get_inputs()} == {"input_ids", "attention_mask"}
    (states,) = server.session.run([output], {"input_ids": ids, "attention_mask": mask})
    assert states.dtype == np.float32  # `try_extract_array::<f32>`
    return states, mask


def embed(server: Server, texts: list[str], prompt_name: str | None = None) -> np.ndarray:
    """`/embed`, which normalises unless it is told not to."""
    states, mask = run(server, [server.prompts.get(prompt_name, "") + text for text in texts], "last_hidden_state")
    pooled = states[:, 0] if server.pool == "cls" else (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


@pytest.mark.parametrize("pooling, prompts", [("mean", {"query": "dogs and "}), ("cls", None)])
def test_an_embedding_model_is_served_as_it_is(tmp_path, pooling, prompts):
    transformer = build_encoder(str(save_checkpoint(tmp_path / "encoder")), max_length=32)[0]
    modules = [transformer, Pooling(64, pooling), *([Normalize()] if prompts else [])]
    SentenceTransformer(modules=modules, prompts=prompts).save(str(tmp_path / "model"))
    export(tmp_path / "model", tmp_path / "exported", precisions=["float32"])
    server, encoder = start(tmp_path / "exported"), SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert (server.pool, server.max_input_length) == (pooling, 32)
    expected = encoder.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(embed(server, TEXTS), expected, atol=1e-5)
    expected = encoder.encode_query(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(embed(server, TEXTS, "query"), expected, atol=1e-5)
    # What the checks of the export set on its tokenizer is not stored: other readers would pad on the left.
    stored = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())
    assert stored["padding"] is stored["truncation"] is None


def test_an_older_pooling_gets_the_new_key(tmp_path):
    """Sentence Transformers wrote a key for each mode before it wrote `pooling_mode`."""
    encoder = build_encoder(str(save_checkpoint(tmp_path / "encoder")), max_length=32)
    encoder.save(str(tmp_path / "model"))
    file = tmp_path / "model" / "1_Pooling" / "config.json"
    file.write_text('{"word_embedding_dimension": 64, "pooling_mode_cls_token": true}')
    export(tmp_path / "model", tmp_path / "exported", precisions=["float32"])
    server = start(tmp_path / "exported")
    assert server.pool == "cls"
    expected = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(embed(server, TEXTS), expected, atol=1e-5)


def test_a_classifier_is_served_as_it_is(tmp_path):
    save_checkpoint(tmp_path / "model", NeoBERTForSequenceClassification, num_labels=3, num_hidden_layers=1)
    export(tmp_path / "model", tmp_path / "exported", precisions=["float32"])
    server = start(tmp_path / "exported")
    assert (server.pool, server.max_input_length) == ("classifier", 64)
    assert run(server, TEXTS, "logits")[0].shape == (4, 3)

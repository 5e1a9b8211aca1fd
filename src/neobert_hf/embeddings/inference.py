"""Loads embedding models for inference, and tells kinds of models apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn
from transformers import AutoConfig
from transformers.utils import cached_file

from neobert_hf import NeoBERTContextualModel
from neobert_hf.common.fingerprints import loaded_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.tokenizers import check_tokenizer, tokens_read


def load_embedding_model(
    path: str, dtype: torch.dtype, max_length: int | None = None, **options: Any
) -> SentenceTransformer:
    """Load a model for inference, the encoder in `dtype` and the modules after it (such as pooling) in float32.

    NeoBERT's hidden states reach 130: their sums overflow in float16 and lose the small dimensions in bfloat16.

    Args:
        path: folder or Hub id. A Transformers checkpoint gets mean pooling.
        dtype: of the encoder's weights.
        max_length: tokens; longer texts are cut. A model with fewer positions keeps its own limit.
        options: further arguments of `SentenceTransformer`: `device`, `truncate_dim`, `trust_remote_code`.

    Raises:
        ValueError: if the model is of another kind, has no Transformers encoder (as with static embeddings), has the
            tokenizer of another model, or has fewer dimensions than `truncate_dim`.
    """
    refuse_other_kinds(path, options.get("trust_remote_code", False))
    model = SentenceTransformer(path, model_kwargs={"dtype": dtype}, **options)
    if not isinstance(model[0], Transformer):
        raise ValueError(
            f"{path} begins with {type(model[0]).__name__}; this needs a Sentence Transformers model that begins with "
            "a Transformers encoder."
        )
    check_encoder(model[0], path)
    kept, size = options.get("truncate_dim"), model.get_embedding_dimension()
    if kept is not None and size is not None and kept > size:
        raise ValueError(f"`truncate_dim` is {kept}; the model has only {size} dimensions.")
    encoder, *others = model
    model.max_seq_length = tokens_read(encoder.model, max_length, model.max_seq_length)
    encoder.register_forward_hook(_to_float32)
    for module in others:
        module.float()
    return model.eval()


def _to_float32(module, args, features: dict) -> dict:
    # A contextual model returns the embedding itself.
    found = [name for name in ("token_embeddings", "sentence_embedding") if name in features]
    return features | {name: features[name].float() for name in found}


def kind_of(path: str, trust_remote_code: bool = False, setting: str = "model") -> str | None:
    """What Sentence Transformers calls a trained model, a folder or Hub id: `SentenceTransformer`, `SparseEncoder`,
    `MultiVectorEncoder` or `CrossEncoder`. None for an encoder without a trained pooling or head.

    Raises:
        FileNotFoundError: if it is a path that does not exist.
    """
    check_model_exists(path, setting)

    def find(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False)

    if settings := find("config_sentence_transformers.json"):
        # Models saved before version 5 do not say what they are.
        return json.loads(Path(settings).read_text(encoding="utf-8")).get("model_type", "SentenceTransformer")
    if find("modules.json"):
        return "SentenceTransformer"
    architectures = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).architectures or []
    return "CrossEncoder" if any(name.endswith("ForSequenceClassification") for name in architectures) else None


def refuse_other_kinds(path: str, trust_remote_code: bool = False, setting: str = "model") -> str | None:
    """Refuse models that Sentence Transformers would make dense: it drops the head and averages the hidden states.

    Args:
        setting: the setting that holds the path, for the message.

    Returns:
        The kind: `SentenceTransformer`, or None for an encoder without a pooling.
    """
    kind = kind_of(path, trust_remote_code, setting)
    if kind not in (None, "SentenceTransformer"):
        raise ValueError(f"`{setting}` is {path}, a {kind}; it must be a dense embedding model (SentenceTransformer).")
    return kind


def check_encoder(encoder: nn.Module, path: str) -> None:
    """Refuse a tokenizer that does not fit its model; see `check_tokenizer`."""
    if not isinstance(encoder, Transformer):
        return  # Static embeddings have their own vocabulary.
    rows = getattr(encoder.model.config.get_text_config(), "vocab_size", None)
    check_tokenizer(encoder.tokenizer, rows, path)


def is_contextual(model: BaseModel) -> bool:
    """Whether a model embeds with a context."""
    return isinstance(getattr(model[0], "model", None), NeoBERTContextualModel)


def check_finite(embeddings: np.ndarray, texts: list[str]) -> None:
    """Raises:
    FloatingPointError: naming the first text whose embedding, a row each, is not finite.
    """
    wrong = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(wrong):
        raise FloatingPointError(
            f"{len(wrong):,} of {len(texts):,} embeddings are not finite, the first that of "
            f"{texts[wrong[0]][:80]!r}. Set `dtype` to float32."
        )


def embedding_fingerprint(model: SentenceTransformer) -> str:
    """A hash of all that the embeddings depend on: weights, architecture, tokenizer, pooling and prompts."""
    modules = [{"class": type(module).__name__} | module.get_config_dict() for module in model]
    # A model may be saved with fewer dimensions than its modules give.
    settings = [modules, model.prompts, model.default_prompt_name, model.similarity_fn_name, model.truncate_dim]
    return loaded_fingerprint(model, model[0].auto_model.config, settings, model.tokenizer.backend_tokenizer.to_str())

"""Embedding models of Sentence Transformers: which kind one is, building one to train, loading one to embed with."""

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from transformers import AutoConfig
from transformers.utils import cached_file

from neobert_hf import NeoBERTContextualModel
from neobert_hf.common.fingerprints import loaded_fingerprint
from neobert_hf.common.paths import check_complete, check_model_exists
from neobert_hf.common.tokenizers import check_tokenizer, load_tokenizer, tokens_read


Model = TypeVar("Model", bound=BaseModel)


def kind_of(path: str, trust_remote_code: bool = False, setting: str = "model") -> str | None:
    """What Sentence Transformers calls a trained model, a folder or Hub id: `SentenceTransformer`, `SparseEncoder`,
    `MultiVectorEncoder` or `CrossEncoder`. None for an encoder without a trained pooling or head.

    Raises:
        FileNotFoundError: if it is a path that does not exist; it names the setting that holds the path.
    """
    check_model_exists(path, setting)

    def find(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False)

    if settings := find("config_sentence_transformers.json"):
        # Models saved before version 5 do not say what they are.
        return json.loads(Path(settings).read_text(encoding="utf-8")).get("model_type", "SentenceTransformer")
    if find("modules.json"):
        return "SentenceTransformer"
    check_complete(path, setting)
    # The error of Sentence Transformers does not say that a tokenizer is missing.
    load_tokenizer(path, trust_remote_code=trust_remote_code)
    architectures = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).architectures or []
    return "CrossEncoder" if any(name.endswith("ForSequenceClassification") for name in architectures) else None


def note_on_untrained(path: str, trust_remote_code: bool = False) -> str | None:
    """A note for the user, if this is an encoder that was not trained for embeddings."""
    if kind_of(path, trust_remote_code) is not None:
        return None
    return (
        f"note: {path} is a pretrained encoder, which has not been trained for embeddings: it finds less than a search "
        "by words. Train it first, on pairs with `finetune_embeddings` or on your documents with "
        "`retrieval_from_documents`."
    )


def dense_kind_of(path: str, trust_remote_code: bool = False, setting: str = "model") -> str | None:
    """As `kind_of`, but models that are not dense are refused: Sentence Transformers would drop their head and average
    the hidden states."""
    kind = kind_of(path, trust_remote_code, setting)
    if kind not in (None, "SentenceTransformer"):
        raise ValueError(f"`{setting}` is {path}, a {kind}; it must be a dense embedding model (SentenceTransformer).")
    return kind


def is_contextual(model: BaseModel) -> bool:
    """Whether a model embeds with a context; see `contextual.py`."""
    return isinstance(getattr(model[0], "model", None), NeoBERTContextualModel)


def check_encoder(encoder: nn.Module, path: str) -> None:
    """Refuse a tokenizer that does not fit its model; see `check_tokenizer`."""
    # Static embeddings have their own vocabulary.
    if isinstance(encoder, Transformer):
        rows = getattr(encoder.model.config.get_text_config(), "vocab_size", None)
        check_tokenizer(encoder.tokenizer, rows, path)


def check_plain(model: BaseModel, path: str) -> None:
    """Refuse a tokenizer that does not fit, and a contextual model, which would embed texts with its first stage."""
    check_encoder(model[0], path)
    if is_contextual(model):
        raise ValueError(f"{path} is a contextual model, which needs a context: give a model that embeds without one.")


def cut_texts_at(model: BaseModel, max_length: int | None) -> None:
    """Let a model read this many tokens of a text; fewer if it has positions for fewer.

    Raises:
        ValueError: if the special tokens would leave no room for the text.
    """
    special = model.tokenizer.num_special_tokens_to_add()
    if max_length is not None and max_length <= special:
        raise ValueError(
            f"`max_length` is {max_length}, but {special} tokens of each text are special ones: nothing of it would be "
            f"read. Set {special + 1} or more."
        )
    model.max_seq_length = tokens_read(model[0].model, max_length, model.max_seq_length)


def build(kind: type[Model], path: str, max_length: int, trust_remote_code: bool = False) -> Model:
    """A model of this kind to train, in float32: the one in `path`, or a new one on the encoder there.

    A new `CrossEncoder` (reranker, https://arxiv.org/abs/1901.04085) has a new head for its score, and a new
    `MultiVectorEncoder` (ColBERT, https://arxiv.org/abs/2004.12832) a new linear layer to 128 numbers for every token.

    Args:
        path: folder or Hub id.
        max_length: tokens; longer texts are cut. Never more than the model has positions for.

    Raises:
        ValueError: if the tokenizer is that of another model, or it is a contextual model.
    """
    # Some checkpoints (DeBERTa-v3) are 16-bit, in which AdamW's steps get lost.
    model = kind(path, trust_remote_code=trust_remote_code, model_kwargs={"dtype": torch.float32})
    check_plain(model, path)
    cut_texts_at(model, max_length)
    if not isinstance(model, CrossEncoder):
        # Sentence Transformers chooses a default when an evaluation first asks, and saves it only from then on.
        model.similarity_fn_name = model.similarity_fn_name
    return model


def build_encoder(path: str, max_length: int, trust_remote_code: bool = False) -> SentenceTransformer:
    """A dense model with cosine similarity. On an encoder without pooling, it gets the mean of the tokens."""
    model = build(SentenceTransformer, path, max_length, trust_remote_code)
    model.similarity_fn_name = "cosine"
    return model


def build_sparse_encoder(path: str, max_length: int, trust_remote_code: bool = False) -> SparseEncoder:
    """A SPLADE-max model (https://arxiv.org/abs/2109.10086): MLM logits, log(1 + relu), the maximum over the tokens.

    Raises:
        ValueError: also if the model has no trained MLM head. Sentence Transformers would make another kind of it.
    """
    encoder = build(SparseEncoder, path, max_length, trust_remote_code)
    if not isinstance(encoder[1], SpladePooling):
        raise ValueError(
            f"{path} has no trained MLM head: `architectures` in its config.json is "
            f"{encoder[0].model.config.architectures}, none of which ends with ForMaskedLM. Give a model "
            "with its head."
        )
    # Otherwise the module learns its width from the first text, and a finished run would save it without one.
    encoder[1].embedding_dimension = encoder[0].model.config.vocab_size
    return encoder


def check_trained(path: str, setting: str, trust_remote_code: bool = False) -> None:
    """What `load_trained_model` refuses, as far as it can be seen without loading the model."""
    if dense_kind_of(path, trust_remote_code, setting) is None:
        raise ValueError(
            f"`{setting}` is {path}, which is no embedding model: it has no modules.json, which names a pooling. Train "
            "it on pairs with `finetune_embeddings` first, or name an embedding model on the Hub."
        )


def check_reranker(path: str, setting: str, trust_remote_code: bool = False) -> None:
    """Refuse a model that is no reranker: a cross-encoder that gives one score."""
    if (kind := kind_of(path, trust_remote_code, setting)) != "CrossEncoder":
        raise ValueError(f"`{setting}` is {path}, which is {kind or 'an encoder'}; it must be a CrossEncoder.")
    classes = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).num_labels
    if classes != 1:
        raise ValueError(
            f"`{setting}` is {path}, a classifier of {classes} classes, and a reranker gives one score: name another, "
            "or an encoder to train one."
        )


def load_trained_model(path: str, setting: str, trust_remote_code: bool = False) -> SentenceTransformer:
    """A trained embedding model that helps to train another one: folder or Hub id.

    Args:
        setting: the setting that names it, such as `miner` or `guide`, for messages.

    Raises:
        ValueError: if it is of another kind, or an encoder without a trained pooling: the mean of the hidden states of
            a masked language model says little about what a text is about.
    """
    check_trained(path, setting, trust_remote_code)
    model = SentenceTransformer(path, trust_remote_code=trust_remote_code)
    check_plain(model, path)
    return model


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
    dense_kind_of(path, options.get("trust_remote_code", False))
    model = SentenceTransformer(path, model_kwargs={"dtype": dtype}, **options)
    encoder, *others = model
    if not isinstance(encoder, Transformer):
        raise ValueError(f"{path} begins with {type(encoder).__name__}; it must begin with a Transformers encoder.")
    check_encoder(encoder, path)
    kept, size = options.get("truncate_dim"), model.get_embedding_dimension()
    if kept is not None and size is not None and kept > size:
        raise ValueError(f"`truncate_dim` is {kept}; the model has only {size} dimensions.")
    cut_texts_at(model, max_length)
    encoder.register_forward_hook(_to_float32)
    for module in others:
        module.float()
    return model.eval()


def _to_float32(module, args, features: dict) -> dict:
    # A contextual model returns the embedding itself.
    found = [name for name in ("token_embeddings", "sentence_embedding") if name in features]
    return features | {name: features[name].float() for name in found}


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

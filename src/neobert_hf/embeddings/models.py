"""Sentence Transformers models of every kind, to train or to help in training."""

from typing import TypeVar

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sparse_encoder.modules import SpladePooling

from neobert_hf.common.tokenizers import tokens_read
from neobert_hf.embeddings.inference import check_encoder, is_contextual, refuse_other_kinds


Model = TypeVar("Model", bound=BaseModel)


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
    check_loaded(model, path)
    model.max_seq_length = tokens_read(model[0].model, max_length, model.max_seq_length)
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
    return encoder


def load_trained_model(path: str, setting: str, trust_remote_code: bool = False) -> SentenceTransformer:
    """A trained embedding model that helps to train another one: folder or Hub id.

    Args:
        setting: the setting that names it, such as `miner` or `guide`, for messages.

    Raises:
        ValueError: if it is of another kind, or an encoder without a trained pooling: the mean of the hidden states of
            a masked language model says little about what a text is about.
    """
    if refuse_other_kinds(path, trust_remote_code, setting) is None:
        raise ValueError(
            f"`{setting}` is {path}, which is no embedding model: it has no modules.json, which names a pooling. Train "
            "it on pairs with examples/finetune_embeddings.py first, or name an embedding model on the Hub."
        )
    model = SentenceTransformer(path, trust_remote_code=trust_remote_code)
    check_loaded(model, path)
    return model


def check_loaded(model: BaseModel, path: str) -> None:
    """Refuse the tokenizer of another model, and a contextual model, which would embed texts with its first stage."""
    check_encoder(model[0], path)
    if is_contextual(model):
        raise ValueError(f"{path} is a contextual model, which needs a context: give a model that embeds without one.")

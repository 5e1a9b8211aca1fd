"""Sentence Transformers models of every kind, to train or to help in training."""

from typing import TypeVar

import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import DataCollatorWithFlattening
from transformers.utils.generic import is_flash_attention_requested

from neobert_hf.common.tokenizers import tokens_read
from neobert_hf.embeddings.contextual import refuse_contextual
from neobert_hf.embeddings.inference import check_encoder, kind_of, refuse_other_kinds
from neobert_hf.modeling_neobert import NeoBERTPreTrainedModel


Model = TypeVar("Model", bound=BaseModel)


def build(kind: type[Model], path: str, max_length: int, trust_remote_code: bool = False) -> Model:
    """A model of this kind, in float32: the one in `path`, or a new one on the encoder there.

    Args:
        path: folder or Hub id.
        max_length: tokens; longer texts are cut. Never more than the model has positions for.

    Raises:
        ValueError: if the tokenizer is that of another model, or it is a contextual model.
    """
    # Some checkpoints (DeBERTa-v3) are 16-bit, in which AdamW's steps get lost.
    model = kind(path, trust_remote_code=trust_remote_code, model_kwargs={"dtype": torch.float32})
    check_encoder(model[0], path)
    refuse_contextual(model, path)
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
    if isinstance(encoder[0].model, NeoBERTPreTrainedModel):
        flatten_inputs(encoder)
    return encoder


def build_multi_vector_encoder(path: str, max_length: int, trust_remote_code: bool = False) -> MultiVectorEncoder:
    """A late-interaction model (ColBERT, https://arxiv.org/abs/2004.12832): a vector of 128 numbers for every token.

    The linear layer for them is new unless the model is a late-interaction model.
    """
    return build(MultiVectorEncoder, path, max_length, trust_remote_code)


def build_reranker(path: str, max_length: int, trust_remote_code: bool = False) -> CrossEncoder:
    """A reranker (https://arxiv.org/abs/1901.04085): query and document in one sequence, and one score from a head.

    The head is new unless the model is a classifier.
    """
    return build(CrossEncoder, path, max_length, trust_remote_code)


def flatten_inputs(encoder: BaseModel) -> None:
    """Let a model on NeoBERT lay its texts end to end. Its outputs stay the same, and so does what is saved.

    NeoBERT strips the padding of padded batches by itself, but the modules after it would still compute it: for SPLADE,
    a number for each entry of the vocabulary. Sentence Transformers flattens a batch only if a flash attention is set.
    NeoBERT takes flattened batches with `sdpa` as well. `encoder[0].unpad_inputs = False` undoes this.

    Raises:
        ValueError: for other backends, which would compute a mask over all texts at once.
    """
    transformer = encoder[0]
    attention = transformer.model.config._attn_implementation
    if attention != "sdpa" and not is_flash_attention_requested(requested_attention_implementation=attention):
        raise ValueError(
            f"Attention {attention!r} would compute a mask over all texts of a batch at once: load the model with "
            "attn_implementation 'sdpa' or a flash attention."
        )
    transformer.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    transformer._flatten_position_offset = 0
    transformer.can_flatten_inputs = True


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
    check_encoder(model[0], path)
    refuse_contextual(model, path)
    return model


def load_trained_reranker(path: str, setting: str, trust_remote_code: bool = False) -> CrossEncoder:
    """A trained reranker that helps to train another model: folder or Hub id, named by this setting.

    Raises:
        ValueError: if it has no trained head, which would be filled with random numbers.
    """
    if kind_of(path, trust_remote_code, setting) != "CrossEncoder":
        raise ValueError(
            f"`{setting}` is {path}, which is no trained reranker. Train one with examples/train_reranker.py, or name "
            "one on the Hub."
        )
    model = CrossEncoder(path, trust_remote_code=trust_remote_code)
    check_encoder(model[0], path)
    return model

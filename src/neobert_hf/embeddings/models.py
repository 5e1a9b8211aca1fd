"""Sentence Transformers models of every kind on a pretrained encoder, and the loss of dense embeddings."""

import json
from collections.abc import Sequence

import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    GISTEmbedLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from transformers import AutoConfig

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.tokenizers import tokens_read
from neobert_hf.embeddings.contextual import refuse_contextual
from neobert_hf.embeddings.flattening import flatten_inputs
from neobert_hf.embeddings.inference import check_encoder, has_classifier, refuse_other_kinds
from neobert_hf.embeddings.recipe import read_beside_model


def transformer_module(
    path: str, max_length: int, trust_remote_code: bool = False, head: str = "feature-extraction"
) -> Transformer:
    """The first module of a Sentence Transformers model: an encoder with its tokenizer, in float32.

    Args:
        path: folder or Hub id. Of a Sentence Transformers model, only the encoder and its tokenizer are used.
        max_length: tokens; longer texts are cut. Never more than the model has positions for.
        head: `feature-extraction` for none, `fill-mask` or `sequence-classification`.
    """
    options = {"trust_remote_code": trust_remote_code}
    transformer = Transformer(
        path,
        transformer_task=head,
        # Some checkpoints (DeBERTa-v3) are 16-bit, in which AdamW's steps get lost.
        model_kwargs={"dtype": torch.float32} | options,
        processor_kwargs=options,
        config_kwargs=options,
    )
    check_encoder(transformer, path)
    refuse_contextual([transformer], path)
    transformer.max_seq_length = tokens_read(transformer.model, max_length, transformer.max_seq_length)
    return transformer


def build_encoder(path: str, max_length: int, trust_remote_code: bool = False) -> SentenceTransformer:
    """A dense model with cosine similarity: an encoder with mean pooling, or an embedding model with its own pooling.

    Arguments are those of `transformer_module`. The linear layers of an embedding model are added by
    `add_linear_layers`; its other modules are left out.
    """
    transformer = transformer_module(path, max_length, trust_remote_code)
    own = saved_modules(path, Pooling)
    pooling = own[0] if own else Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[transformer, pooling], similarity_fn_name="cosine")


def add_linear_layers(model: SentenceTransformer, path: str) -> None:
    """Append the linear layers that a Sentence Transformers model (folder or Hub id) has after its pooling."""
    for layer in saved_linear_layers(path):
        model.append(layer.to(model.device))


def saved_linear_layers(path: str) -> list[Dense]:
    """The linear layers after the pooling of a Sentence Transformers model (folder or Hub id); others have none."""
    # The linear layers of late-interaction models take single tokens.
    return [layer for layer in saved_modules(path, Dense) if layer.module_input_name == "sentence_embedding"]


def saved_modules(path: str, kind: type[nn.Module]) -> list[nn.Module]:
    """The modules of a kind in a Sentence Transformers model (folder or Hub id); none for other models."""
    modules = json.loads(read_beside_model(path, "modules.json") or "[]")
    return [kind.load(path, each["path"]) for each in modules if each["type"].endswith(f".{kind.__name__}")]


def build_sparse_encoder(path: str, max_length: int, trust_remote_code: bool = False) -> SparseEncoder:
    """A SPLADE-max model (https://arxiv.org/abs/2109.10086): MLM logits, log(1 + relu), the maximum over the tokens.

    Arguments are those of `transformer_module`. The model must have a trained MLM head.
    """
    transformer = transformer_module(path, max_length, trust_remote_code, head="fill-mask")
    encoder = SparseEncoder(modules=[transformer, SpladePooling("max")], similarity_fn_name="dot")
    architectures = transformer.model.config.architectures or []
    if isinstance(transformer.model, NeoBERTForMaskedLM):
        # Loading has refused a NeoBERT without the head. The decoder is large, so keep it from running on padding.
        flatten_inputs(encoder)
    elif not any(name.endswith("ForMaskedLM") for name in architectures):
        # Transformers gives other models a new head, with no more than a warning.
        raise ValueError(
            f"{path} has no trained MLM head: `architectures` in its config.json is {architectures}, and no name in it "
            "ends with ForMaskedLM. Give a pretrained model with its head."
        )
    return encoder


def build_multi_vector_encoder(path: str, max_length: int, trust_remote_code: bool = False) -> MultiVectorEncoder:
    """A late-interaction model (ColBERT, https://arxiv.org/abs/2004.12832): a vector of 128 numbers for every token.

    The linear layer for them is new unless the model is a late-interaction model. Arguments are those of
    `transformer_module`.
    """
    encoder = MultiVectorEncoder(path, trust_remote_code=trust_remote_code, model_kwargs={"dtype": torch.float32})
    check_encoder(encoder[0], path)
    refuse_contextual(encoder, path)
    encoder.max_seq_length = tokens_read(encoder[0].model, max_length, encoder.max_seq_length)
    return encoder


def build_reranker(path: str, max_length: int, trust_remote_code: bool = False) -> CrossEncoder:
    """A reranker (https://arxiv.org/abs/1901.04085): query and document in one sequence, and one score from a head.

    The head is new unless the model is a classifier. Arguments are those of `transformer_module`.
    """
    transformer = transformer_module(path, max_length, trust_remote_code, head="sequence-classification")
    return CrossEncoder(modules=[transformer])


def describe_reranker(path: str, trust_remote_code: bool = False) -> str:
    """The model that a reranker starts from, and whether its classification head is new."""
    trained = has_classifier(path, trust_remote_code)
    return f"{path}, with {'its own' if trained else 'a new'} classification head"


def info_nce_loss(
    encoder: SentenceTransformer,
    temperature: float,
    mini_batch_size: int | None = None,
    matryoshka_dims: Sequence[int] = (),
    guide: SentenceTransformer | None = None,
) -> nn.Module:
    """InfoNCE over the batch: each query against all documents and hard negatives of the batch.

    Args:
        temperature: the cosine similarities are divided by it.
        mini_batch_size: compute this many texts at a time (GradCache), for batches that do not fit in memory. The
            gradients are the same. Whole batches if None.
        matryoshka_dims: also train prefixes of the embeddings of these lengths, beside their full size.
        guide: a trained model. Texts that it finds closer to a query than the right document are probably right, too:
            they are left out of that query's negatives. It reads each text as the model in training does, cut and with
            the same instruction, and not with its own prompts.

    References:
        The paper, section 5.2.1; https://arxiv.org/abs/2101.06983 (GradCache), https://arxiv.org/abs/2205.13147
        (Matryoshka), https://arxiv.org/abs/2402.16829 (GIST, whose contrast of queries with queries and of documents
        with documents is not used: the paper's loss has none).
    """
    if temperature <= 0:
        raise ValueError(f"`temperature` is {temperature}; it must be above 0.")
    cached = {} if mini_batch_size is None else {"mini_batch_size": mini_batch_size}
    if guide is not None:
        guided = CachedGISTEmbedLoss if cached else GISTEmbedLoss
        others = {"contrast_anchors": False, "contrast_positives": False}
        guide.register_forward_pre_hook(_inputs_only)
        loss = guided(encoder, guide.eval().requires_grad_(False), temperature=temperature, **others, **cached)
    else:
        plain = CachedMultipleNegativesRankingLoss if cached else MultipleNegativesRankingLoss
        loss = plain(encoder, scale=1 / temperature, **cached)
    return with_prefixes(encoder, loss, matryoshka_dims)


def with_prefixes(encoder: SentenceTransformer, loss: nn.Module, dimensions: Sequence[int]) -> nn.Module:
    """A loss on whole embeddings and, if dimensions are given, on prefixes of these lengths as well (Matryoshka)."""
    if not dimensions:
        return loss
    check_prefixes(encoder, dimensions)
    return MatryoshkaLoss(encoder, loss, sorted({encoder.get_embedding_dimension(), *dimensions}, reverse=True))


def check_prefixes(encoder: SentenceTransformer, dimensions: Sequence[int]) -> None:
    size = encoder.get_embedding_dimension()
    if any(not 0 < dimension <= size for dimension in dimensions):
        raise ValueError(f"`matryoshka_dims` is {dimensions}; the model allows 1 to {size}.")


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
        ValueError: if it has no trained head, which would be filled with random numbers, or gives several scores.
    """
    architectures = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).architectures or []
    if not any(name.endswith(("ForSequenceClassification", "ForCausalLM")) for name in architectures):
        raise ValueError(
            f"`{setting}` is {path}, which is no trained reranker: `architectures` in its config.json is "
            f"{architectures}. Train one with examples/train_reranker.py, or name one on the Hub."
        )
    model = CrossEncoder(path, trust_remote_code=trust_remote_code)
    check_encoder(model[0], path)
    if model.num_labels != 1:
        raise ValueError(f"`{setting}` is {path}, which gives {model.num_labels} scores; a reranker gives one.")
    return model


def _inputs_only(module: nn.Module, args: tuple[dict, ...]) -> tuple[dict]:
    """Leave out what the model in training has added: the cached loss of Sentence Transformers 6.2 passes that on."""
    return ({name: value for name, value in args[0].items() if not name.endswith(("_embedding", "_embeddings"))},)

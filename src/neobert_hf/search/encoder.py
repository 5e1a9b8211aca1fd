"""The embedding model of an index: it cuts documents, embeds passages and queries, and records how it does so."""

import copy
import os
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from neobert_hf.common.fingerprints import fingerprint
from neobert_hf.embeddings.contextual import is_contextual
from neobert_hf.embeddings.inference import (
    check_finite,
    embedding_fingerprint,
    kind_of,
    load_embedding_model,
    note_on_prompt,
    prompt_of,
)
from neobert_hf.embeddings.instructions import Separator, add_prompt, as_prompt, separator_text
from neobert_hf.search.index import VectorIndex, check_identity
from neobert_hf.search.passages import split_passages


@dataclass
class EmbeddingSettings:
    """How vectors are made. All of this is stored with the index, and also applies to queries."""

    model: str = field(
        metadata={
            "help": "an embedding model, or an encoder, which gets mean pooling: path or Hub id",
            "path": "or Hub id",
        }
    )
    passage_tokens: int | None = field(
        default=None, metadata={"help": "longer documents are cut into passages; the model's limit if unset"}
    )
    overlap: int = field(default=32, metadata={"help": "tokens that neighbouring passages share"})
    query_prompt: str | None = field(
        default=None, metadata={"help": "put before queries as it is, so end it with a space; the model's own if unset"}
    )
    document_prompt: str | None = field(default=None, metadata={"help": "put before passages, like `query_prompt`"})
    separator: Separator | None = field(
        default=None,
        metadata={"help": "if set, the two prompts are instructions, and this is put between them and the texts"},
    )
    truncate_dim: int | None = field(default=None, metadata={"help": "dimensions to keep (Matryoshka)"})
    dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="float32", metadata={"help": "type of the encoder's weights, also for queries"}
    )

    def __post_init__(self):
        if self.separator is not None and self.query_prompt is None and self.document_prompt is None:
            raise ValueError(
                f"`separator` is {self.separator} without a `query_prompt` or `document_prompt`: the model's own "
                "prompts already end with theirs."
            )

    @classmethod
    def of_index(cls, identity: dict) -> "EmbeddingSettings":
        """The settings that an index was made with. The prompts in its identity already end with their separator."""
        return cls(**{setting.name: identity[setting.name] for setting in fields(cls) if setting.name != "separator"})


class PassageEncoder:
    """A loaded model with the settings of an index, on `device` or the fastest one there is.

    Attributes:
        identity: all that the vectors depend on, and the name by which the model can be found.
        context: for a contextual model, the context that it reads with every text; see `use_context`.
    """

    def __init__(self, settings: EmbeddingSettings, device: str | None = None, trust_remote_code: bool = False):
        self.model = load_embedding_model(
            settings.model,
            getattr(torch, settings.dtype),
            device=device,
            truncate_dim=settings.truncate_dim,
            trust_remote_code=trust_remote_code,
        )
        # A copy: the model's own keeps the length at which it cuts, even for calls in other threads that must not cut.
        self.tokenizer = copy.deepcopy(self.model.tokenizer)
        name, limit = settings.model, self.model.max_seq_length
        self.is_trained = kind_of(name, trust_remote_code) is not None
        self.context: torch.Tensor | None = None
        self.identity = {
            # Absolute, so that it is found from any working directory.
            "model": os.path.abspath(name) if os.path.isdir(name) else name,
            "fingerprint": embedding_fingerprint(self.model),
            "pooling": [module.pooling_mode for module in self.model if isinstance(module, Pooling)],
            "dimension": self.model.get_embedding_dimension(),
            "truncate_dim": settings.truncate_dim,
            "dtype": settings.dtype,
            "max_length": limit,
            "passage_tokens": settings.passage_tokens or limit,
            "overlap": settings.overlap,
            "query_prompt": self._prompt("query", settings.query_prompt, settings.separator),
            "document_prompt": self._prompt("document", settings.document_prompt, settings.separator),
        }

    def _prompt(self, kind: Literal["query", "document"], given: str | None, separator: Separator | None) -> str:
        """The prompt of texts of this kind: the model's own unless another one, or an instruction, is given."""
        if given is None:
            return prompt_of(self.model, kind)
        return given if separator is None else as_prompt(given, separator_text(separator, self.model.tokenizer))

    @property
    def needs_context(self) -> bool:
        return self.context is None and is_contextual(self.model)

    def use_context(self, context: torch.Tensor) -> None:
        """Let a contextual model read a context, from `embed_context`. Its hash becomes a part of the identity."""
        self.context = context
        self.identity["context"] = fingerprint(context.float())

    @cached_property
    def text_tokens(self) -> int:
        """How many tokens of a text fit into a passage, beside the prompt and the special tokens."""
        identity, tokenizer = self.identity, self.tokenizer
        limit, size = identity["max_length"], identity["passage_tokens"]
        if size is None or (limit is not None and size > limit):
            raise ValueError(f"`passage_tokens` is {size}; the model reads {limit or 'any number: set one'}.")
        prompt = tokenizer(identity["document_prompt"], add_special_tokens=False)["input_ids"]
        return size - len(prompt) - tokenizer.num_special_tokens_to_add()

    def split(self, text: str) -> list[str]:
        """Cut a document into passages short enough for the model to read whole, together with the prompt."""
        return split_passages(text, self.tokenizer, self.text_tokens, self.identity["overlap"])

    def embed(self, kind: Literal["query", "document"], texts: list[str], batch_size: int = 32) -> np.ndarray:
        """Embed texts with the prompt of their kind.

        Returns:
            Vectors of length 1: (texts, dimension) in float32. Raises FloatingPointError if one is not finite.
        """
        if self.needs_context:
            raise ValueError("A contextual model embeds with the context of its index: call `use_context` first.")
        encode = {"query": self.model.encode_query, "document": self.model.encode_document}[kind]
        # Unlike None, an empty prompt also keeps the model from using its own.
        prompt = self.identity[f"{kind}_prompt"]
        options = {"batch_size": batch_size, "normalize_embeddings": True, "show_progress_bar": False}
        if self.context is not None:
            options["dataset_embeddings"] = self.context
        vectors = encode(texts, prompt=prompt, **options)
        check_finite(vectors, texts)
        return vectors

    def notes(self) -> list[str]:
        """Notes for the user: texts get another prompt than the model's own, vectors are compared in another way than
        the model's own, or the model is an encoder that was not trained for embeddings.
        """
        kinds = (("queries", "query"), ("passages", "document"))
        lines = [
            note_on_prompt(self.model, f"{texts} get", self.identity[f"{kind}_prompt"], prompt_of(self.model, kind))
            for texts, kind in kinds
        ]
        own = self.model.similarity_fn_name
        if own != "cosine" and not any(isinstance(module, Normalize) for module in self.model):
            lines.append(
                f"note: this model was saved to compare vectors by {own!r}, but the index compares them by 'cosine': "
                "the ranking may differ."
            )
        if not self.is_trained:
            lines.append(
                f"note: {self.identity['model']} is a pretrained encoder, which has not been trained for "
                "embeddings: it finds less than a search by words. Train it first, on pairs with "
                "`examples/finetune_embeddings.py` or on your documents with `examples/retrieval_from_documents.py`."
            )
        return [line for line in lines if line]

    def warnings(self, queries: list[str]) -> list[str]:
        """Name the queries that are too long for the model: it ignores their end, since queries have no passages."""
        lines, limit = [], self.identity["max_length"]
        for query in queries:
            (text,) = add_prompt(self.identity["query_prompt"], [query])
            length = len(self.tokenizer(text, verbose=False)["input_ids"])
            if limit is not None and length > limit:
                lines.append(
                    f"warning: the query {query[:60]!r} has {length:,} tokens with its prompt, but the model reads "
                    f"only {limit:,}: the end of the query is ignored."
                )
        return lines


def join_index(name: str, index: VectorIndex, encoder: PassageEncoder) -> None:
    """Prepare an encoder for an existing index: a contextual model gets the context that the index was made with.

    Raises:
        VectorIndexError: if the vectors could not be compared with those of the index.
    """
    if encoder.needs_context and "context" in index.identity:
        encoder.use_context(index.read_context())
    check_identity(name, index.identity, encoder.identity)

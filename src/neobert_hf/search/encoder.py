"""The embedding model of an index: it cuts documents, embeds passages and queries, and records how it does so."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from neobert_hf.common.fingerprints import fingerprint, weights_fingerprint
from neobert_hf.common.run import check_same_identity
from neobert_hf.embeddings.models import (
    check_finite,
    embedding_fingerprint,
    is_contextual,
    load_embedding_model,
    note_on_untrained,
)
from neobert_hf.embeddings.prompts import note_on_prompt, prompt_of
from neobert_hf.search.passages import split_passages
from neobert_hf.search.vector_index import VectorIndex


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
        default=None, metadata={"help": "longer documents are cut into passages; 128, or the model's limit, if unset"}
    )
    overlap: int = field(default=32, metadata={"help": "tokens that neighbouring passages share"})
    query_prompt: str | None = field(
        default=None, metadata={"help": "put before queries as it is, so end it with a space; the model's own if unset"}
    )
    document_prompt: str | None = field(default=None, metadata={"help": "put before passages, like `query_prompt`"})
    truncate_dim: int | None = field(default=None, metadata={"help": "dimensions to keep (Matryoshka)"})
    dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="float32", metadata={"help": "type of the encoder's weights, also for queries"}
    )
    precision: Literal["int8", "binary"] | None = field(
        default=None, metadata={"help": "how vectors are stored, in fewer bytes; float32 if unset"}
    )

    @classmethod
    def of_index(cls, identity: dict) -> "EmbeddingSettings":
        """The settings that an index was made with."""
        return cls(**{setting.name: identity[setting.name] for setting in fields(cls)})

    def check_like(self, name: str, identity: dict) -> None:
        """Refuse settings that an index was not made with, before the model is loaded.

        Raises:
            SettingsMismatch: naming them.
        """
        given = {key: value for key, value in vars(self).items() if key != "model" and value is not None}
        check_same_index(name, {key: identity[key] for key in given}, given, identity["model"])


def check_same_index(name: str, stored: dict, current: dict, model: str) -> None:
    advice = f"Use {model} and the settings of the index, or make another index."
    check_same_identity(f"The index {name}", stored, current, advice)


class PassageEncoder:
    """A loaded model with the settings of an index, on `device` or the fastest one there is.

    Attributes:
        identity: all that the vectors depend on, and the name by which the model can be found.
        text_tokens: how many tokens of a text fit into a passage, beside the prompt and the special tokens.
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
        name, limit, tokenizer = settings.model, self.model.max_seq_length, self.model.tokenizer
        self.note_on_untrained = note_on_untrained(name, trust_remote_code)
        self.context: torch.Tensor | None = None
        prompts = {"query": settings.query_prompt, "document": settings.document_prompt}
        prompts = {kind: prompt_of(self.model, kind) if given is None else given for kind, given in prompts.items()}
        # Of a passage of a thousand tokens a small model's vector says little.
        size = settings.passage_tokens or min(limit or 128, 128)
        if limit is not None and size > limit:
            raise ValueError(f"`passage_tokens` is {size}; the model reads {limit}.")
        prompt = tokenizer(prompts["document"], add_special_tokens=False)["input_ids"]
        self.text_tokens = size - len(prompt) - tokenizer.num_special_tokens_to_add()
        self.identity = {
            # Absolute, so that it is found from any working directory.
            "model": os.path.abspath(name) if os.path.isdir(name) else name,
            "fingerprint": embedding_fingerprint(self.model),
            "weights": weights_fingerprint(name),
            "pooling": [module.pooling_mode for module in self.model if isinstance(module, Pooling)],
            "dimension": self.model.get_embedding_dimension(),
            "truncate_dim": settings.truncate_dim,
            "dtype": settings.dtype,
            "precision": settings.precision,
            "max_length": limit,
            "passage_tokens": size,
            "overlap": settings.overlap,
            "query_prompt": prompts["query"],
            "document_prompt": prompts["document"],
        }
        self.split("")  # Refuses an overlap that is too long, before any work.

    @property
    def needs_context(self) -> bool:
        return self.context is None and is_contextual(self.model)

    def use_context(self, context: torch.Tensor) -> None:
        """Let a contextual model read a context, from `embed_context`. Its hash becomes a part of the identity."""
        self.context = context
        self.identity["context"] = fingerprint(context.float())

    def split(self, text: str) -> list[str]:
        """Cut a document into passages short enough for the model to read whole, together with the prompt."""
        return split_passages(text, self.model.tokenizer, self.text_tokens, self.identity["overlap"])

    def embed(
        self,
        kind: Literal["query", "document"],
        texts: list[str],
        batch_size: int = 32,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Embed texts with the prompt of their kind.

        Args:
            progress: called after each batch, with the number of its texts.

        Returns:
            Vectors of length 1: (texts, dimension) in float32. Raises FloatingPointError if one is not finite.
        """
        if self.needs_context:
            raise ValueError("A contextual model embeds with the context of its index: call `use_context` first.")
        encode = {"query": self.model.encode_query, "document": self.model.encode_document}[kind]
        options = {"batch_size": batch_size, "normalize_embeddings": True, "show_progress_bar": False}
        if self.context is not None:
            options["dataset_embeddings"] = self.context
        hook = self.model.register_forward_hook(
            lambda model, args, found: progress(len(found["sentence_embedding"])) if progress else None
        )
        # Unlike None, an empty prompt also keeps the model from using its own.
        vectors = encode(texts, prompt=self.identity[f"{kind}_prompt"], **options)
        hook.remove()
        check_finite(vectors, texts)
        return vectors

    def join(self, name: str, index: VectorIndex) -> None:
        """Prepare for an existing index: a contextual model gets the context that the index was made with.

        The model's name may differ, since a folder can be moved: the fingerprint is what counts.

        Raises:
            SettingsMismatch: if the vectors could not be compared with those of the index.
        """
        if self.needs_context and "context" in index.identity:
            self.use_context(index.read_context())
        # In the form that is stored: JSON turns a tuple of pooling modes into a list.
        current = json.loads(json.dumps(self.identity))
        if current["weights"] == index.identity["weights"]:
            current["model"] = index.identity["model"]
        check_same_index(name, index.identity, current, index.identity["model"])

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
            lines.append(f"note: this model was saved to compare vectors by {own!r}; the index compares by 'cosine'.")
        return [line for line in [*lines, self.note_on_untrained] if line]

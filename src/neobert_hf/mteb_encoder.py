"""A Sentence Transformers model as MTEB sees it.

MTEB's own wrapper looks prompts up by rules that drop some (the key `CQADupstackRetrieval` reaches none of its 12
parts, a local task's key is refused) and spread others (a task's key prompts documents, too). Here each task has one
instruction, which stands before queries only where there are queries.
"""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer


class InstructionEncoder(AbsEncoder):
    """Encodes with one instruction a task.

    Args:
        model: any, fine-tuned or not.
        name: under which results are reported.
        prompts: what stands before the texts of each task, by its name. If None, the prompts that the model was saved
            with are used.

    Raises:
        KeyError: on encoding for a task without a prompt.
        FloatingPointError: when an embedding is not finite.
    """

    def __init__(self, model: SentenceTransformer, name: str, prompts: dict[str, str] | None):
        self.model = model
        self.prompts = prompts
        self.mteb_model_meta = ModelMeta.create_empty(
            {"name": name, "similarity_fn_name": ScoringFunction.from_str(model.similarity_fn_name)}
        )

    def prompt(self, task: str, prompt_type: PromptType | None) -> str | None:
        """What stands before the texts; None leaves it to the model."""
        if self.prompts is None:
            return None
        # An empty prompt, unlike None, also keeps the model's own away.
        return "" if prompt_type == PromptType.document else self.prompts[task]

    def encode(self, inputs, *, task_metadata, prompt_type: PromptType | None = None, **kwargs: Any) -> np.ndarray:
        """MTEB calls this with batches of texts; `hf_split` and `hf_subset` make no difference."""
        del kwargs["hf_split"], kwargs["hf_subset"]
        encode = {
            PromptType.query: self.model.encode_query,
            PromptType.document: self.model.encode_document,
            None: self.model.encode,
        }[prompt_type]
        texts = [text for batch in inputs for text in batch["text"]]
        embeddings = encode(texts, prompt=self.prompt(task_metadata.name, prompt_type), **kwargs)
        wrong = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
        if len(wrong):
            raise FloatingPointError(
                f"{task_metadata.name}: {len(wrong):,} of {len(texts):,} embeddings are not finite, the first that of "
                f"{texts[wrong[0]][:80]!r}. Set `dtype` to float32."
            )
        return embeddings


def load_model(
    path: str, dtype: torch.dtype, device: str | None, max_length: int | None, truncate_dim: int | None
) -> SentenceTransformer:
    """Load for inference, the encoder in `dtype` and all that follows (pooling, normalisation) in float32.

    NeoBERT's hidden states reach 130: their sums overflow in float16 and lose the small dimensions in bfloat16.

    Args:
        path: folder or Hub name. A Transformers checkpoint gets mean pooling.
        max_length: tokens; a model with fewer positions keeps its own limit.
        truncate_dim: dimensions to keep (Matryoshka); all if None.
    """
    model = SentenceTransformer(path, device=device, truncate_dim=truncate_dim, model_kwargs={"dtype": dtype})
    limits = [limit for limit in (max_length, model.max_seq_length) if limit is not None]
    model.max_seq_length = min(limits, default=None)
    encoder, *others = model
    encoder.register_forward_hook(_to_float32)
    for module in others:
        module.float()
    return model.eval()


def _to_float32(module, args, features: dict) -> dict:
    return features | {"token_embeddings": features["token_embeddings"].float()}


def fingerprint(model: SentenceTransformer) -> str:
    """A hash of all that the embeddings depend on: weights, architecture, tokenizer, pooling and prompts.

    Names cannot tell models apart: local ones have none, and a folder may be trained on.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    config = model[0].auto_model.config.to_dict()
    # Where it lay and by what it was saved.
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)
    modules = [{"class": type(module).__name__} | module.get_config_dict() for module in model]
    settings = [config, modules, model.prompts, model.default_prompt_name, model.similarity_fn_name]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(model.tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()[:16]

"""A Sentence Transformers model as MTEB sees it.

MTEB's own wrapper looks prompts up by rules that drop some (the key `CQADupstackRetrieval` reaches none of its 12
parts, and a local task's key is refused) and spread others (a task's key prompts documents, too). Here each task has
one instruction, and where a task has queries, the instruction stands before queries only.
"""

from typing import Any

import numpy as np
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from neobert_hf.embeddings.inference import check_finite


class InstructionEncoder(AbsEncoder):
    """Encodes texts with the prompt of their task.

    Args:
        model: any, fine-tuned or not.
        name: of the model in MTEB's results.
        prompts: what stands before the texts of each task, by the task's name. If None, the prompts that the model was
            saved with are used.
    """

    def __init__(self, model: SentenceTransformer, name: str, prompts: dict[str, str] | None):
        self.model = model
        self.prompts = prompts
        self.mteb_model_meta = ModelMeta.create_empty(
            {"name": name, "similarity_fn_name": ScoringFunction.from_str(model.similarity_fn_name)}
        )

    def prompt(self, task: str, prompt_type: PromptType | None) -> str | None:
        """What stands before the texts of a task; None leaves it to the model."""
        if self.prompts is None:
            return None
        # An empty prompt, unlike None, also keeps the model's own away.
        return "" if prompt_type == PromptType.document else self.prompts[task]

    def encode(self, inputs, *, task_metadata, prompt_type: PromptType | None = None, **kwargs: Any) -> np.ndarray:
        """Embeddings (texts, dimension) of batches of texts, as MTEB asks for them, whatever their split or subset."""
        del kwargs["hf_split"], kwargs["hf_subset"]
        methods = {PromptType.query: self.model.encode_query, PromptType.document: self.model.encode_document}
        encode = methods.get(prompt_type, self.model.encode)
        texts = [text for batch in inputs for text in batch["text"]]
        embeddings = encode(texts, prompt=self.prompt(task_metadata.name, prompt_type), **kwargs)
        check_finite(embeddings, texts)
        return embeddings

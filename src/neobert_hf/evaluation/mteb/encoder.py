"""A Sentence Transformers model as MTEB needs it: the prompts of its tasks and, for contextual models, their contexts.

MTEB's own wrapper looks prompts up by rules that drop some (the key `CQADupstackRetrieval` applies to none of its 12
parts, and a local task's key is refused) and apply others too widely (a task's key also prompts documents). Here a task
has one instruction, put before queries only if the task has queries, or else the model's own prompts.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from mteb.abstasks import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from neobert_hf.contextual.model import embed_context
from neobert_hf.embeddings.models import check_finite, is_contextual
from neobert_hf.embeddings.prompts import prompt_of


# Types whose texts are queries and documents. The texts of other types are all of one kind.
TYPES_WITH_QUERIES = ("Retrieval", "Reranking")
# For each text of a context, this many texts of a large corpus are loaded: some may be equal or empty.
LOOKED_AT = 20


def parts_of(task: AbsTask) -> list[AbsTask]:
    """The tasks that are evaluated for a task: its parts (12 of CQADupstackRetrieval), or the task itself."""
    return task.metadata.tasks if isinstance(task, AbsTaskAggregate) else [task]


class InstructionEncoder(AbsEncoder):
    """Encodes texts with the prompt of their task.

    Args:
        model: any model, fine-tuned or not.
        name: name of the model in MTEB's results.
        prompts: for a task, the prompt for `query` and `document`; a task without queries has the first before all its
            texts. Tasks that are not named get the prompts that the model was saved with.
        tasks: those to evaluate on; a contextual model makes its context from the corpus of a task.
    """

    def __init__(
        self, model: SentenceTransformer, name: str, prompts: dict[str, dict[str, str]], tasks: Iterable[AbsTask] = ()
    ):
        self.model = model
        self.prompts = prompts
        self.tasks = {part.metadata.name: part for task in tasks for part in parts_of(task)}
        # The context that a contextual model was given last, by task and subset.
        self.context: dict[tuple[str, str], torch.Tensor] = {}
        self.mteb_model_meta = ModelMeta.create_empty(
            {"name": name, "similarity_fn_name": ScoringFunction.from_str(model.similarity_fn_name)}
        )

    def prompt(self, task: str, prompt_type: PromptType | None) -> str | None:
        """The prompt for texts of a task; None leaves the choice to the model."""
        is_document, own = prompt_type == PromptType.document, self.model.prompts
        if task in self.prompts:
            # An empty prompt, unlike None, also suppresses the model's own prompt.
            return self.prompts[task]["document" if is_document else "query"]
        if task in own:
            # The model was trained on a dataset of this name. Without a prompt for its documents, they get that of all.
            return own.get(f"{task}-document", prompt_of(self.model, "document")) if is_document else own[task]
        return prompt_of(self.model, prompt_type.value) if prompt_type else None

    def prompts_of(self, task: TaskMetadata) -> dict[str, str]:
        """The prompts for the texts of a task, by their kind, as information in the result file."""
        if task.type in TYPES_WITH_QUERIES:
            return {kind.value: self.prompt(task.name, kind) for kind in PromptType}
        prompt = self.prompt(task.name, None)
        return {"text": self.model.prompts.get(self.model.default_prompt_name, "") if prompt is None else prompt}

    def context_of(
        self, task: TaskMetadata, subset: str, split: str, texts: list[str], batch_size: int
    ) -> torch.Tensor:
        """The context of a subset of a task, made when it is first asked for. That of another task is forgotten.

        It is drawn from the corpus, or in a task without one from the first texts that are encoded (no label is used):
        those that a classifier learns from, or the evaluated ones.
        """
        if (task.name, subset) not in self.context:
            kind = None
            if task.type in TYPES_WITH_QUERIES:
                kind = PromptType.document
                corpus = self.tasks[task.name].dataset[subset][split]["corpus"]
                count = min(len(corpus), LOOKED_AT * self.model[0].model.config.context_size)
                rows = corpus.select(sorted(random.Random(0).sample(range(len(corpus)), count)))
                # As MTEB joins them.
                texts = [f"{row.get('title') or ''} {row['text']}".strip() for row in rows]
            prompt = self.prompt(task.name, kind) or ""
            context = embed_context(self.model, texts, seed=0, prompt=prompt, batch_size=batch_size)
            self.context = {(task.name, subset): context}
        return self.context[task.name, subset]

    def encode(
        self, inputs, *, task_metadata, hf_subset, hf_split, prompt_type: PromptType | None = None, **kwargs: Any
    ) -> np.ndarray:
        """Embeddings (texts, dimension) of batches of texts, called by MTEB."""
        texts = [text for batch in inputs for text in batch["text"]]
        if is_contextual(self.model):
            batch_size = kwargs.get("batch_size", 32)
            kwargs["dataset_embeddings"] = self.context_of(task_metadata, hf_subset, hf_split, texts, batch_size)
        methods = {PromptType.query: self.model.encode_query, PromptType.document: self.model.encode_document}
        encode = methods.get(prompt_type, self.model.encode)
        embeddings = encode(texts, prompt=self.prompt(task_metadata.name, prompt_type), **kwargs)
        check_finite(embeddings, texts)
        return embeddings

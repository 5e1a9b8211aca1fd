"""A Sentence Transformers model as MTEB needs it.

MTEB's own wrapper looks prompts up by rules that drop some (the key `CQADupstackRetrieval` applies to none of its 12
parts, and a local task's key is refused) and apply others too widely (a task's key also prompts documents). Here a task
has one instruction, put before queries only if the task has queries, or else the model's own prompts.
"""

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

from neobert_hf.embeddings.contextual import embed_context
from neobert_hf.embeddings.inference import check_finite, is_contextual
from neobert_hf.embeddings.prompts import PROMPT_NAMES, note_on_prompt, prompt_of
from neobert_hf.evaluation.mteb.contexts import SEED, context_texts, source_of


# Types whose texts are queries and documents. The texts of other types are all of one kind.
TYPES_WITH_QUERIES = ("Retrieval", "Reranking", "InstructionRetrieval", "InstructionReranking")


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
        tasks: a contextual model makes the context of a task from its texts, before anything of it is encoded.
    """

    def __init__(
        self, model: SentenceTransformer, name: str, prompts: dict[str, dict[str, str]], tasks: Iterable[AbsTask] = ()
    ):
        self.model = model
        self.prompts = prompts
        self.tasks = {task.metadata.name: task for task in tasks}
        self.parts = {part.metadata.name: part for task in tasks for part in parts_of(task) if part is not task}
        # The context that a contextual model was given last, by task and subset.
        self.context: dict[tuple[str, str], torch.Tensor] = {}
        self.mteb_model_meta = ModelMeta.create_empty(
            {"name": name, "similarity_fn_name": ScoringFunction.from_str(model.similarity_fn_name)}
        )

    def prompt(self, task: str, prompt_type: PromptType | None) -> str | None:
        """The prompt for texts of a task; None leaves the choice to the model."""
        if task in self.prompts:
            # An empty prompt, unlike None, also suppresses the model's own prompt.
            return self.prompts[task]["document" if prompt_type == PromptType.document else "query"]
        return self.own_prompt(task, prompt_type)

    def own_prompt(self, task: str, prompt_type: PromptType | None) -> str | None:
        """The prompt that the model was saved with for such texts: that of the task's name, if it has one."""
        if task not in PROMPT_NAMES and task in self.model.prompts:
            # If the model has no prompt for this task's documents, they get its prompt for all documents.
            document = self.model.prompts.get(f"{task}-document", prompt_of(self.model, "document"))
            return document if prompt_type == PromptType.document else self.model.prompts[task]
        return prompt_of(self.model, prompt_type.value) if prompt_type else None

    def prompts_of(self, task: TaskMetadata) -> dict[str, str]:
        """The prompts for the texts of a task, by their kind, as information in the result file."""
        if task.type in TYPES_WITH_QUERIES:
            return {kind.value: self.prompt(task.name, kind) for kind in PromptType}
        prompt = self.prompt(task.name, None)
        return {"text": self.model.prompts.get(self.model.default_prompt_name, "") if prompt is None else prompt}

    def note(self, tasks: list[TaskMetadata]) -> str:
        """A line on the tasks that get another prompt than the model's own; empty if there are none."""
        notes = []
        for task in tasks:
            for kind in PromptType if task.type in TYPES_WITH_QUERIES else (None,):
                who = f"{task.name} ({kind.value if kind else 'text'}) gets"
                prompt, own = (find(task.name, kind) or "" for find in (self.prompt, self.own_prompt))
                if note := note_on_prompt(self.model, who, prompt, own):
                    notes.append(note)
                    break
        return f"{notes[0]} {len(notes)} of {len(tasks)} tasks get a prompt that is not the model's." if notes else ""

    def context_settings(self, task: AbsTask) -> dict[str, Any] | None:
        """What the contexts of a task depend on besides its data; None for a model that has none."""
        if not is_contextual(self.model):
            return None
        # In a task without documents, all texts have the same prompt.
        kind = PromptType.document if task.metadata.type in TYPES_WITH_QUERIES else None
        size = self.model[0].model.config.context_size
        prompt = self.prompt(task.metadata.name, kind) or ""
        return {"seed": SEED, "size": size, "source": source_of(task), "prompt": prompt}

    def context_of(self, name: str, subset: str, batch_size: int) -> torch.Tensor:
        """The context of a subset of a task, made when it is first asked for. That of another task is forgotten."""
        if (name, subset) not in self.context:
            task = self.tasks.get(name) or self.parts[name]
            settings = self.context_settings(task)
            texts = context_texts(task, subset, settings["size"])
            context = embed_context(self.model, texts, settings["seed"], settings["prompt"], batch_size=batch_size)
            self.context = {(name, subset): context}
        return self.context[name, subset]

    def encode(self, inputs, *, task_metadata, prompt_type: PromptType | None = None, **kwargs: Any) -> np.ndarray:
        """Embeddings (texts, dimension) of batches of texts, called by MTEB; the split makes no difference."""
        subset = kwargs.pop("hf_subset")
        del kwargs["hf_split"]
        if is_contextual(self.model):
            kwargs["dataset_embeddings"] = self.context_of(task_metadata.name, subset, kwargs.get("batch_size", 32))
        methods = {PromptType.query: self.model.encode_query, PromptType.document: self.model.encode_document}
        encode = methods.get(prompt_type, self.model.encode)
        texts = [text for batch in inputs for text in batch["text"]]
        embeddings = encode(texts, prompt=self.prompt(task_metadata.name, prompt_type), **kwargs)
        check_finite(embeddings, texts)
        return embeddings

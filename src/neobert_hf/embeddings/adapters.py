"""LoRA of embedding models and rerankers; see `training/adapters.py`."""

from sentence_transformers import CrossEncoder
from sentence_transformers.base.model import BaseModel

from neobert_hf.embeddings.recipe import Run
from neobert_hf.training.adapters import add_adapters


def add_lora(model: BaseModel, run: Run) -> None:
    """Freeze a model and add adapters to its linear layers, if the run trains adapters.

    A reranker's head is new, so all of its weights are trained.
    """
    settings = run.settings
    if settings.lora_rank is None:
        return
    add_adapters(model.transformers_model, settings, run.arguments.seed, with_head=isinstance(model, CrossEncoder))

"""LoRA of embedding models and rerankers; see `training/adapters.py`."""

from sentence_transformers import CrossEncoder
from sentence_transformers.base.model import BaseModel

from neobert_hf.embeddings.recipe import Run
from neobert_hf.training.adapters import Lora, add_adapters, load_adapters


def add_lora(model: BaseModel, run: Run) -> None:
    """Freeze a model and add adapters to its linear layers, if the run trains such.

    A reranker's head is new and trained as a whole. Of a finished run the adapters come from its last checkpoint.
    """
    settings = run.settings
    if settings.lora_rank is None:
        return
    with_head = isinstance(model, CrossEncoder)
    lora = Lora(settings.lora_rank, settings.lora_alpha, settings.lora_dropout, with_head)
    add_adapters(model.transformers_model, lora, run.arguments.seed)
    if run.finished:
        load_adapters(model.transformers_model, run.checkpoint)

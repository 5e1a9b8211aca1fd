"""LoRA (https://arxiv.org/abs/2106.09685): beside each frozen matrix two small ones are trained, then merged.

Gradients and the optimizer's moments take three times the memory of the weights that are trained. Where those are a
hundredth of all, a model fits that could not be trained as a whole. A checkpoint holds the small matrices alone. What a
run leaves as `model/` is merged: a plain model, as after any other training.
"""

from pathlib import Path

from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.model import BaseModel
from torch import nn
from transformers import set_seed

from neobert_hf.embeddings.recipe import Run
from neobert_hf.training.run_checkpoints import CheckpointError


# The weight, its gradient and the two moments of AdamW, all in float32.
FROZEN_BYTES, TRAINED_BYTES = 4, 16


def add_lora(model: BaseModel, run: Run) -> None:
    """Freeze a model and add adapters to its linear layers, if the run trains such.

    A reranker's head is new and trained as a whole. Of a finished run the adapters come from its last checkpoint.
    """
    settings = run.settings
    if settings.lora_rank is None:
        return
    from peft import LoraConfig

    encoder = model.transformers_model
    # The new matrices depend on the seed alone, and not on what was drawn before.
    set_seed(run.arguments.seed)
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        lora_dropout=settings.lora_dropout or 0.0,
        target_modules=linear_layers(encoder),
        modules_to_save=head_modules(encoder) if isinstance(model, CrossEncoder) else None,
    )
    model.add_adapter(config)
    if run.finished:
        load_adapter(model, run.checkpoint)


def linear_layers(encoder: nn.Module) -> list[str]:
    """The linear layers of the encoder's blocks: `qkv`, `wo`, `w12` and `w3` of every one, in a NeoBERT."""
    blocks = tuple(f"{name}." for name, module in encoder.named_modules() if isinstance(module, nn.ModuleList))
    layers = [
        name for name, module in encoder.named_modules() if isinstance(module, nn.Linear) and name.startswith(blocks)
    ]
    if not layers:
        raise ValueError(f"{type(encoder).__name__} has no linear layers in blocks: leave `lora_rank` out.")
    return layers


def head_modules(encoder: nn.Module) -> list[str]:
    """What a classifier has on top of its encoder, and the encoder's pooler, which is as new or of another task."""
    children = [
        name
        for name, module in encoder.named_children()
        if name != encoder.base_model_prefix and any(True for _ in module.parameters())
    ]
    return [*children, "pooler"] if getattr(encoder.base_model, "pooler", None) is not None else children


def load_adapter(model: BaseModel, checkpoint: Path) -> None:
    """Take over the adapters of a checkpoint.

    Raises:
        CheckpointError: if it holds other ones than the model has.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    encoder = model.transformers_model
    file = checkpoint / "adapter_model.safetensors"
    weights = {name.removeprefix("base_model.model."): weight for name, weight in load_file(file).items()}
    if differing := weights.keys() ^ get_peft_model_state_dict(encoder).keys():
        raise CheckpointError(
            f"{file} holds other adapters than the model has: {min(differing)} is in one of them only."
        )
    set_peft_model_state_dict(encoder, weights)


def merge_lora(model: BaseModel) -> None:
    """Add the adapters to the weights beside them, so that a plain model is left."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    encoder = model.transformers_model
    for name, module in list(encoder.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            encoder.set_submodule(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            encoder.set_submodule(name, module.modules_to_save[module.active_adapter])
    # Otherwise Transformers would still save adapters.
    encoder.delete_adapter("default")


def describe_lora(model: BaseModel) -> str:
    """How much is trained in place of all weights, and what memory that takes beside what the texts of a batch take."""
    parameters = list(model.named_parameters())
    trained = sum(weight.numel() for _, weight in parameters if weight.requires_grad)
    frozen = sum(weight.numel() for _, weight in parameters if not weight.requires_grad)
    added = (".lora_", ".modules_to_save.")
    plain = sum(weight.numel() for name, weight in parameters if not any(mark in name for mark in added))
    memory, before = FROZEN_BYTES * frozen + TRAINED_BYTES * trained, TRAINED_BYTES * plain
    return (
        f"LoRA: {trained:,} parameters are trained in place of {plain:,}; weights, gradients and AdamW's moments take "
        f"{memory / 1e6:,.1f} MB in place of {before / 1e6:,.1f} MB"
    )

"""LoRA (https://arxiv.org/abs/2106.09685): two small matrices are trained beside each frozen one, then merged into it.

Gradients and the optimizer's moments take three times the memory of the trained weights. If only a hundredth of all
weights is trained, a model may fit into memory that is too large to be trained as a whole. A checkpoint holds only the
small matrices. The `model/` that a run writes at its end is merged: a plain model, as after any other training.
"""

from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, set_seed

from neobert_hf.training.run_checkpoints import CheckpointError


# Per parameter: the weight alone; or the weight, its gradient and the two moments of AdamW. All are float32.
FROZEN_BYTES, TRAINED_BYTES = 4, 16


@dataclass
class LoraArguments:
    """Whether small matrices are trained in place of all weights, and which ones. Recipes' settings inherit from it."""

    lora_rank: int | None = field(
        default=None, metadata={"help": "train adapters of this rank in the linear layers of the blocks (LoRA)"}
    )
    lora_alpha: float | None = field(
        default=None, metadata={"help": "scale of the adapters' output: this over `lora_rank`; twice the rank if unset"}
    )
    lora_dropout: float | None = field(
        default=None, metadata={"help": "dropout on the input of the adapters; none if unset"}
    )

    def __post_init__(self):
        if self.lora_rank is None and (self.lora_alpha, self.lora_dropout) != (None, None):
            raise ValueError("`lora_alpha` and `lora_dropout` are of no use without `lora_rank`: set it as well.")


def add_adapters(model: PreTrainedModel, settings: LoraArguments, seed: int, with_head: bool = True) -> None:
    """Freeze an encoder and add adapters to its linear layers. Their initial weights depend only on the seed.

    Args:
        with_head: also train all weights of the head, which is new.

    Raises:
        ValueError: if the rank is above that of a weight, so that an adapter would be larger than what it replaces.
    """
    from peft import LoraConfig

    layers = linear_layers(model)
    smallest = min(min(model.get_submodule(name).weight.shape) for name in layers)
    if settings.lora_rank > smallest:
        raise ValueError(
            f"`lora_rank` is {settings.lora_rank}; the smallest weight that gets an adapter has the rank {smallest}: "
            "give that or less, or leave `lora_rank` out to train all weights."
        )
    # Otherwise the adapters would depend on the random numbers drawn before.
    set_seed(seed)
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        lora_dropout=settings.lora_dropout or 0.0,
        target_modules=layers,
        modules_to_save=head_modules(model) if with_head else None,
    )
    model.add_adapter(config)


def linear_layers(encoder: nn.Module) -> list[str]:
    """The names of the linear layers in the encoder's blocks; in a NeoBERT, `qkv`, `wo`, `w12` and `w3` of each."""
    blocks = tuple(f"{name}." for name, module in encoder.named_modules() if isinstance(module, nn.ModuleList))
    layers = [
        name for name, module in encoder.named_modules() if isinstance(module, nn.Linear) and name.startswith(blocks)
    ]
    if not layers:
        raise ValueError(f"{type(encoder).__name__} has no linear layers in blocks: leave `lora_rank` out.")
    return layers


def head_modules(encoder: nn.Module) -> list[str]:
    """The modules of a classifier on top of its encoder, and the encoder's pooler, which is new or of another task."""
    children = [
        name
        for name, module in encoder.named_children()
        if name != encoder.base_model_prefix and any(True for _ in module.parameters())
    ]
    return [*children, "pooler"] if getattr(encoder.base_model, "pooler", None) is not None else children


def load_adapters(model: PreTrainedModel, checkpoint: Path) -> None:
    """Load the adapters of a checkpoint.

    Raises:
        CheckpointError: if it holds other adapters than the model has.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    file = checkpoint / "adapter_model.safetensors"
    weights = {name.removeprefix("base_model.model."): weight for name, weight in load_file(file).items()}
    if differing := weights.keys() ^ get_peft_model_state_dict(model).keys():
        raise CheckpointError(
            f"{file} holds other adapters than the model has: {min(differing)} is in one of them only."
        )
    set_peft_model_state_dict(model, weights)


def merge_adapters(model: PreTrainedModel) -> None:
    """Merge the adapters into the weights beside them, so that a plain model remains."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            model.set_submodule(name, module.modules_to_save[module.active_adapter])
    # Without this, Transformers would still save adapters.
    model.delete_adapter("default")


def describe_adapters(model: nn.Module) -> str:
    """How many parameters are trained in place of all, and the memory that this takes, not counting a batch's texts."""
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

"""LoRA (https://arxiv.org/abs/2106.09685): two small matrices are trained beside each frozen one, then merged into it.

Gradients and the optimizer's moments take three times the memory of the trained weights, so a model that is too large
to be trained as a whole may fit. A checkpoint holds only the small matrices. The `model/` that a run writes at its end
is merged: a plain model, as after any other training.
"""

from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, set_seed

from neobert_hf.common.settings import check_numbers


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
        check_numbers(
            self, {"lora_rank": "1 or more", "lora_alpha": "above 0", "lora_dropout": "0 or more and below 1"}
        )
        if self.lora_rank is None and (self.lora_alpha, self.lora_dropout) != (None, None):
            raise ValueError("`lora_alpha` and `lora_dropout` are of no use without `lora_rank`: set it as well.")


def add_adapters(model: PreTrainedModel, settings: LoraArguments, seed: int, with_head: bool = True) -> None:
    """Freeze an encoder and add adapters to its linear layers. Their initial weights depend only on the seed.

    Args:
        with_head: also train all weights of the head, which is new.
    """
    from peft import LoraConfig

    # Otherwise the adapters would depend on the random numbers drawn before.
    set_seed(seed)
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        lora_dropout=settings.lora_dropout or 0.0,
        target_modules=linear_layers(model),
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
    """Load the adapters of a checkpoint into a model that has the same ones."""
    from peft import set_peft_model_state_dict

    weights = load_file(checkpoint / "adapter_model.safetensors")
    set_peft_model_state_dict(
        model, {name.removeprefix("base_model.model."): weight for name, weight in weights.items()}
    )


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
    """How many parameters are trained."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return f"LoRA: {trained:,} of {sum(weight.numel() for weight in model.parameters()):,} parameters are trained"

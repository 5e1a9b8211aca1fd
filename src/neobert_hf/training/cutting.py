"""Pruning: cut a smaller NeoBERT out of a larger one by removing the layers and MLP units that matter least on text.

Layers are dropped one at a time. Each time, the layer is dropped whose removal increases the measured value least, and
then all remaining layers are measured again (SLEB, Song et al. 2024, arXiv 2402.09025). If two layers do the same work,
either of them can be dropped, but not both. Methods that measure every layer only once, such as by the angle between
the hidden states before and after it (ShortGPT, Men et al. 2024, arXiv 2403.03853), do not notice that. Halving L
layers takes 3/8 L * L measurements.

Units of SwiGLU are ranked by how much they add on average: |silu(gate) * up| times the norm of their column in the
output matrix (activations times weights as in Wanda, Sun et al. 2023, arXiv 2306.11695; whole units by their
activations as in Minitron, Muralidharan et al. 2024, arXiv 2407.14679).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import nn

from neobert_hf.common.report import Line, Panel, markdown_table
from neobert_hf.common.settings import Count, Range, RangedSettings
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.modeling_neobert import NeoBERTPreTrainedModel, swiglu_width


@dataclass(kw_only=True)
class CutSettings(RangedSettings):
    """How large the smaller model is."""

    num_hidden_layers: Count | None = field(default=None, metadata={"help": "layers to keep; all if unset"})
    intermediate_size: Annotated[int, Range(2)] | None = field(
        default=None, metadata={"help": "width of the MLP (SwiGLU uses two thirds of it); unchanged if unset"}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.num_hidden_layers is None and self.intermediate_size is None:
            raise ValueError("`num_hidden_layers` and `intermediate_size` are both unset: set one of them, or both.")

    def sizes(self, config: NeoBERTConfig) -> dict[str, int]:
        """Both settings; one that is not given takes the value of the large model.

        Raises:
            ValueError: if a setting is larger than in the large model, or its MLP is not SwiGLU and cannot be cut.
        """
        given = {name: getattr(self, name) for name in ("num_hidden_layers", "intermediate_size")}
        for name, wanted in given.items():
            if wanted is not None and wanted > (has := getattr(config, name)):
                raise ValueError(f"`{name}` is {wanted:,}; it must be at most that of the large model, {has:,}.")
        if self.intermediate_size is not None and config.hidden_act != "swiglu":
            raise ValueError(
                f"`intermediate_size` is {self.intermediate_size:,}, but the model has `hidden_act` "
                f"{config.hidden_act!r}, and only SwiGLU can be cut. Leave `intermediate_size` out."
            )
        return {name: wanted or getattr(config, name) for name, wanted in given.items()}


@dataclass
class Cut:
    """What was removed, and the measurements that decided it.

    Args:
        measured: what was measured, in words.
        whole: the measured value for the large model.
        rounds: the values without each layer, one list for each layer that was dropped; None for layers already gone.
        layers: the numbers of the remaining layers in the large model.
        widths: the number of units in an MLP before and after.
        norms_cut: for each remaining layer, the share of the removed units in what all units add.
    """

    measured: str
    whole: float
    rounds: list[list[float | None]]
    layers: list[int]
    widths: tuple[int, int]
    norms_cut: list[float]

    def lines(self) -> list[str]:
        """The table of a report: every layer, and what became of it."""
        dropped = {number: (turn, low) for turn, (number, low) in enumerate(map(_lowest, self.rounds), 1)}
        norms = dict(zip(self.layers, self.norms_cut))
        rows = []
        for number in range(len(self.layers) + len(dropped)):
            alone = f"{self.rounds[0][number] - self.whole:+.4f}" if self.rounds else ""
            turn, low = dropped.get(number, ("", None))
            together = "" if low is None else f"{low - self.whole:+.4f}"
            rows.append([number, alone, turn, together, "" if low is not None else f"{norms[number]:.1%}"])
        head = ["Layer", "Rise without it alone", "Order of dropping", "Rise without it and those dropped before"]
        return [
            f"A rise is the increase of {self.measured}, which is {self.whole:.4f} in the whole model. Of the "
            f"{self.widths[0]:,} units of each MLP, {self.widths[1]:,} are left.",
            "",
            *markdown_table([*head, "Share of the cut units in what all add"], rows),
        ]

    def panel(self) -> Panel:
        """The plot of a report: what every layer adds."""
        before = [self.whole, *(_lowest(found)[1] for found in self.rounds)]
        alone = [(number, value - self.whole) for number, value in enumerate(self.rounds[0] if self.rounds else [])]
        dropped = [(number, low - last) for (number, low), last in zip(map(_lowest, self.rounds), before)]
        lines = [
            Line(alone, "without it alone", {"marker": "o"}),
            Line(dropped, "when it was dropped", {"marker": "x", "markersize": 7, "linestyle": "none"}),
        ]
        return Panel(lines, {"xlabel": "layer", "ylabel": f"rise of {self.measured}", "title": "what each layer adds"})


def _lowest(found: list[float | None]) -> tuple[int, float]:
    """The layer without which the value is lowest, and that value."""
    return min(((number, value) for number, value in enumerate(found) if value is not None), key=lambda pair: pair[1])


def cut_model(model: NeoBERTPreTrainedModel, sizes: dict[str, int], measured: str, measure: Callable[[], float]) -> Cut:
    """Cut a model, in place: first layers, then the units that matter least in the remaining layers.

    Args:
        sizes: from `CutSettings.sizes`.
        measured: what `measure` returns, in words.
        measure: runs the model on text and returns a value; the lower, the better.

    Raises:
        FloatingPointError: if a measured value is not finite.
    """
    whole = measure()
    layers, rounds = drop_layers(model, sizes["num_hidden_layers"], measure)
    if not all(math.isfinite(value) for found in ([whole], *rounds) for value in found if value is not None):
        raise FloatingPointError(
            f"{measured} is not finite on this text; the model may be damaged: check it with neobert-hf doctor."
        )
    config = model.config
    if config.hidden_act != "swiglu":
        return Cut(measured, whole, rounds, layers, (config.intermediate_size,) * 2, [0.0] * len(layers))
    before = swiglu_width(config)
    # The cut model's config will have this value, so the width is computed from it.
    config.intermediate_size = sizes["intermediate_size"]
    norms = cut_units(model, swiglu_width(config), measure)
    return Cut(measured, whole, rounds, layers, (before, swiglu_width(config)), norms)


def drop_layers(
    model: NeoBERTPreTrainedModel, keep: int, measure: Callable[[], float]
) -> tuple[list[int], list[list[float | None]]]:
    """Drop layers one at a time; returns `layers` and `rounds` of a `Cut`."""
    encoder = model.base_model
    blocks, left, rounds = list(encoder.transformer_encoder), list(range(len(encoder.transformer_encoder))), []

    def use(numbers: list[int]) -> None:
        encoder.transformer_encoder = nn.ModuleList(blocks[number] for number in numbers)

    while len(left) > keep:
        found: list[float | None] = [None] * len(blocks)
        for number in left:
            use([other for other in left if other != number])
            found[number] = measure()
        left.remove(_lowest(found)[0])
        rounds.append(found)
    use(left)
    model.config.num_hidden_layers = len(left)
    return left, rounds


@torch.no_grad()
def cut_units(model: NeoBERTPreTrainedModel, width: int, measure: Callable[[], float]) -> list[float]:
    """Keep the `width` units of every SwiGLU that add most; returns `norms_cut` of a `Cut`."""
    mlps = [block.ffn for block in model.base_model.transformer_encoder]
    sums = {}

    def add(output: nn.Linear, inputs: tuple[torch.Tensor]) -> None:
        sums[output] = sums.get(output, 0) + inputs[0].abs().flatten(0, -2).double().sum(0)

    hooks = [mlp.w3.register_forward_pre_hook(add) for mlp in mlps]
    measure()
    for hook in hooks:
        hook.remove()
    cut_off = []
    for mlp in mlps:
        norms = sums[mlp.w3] * mlp.w3.weight.double().norm(dim=0)
        kept = norms.topk(width).indices.sort().values
        cut_off.append(1 - (norms[kept].sum() / norms.sum()).item())
        mlp.w12.weight = nn.Parameter(torch.cat([half[kept] for half in mlp.w12.weight.chunk(2)]))
        mlp.w3.weight = nn.Parameter(mlp.w3.weight[:, kept].contiguous())
        mlp.w12.out_features, mlp.w3.in_features = 2 * width, width
    return cut_off

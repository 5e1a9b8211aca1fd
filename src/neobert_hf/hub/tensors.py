"""Checks of a checkpoint's tensors against its config."""

from collections.abc import Iterable

import torch

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    NeoBERTPreTrainedModel,
)
from neobert_hf.modeling_neobert import TASK_HEADS


# The names of the classes in the original code.
ORIGINAL_CLASSES = {
    "NeoBERT": NeoBERTModel,
    "NeoBERTLMHead": NeoBERTForMaskedLM,
    "NeoBERTForSequenceClassification": NeoBERTForSequenceClassification,
}
# The class of each set of modules on top of the backbone. Multiple choice has those of sequence classification.
CLASS_OF_HEADS = {
    frozenset(): NeoBERTModel,
    frozenset({"decoder"}): NeoBERTForMaskedLM,
    frozenset({"dense", "classifier"}): NeoBERTForSequenceClassification,
    frozenset({"classifier"}): NeoBERTForTokenClassification,
    frozenset({"qa_outputs"}): NeoBERTForQuestionAnswering,
}
# The classes that `architectures` in a config may name.
CLASSES = {cls.__name__: cls for cls in (*CLASS_OF_HEADS.values(), NeoBERTForMultipleChoice)} | ORIGINAL_CLASSES


def class_of_tensors(names: Iterable[str]) -> type[NeoBERTPreTrainedModel]:
    """The class that has the heads found among the tensors.

    Raises:
        ValueError: if no class has these heads.
    """
    names = list(names)
    heads = frozenset(name.split(".")[0] for name in names) & {"decoder", *TASK_HEADS}
    if not heads and any(name.startswith("model.") for name in names):
        # A backbone alone has no prefix. This one has, so its head is missing; assume the decoder.
        heads = frozenset({"decoder"})
    if heads not in CLASS_OF_HEADS:
        known = "; ".join(" + ".join(sorted(heads)) for heads in CLASS_OF_HEADS if heads)
        raise ValueError(
            f"No class has the heads {' + '.join(sorted(heads))}; the known combinations are {known}, or no head."
        )
    return CLASS_OF_HEADS[heads]


def tensor_problems(
    tensors: dict[str, torch.Tensor], cls: type[NeoBERTPreTrainedModel], config: NeoBERTConfig
) -> list[str]:
    """Problems with names, shapes, dtypes and values; empty if there are none."""
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
    if config.tie_word_embeddings and "decoder.weight" not in tensors:
        expected.pop("decoder.weight", None)
    known = {name: tensor for name, tensor in tensors.items() if name in expected}
    shapes = {name: tuple(tensor.shape) for name, tensor in known.items()}
    dtypes = [tensor.dtype for tensor in known.values()]
    usual = max(set(dtypes), key=dtypes.count, default=torch.float32)
    if usual not in (torch.float32, torch.bfloat16, torch.float16):
        return [f"dtype {usual}; it must be float32, bfloat16 or float16"]
    kinds = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - expected.keys()),
        "of another shape": [
            f"{name} {shape} instead of {expected[name]}" for name, shape in shapes.items() if shape != expected[name]
        ],
        f"of another dtype than {usual}": [f"{name} {x.dtype}" for name, x in known.items() if x.dtype != usual],
    }
    for name, tensor in known.items():
        if not tensor.isfinite().all():
            kinds.setdefault("not finite", []).append(name)
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def is_rotary_table(name: str) -> bool:
    """Whether a tensor is the rotary table of the original code, which some versions may store."""
    return name.split(".")[-1] == "freqs_cis"


def stored_table_problems(tensors: dict[str, torch.Tensor], config: NeoBERTConfig) -> list[str]:
    """Problems with rotary tables among the tensors: (positions, dim_head / 2), complex or as real pairs.

    Such a table must hold exp(i position theta^(-2j / dim_head)), which is computed here in float64.

    References:
        https://arxiv.org/abs/2104.09864 (RoPE), section 3.2.2.
    """
    problems = []
    for name, table in tensors.items():
        if not is_rotary_table(name):
            continue
        if not table.is_complex() and table.shape[-1:] == (2,):
            table = torch.view_as_complex(table.float().contiguous())
        if not config.rope or not table.is_complex() or table.shape[1:] != (config.head_dim // 2,):
            problems.append(f"{name} {tuple(table.shape)} is not a rotary table of this config")
            continue
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(len(table))[:, None] * config.rope_parameters["rope_theta"] ** -exponents
        difference = (table - torch.polar(torch.ones_like(angles), angles)).abs().max().item()
        # In float32, an angle of p radians and its frequency each have a rounding error of up to p 2^-24.
        allowed = max(len(table) * 2**-22, 1e-5)
        # Written so that NaN is an error.
        if not difference <= allowed:
            problems.append(
                f"{name} differs by {difference:.1e} from the table of the config; rounding allows {allowed:.1e}"
            )
    return problems

"""Golden outputs: what a model gives for a text, stored beside its weights, so that a wrong load is noticed.

`golden.json`:

    {"text": "...", "input_ids": [101, ...],
     "outputs": {"last_hidden_state": {"shape": [1, 24, 768], "first": [0.12, ...], "norm": 412.5}, "logits": ...}}

`first` is the first eight values of an output, `norm` the norm of all. Everything is computed in float32 on a CPU with
`sdpa`. For a contextual model, the embeddings of both stages are recorded; the second stage gets a made-up context.
"""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from neobert_hf import NeoBERTContextualModel, NeoBERTForMultipleChoice, NeoBERTPreTrainedModel


GOLDEN_FILE = "golden.json"
TEXT = "Naïve cafés sold 1,024 teas & e=mc²!"
# A share of the largest recorded value. Float32 rounding differs between machines; damage is far larger.
TOLERANCE = 1e-4


def record_outputs(model: NeoBERTPreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The content of `golden.json`.

    Args:
        model: any NeoBERT class, in float32 on a CPU, in evaluation mode.
    """
    ids = tokenize(TEXT, model, tokenizer)
    return {"text": TEXT, "input_ids": ids, "outputs": describe_outputs(model, ids)}


def tokenize(text: str, model: NeoBERTPreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, truncation=True, max_length=model.config.max_length)["input_ids"]


def describe_outputs(model: NeoBERTPreTrainedModel, ids: list[int]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(output.shape), "first": output.flatten()[:8].tolist(), "norm": output.norm().item()}
        for name, output in compute_outputs(model, torch.tensor([ids])).items()
    }


@torch.no_grad()
def compute_outputs(model: NeoBERTPreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(model, NeoBERTContextualModel):
        stages = {"first_stage": None, "second_stage": made_context(model)}
        return {name: model(input_ids, dataset_embeddings=context).pooler_output for name, context in stages.items()}
    outputs = {"last_hidden_state": model.base_model(input_ids).last_hidden_state}
    if model.base_model is not model:
        choices = isinstance(model, NeoBERTForMultipleChoice)
        outputs |= dict(model(input_ids[None] if choices else input_ids))
    return outputs


def made_context(model: NeoBERTContextualModel) -> torch.Tensor:
    """An artificial context, (context_size, hidden_size)."""
    size = model.config.context_size, model.config.hidden_size
    return torch.linspace(-1, 1, size[0] * size[1]).view(size)


def compare_outputs(model: NeoBERTPreTrainedModel, tokenizer: PreTrainedTokenizerBase, golden: dict[str, Any]) -> float:
    """Compare what a loaded model gives with what was recorded.

    Returns:
        The largest difference, as a share of the output's largest recorded value.

    Raises:
        ValueError: naming the output that differs.
    """
    ids = tokenize(golden["text"], model, tokenizer)
    if ids != golden["input_ids"]:
        raise ValueError(f"the tokenizer gives {ids} for the recorded text instead of {golden['input_ids']}")
    largest = 0.0
    found = describe_outputs(model, ids)
    for name, recorded in golden["outputs"].items():
        if name not in found or found[name]["shape"] != recorded["shape"]:
            raise ValueError(f"the model has no output {name} of shape {recorded['shape']}, which was recorded")
        got, wanted = torch.tensor(found[name]["first"]), torch.tensor(recorded["first"])
        share = ((got - wanted).abs().max() / wanted.abs().max()).item()
        of_norm = abs(found[name]["norm"] / recorded["norm"] - 1)
        # Written so that NaN is an error.
        if not (share <= TOLERANCE and of_norm <= TOLERANCE):
            raise ValueError(
                f"{name} begins with {got[:4].tolist()} and has the norm {found[name]['norm']:.6g}; recorded were "
                f"{wanted[:4].tolist()} and {recorded['norm']:.6g}: weights or config are not those that were published"
            )
        largest = max(largest, share, of_norm)
    return largest

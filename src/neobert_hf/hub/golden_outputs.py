"""Golden outputs: what a model gives for a text, stored beside its weights, so that a wrong load is noticed.

`golden.json`:

    {"text": "...", "input_ids": [101, ...],
     "outputs": {"last_hidden_state": {"first": [0.12, ...], "norm": 412.5}, "logits": ...}}

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
    ids = tokenizer(TEXT, truncation=True, max_length=model.config.max_length)["input_ids"]
    outputs = {
        name: {"first": output.flatten()[:8].tolist(), "norm": output.norm().item()}
        for name, output in compute_outputs(model, torch.tensor([ids])).items()
    }
    return {"text": TEXT, "input_ids": ids, "outputs": outputs}


@torch.no_grad()
def compute_outputs(model: NeoBERTPreTrainedModel, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(model, NeoBERTContextualModel):
        size = model.config.context_size, model.config.hidden_size
        made_up = torch.linspace(-1, 1, size[0] * size[1]).view(size)
        stages = {"first_stage": None, "second_stage": made_up}
        return {name: model(input_ids, dataset_embeddings=context).pooler_output for name, context in stages.items()}
    outputs = {"last_hidden_state": model.base_model(input_ids).last_hidden_state}
    if model.base_model is not model:
        choices = isinstance(model, NeoBERTForMultipleChoice)
        outputs |= dict(model(input_ids[None] if choices else input_ids))
    return outputs


def compare_outputs(model: NeoBERTPreTrainedModel, tokenizer: PreTrainedTokenizerBase, golden: dict[str, Any]) -> float:
    """Compare what a loaded model gives with what was recorded.

    Returns:
        The largest difference, as a share of the output's largest recorded value.

    Raises:
        ValueError: naming the output that differs.
    """
    found = record_outputs(model, tokenizer)
    if found["input_ids"] != golden["input_ids"]:
        raise ValueError(
            f"the tokenizer gives {found['input_ids']} for {TEXT!r}; {golden['input_ids']} were recorded: it is not "
            "the tokenizer that was published"
        )
    largest = 0.0
    for name, recorded in golden["outputs"].items():
        got = found["outputs"][name]
        first, wanted = torch.tensor(got["first"]), torch.tensor(recorded["first"])
        difference = max((first - wanted).abs().max() / wanted.abs().max(), abs(got["norm"] / recorded["norm"] - 1))
        if not difference <= TOLERANCE:  # NaN is an error, too.
            raise ValueError(
                f"{name} differs by {difference:.1e} of what was recorded: weights or config are not those that were "
                "published"
            )
        largest = max(largest, float(difference))
    return largest

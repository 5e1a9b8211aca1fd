"""Golden outputs: a model's outputs for fixed ids, stored beside its weights, so that anybody can detect a wrong load.

`golden.json`:

    {"class": "NeoBERTForMaskedLM",
     "input_ids": [1, 17, ...],
     "outputs": {"last_hidden_state": {"shape": [1, 64, 768], "first": [...], "last": [...], "mean": 0.1, "rms": 1.2},
                 "logits": ...},
     "tolerance": 0.0001,
     "text": "...", "text_ids": [101, ...]}

`first` and `last` are the first eight values of the first and the last row of an output. `mean` and `rms` are over all
of its values. Everything is computed in float32 on a CPU with `sdpa`. `text` and its ids are there if a tokenizer was
given. For a contextual model, the embeddings of both stages are recorded; the second stage gets the artificial context
of `made_context`.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


GOLDEN_FILE = "golden.json"
TEXT = "NeoBERT is the most efficient model of its kind! Naïve cafés, 1,024 tokens & e=mc²."
LENGTH = 64
# The limit for the length of a list of ids or values in a file.
MOST_NUMBERS = 1024
# Relative to the largest recorded value of an output. Float32 rounding differs between machines; damage is far larger.
TOLERANCE = 1e-4


def record_outputs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, Any]:
    """Outputs of a model for ids spread over its vocabulary.

    Args:
        model: any NeoBERT class; it is not modified.
        tokenizer: if given, the ids of a text are recorded as well.

    Returns:
        The content of `golden.json`.
    """
    vocab_size, pad = model.config.vocab_size, model.config.pad_token_id
    length = min(LENGTH, model.config.max_length)
    ids = [index * vocab_size // length for index in range(length)]
    golden = {
        "class": type(model).__name__,
        "input_ids": [token if token != pad else (token + 1) % vocab_size for token in ids],
        "tolerance": TOLERANCE,
    }
    golden["outputs"] = {name: _describe(output) for name, output in _compute(model, golden["input_ids"]).items()}
    if tokenizer is not None:
        golden |= {"text": TEXT, "text_ids": tokenizer(TEXT)["input_ids"]}
    return golden


def compare_outputs(
    model: PreTrainedModel, golden: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> float:
    """Compare the outputs of a loaded model with the recorded ones.

    Args:
        model: a model of the recorded class, or the encoder alone; then only the hidden states are compared.
        golden: from `record_outputs` or `read_outputs`.
        tokenizer: if given, the ids of the recorded text are compared as well.

    Returns:
        The largest difference, as a share of the output's largest recorded value.

    Raises:
        ValueError: naming the output and the value that differ.
    """
    if tokenizer is not None and "text" in golden:
        ids, recorded_ids = tokenizer(golden["text"])["input_ids"], golden["text_ids"]
        if ids != recorded_ids:
            raise ValueError(f"the tokenizer gives wrong ids for the recorded text: {ids} instead of {recorded_ids}")
    differences = [0.0]
    for name, output in _compute(model, golden["input_ids"]).items():
        if name not in golden["outputs"]:
            raise ValueError(
                f"no `{name}` was recorded: the recorded model was a {golden['class']}, this is a "
                f"{type(model).__name__}"
            )
        differences.append(_compare(name, _describe(output), golden["outputs"][name], golden["tolerance"]))
    return max(differences)


def _compare(name: str, found: dict[str, Any], recorded: dict[str, Any], tolerance: float) -> float:
    """The largest difference between two descriptions of an output, as a share of the largest recorded value."""
    if found["shape"] != recorded["shape"]:
        raise ValueError(f"{name} has the shape {found['shape']}, but {recorded['shape']} was recorded")
    scale = torch.tensor([*recorded["first"], *recorded["last"], recorded["rms"]]).abs().max()
    largest = 0.0
    for part in ("first", "last", "mean", "rms"):
        difference = ((torch.tensor(found[part]) - torch.tensor(recorded[part])).abs().max() / scale).item()
        # Written so that NaN is an error.
        if not difference <= tolerance:
            raise ValueError(
                f"{name}: {part} is {found[part]}, but {recorded[part]} was recorded. They differ by {difference:.1e} "
                f"of the largest value, and {tolerance:.0e} is allowed: weights or config are not those of the "
                "recorded model"
            )
        largest = max(largest, difference)
    return largest


def read_outputs(file: Path) -> dict[str, Any]:
    """The content of `golden.json`; ValueError if it is not in the format above."""
    try:
        golden = json.loads(file.read_text(encoding="utf-8"))
        sound = _are_numbers(golden["input_ids"], int) and 0 < golden["tolerance"] <= 0.01 and golden["outputs"]
        sound = sound and all(_is_description(output) for output in golden["outputs"].values())
        sound = sound and isinstance(golden["class"], str)
        texts = "text" not in golden or (isinstance(golden["text"], str) and _are_numbers(golden["text_ids"], int))
        sound = sound and texts
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not in the format of golden outputs: {type(error).__name__}: {error}") from error
    if not sound:
        raise ValueError(f"{file} is not in the format of golden outputs, or its tolerance is above 0.01")
    return golden


def _is_description(output: dict[str, Any]) -> bool:
    rows = _are_numbers(output["first"]) and _are_numbers(output["last"])
    return _are_numbers(output["shape"], int) and rows and _are_numbers([output["mean"], output["rms"]])


def _are_numbers(values: Any, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Whether it is a short list of finite numbers: a file must not be able to start endless computations."""
    if not isinstance(values, list) or not 0 < len(values) <= MOST_NUMBERS:
        return False
    return all(isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) for value in values)


@torch.no_grad()
def _compute(model: PreTrainedModel, ids: list[int]) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model).float().cpu().eval()
    model.set_attn_implementation("sdpa")
    input_ids = torch.tensor([ids])
    outputs = {"last_hidden_state": model.base_model(input_ids).last_hidden_state}
    # Compared by name, since the class may come from remote code.
    if type(model).__name__ == "NeoBERTContextualModel":
        outputs["first_stage"] = model(input_ids).pooler_output
        outputs["second_stage"] = model(input_ids, dataset_embeddings=made_context(model.config)).pooler_output
    elif model.base_model is not model:
        choices = type(model).__name__ == "NeoBERTForMultipleChoice"
        outputs |= dict(model(input_ids[None] if choices else input_ids))
    return outputs


def made_context(config: PreTrainedConfig) -> torch.Tensor:
    """An artificial context, (context_size, hidden_size)."""
    return torch.linspace(-1, 1, config.context_size * config.hidden_size).view(config.context_size, -1)


def _describe(output: torch.Tensor) -> dict[str, Any]:
    rows = output.flatten(0, -2)
    return {
        "shape": list(output.shape),
        "first": rows[0, :8].tolist(),
        "last": rows[-1, :8].tolist(),
        "mean": rows.double().mean().item(),
        "rms": rows.double().square().mean().sqrt().item(),
    }

"""GLUE with LoRA and with rates by layer: what the saved models are, and what other tasks make of them."""

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score

from neobert_hf.common.fingerprints import SettingsMismatch
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import best_of, model_folder, predictions_of


run_glue = load_example("run_glue")
RANK = 2
# The linear layers of the blocks, which get adapters.
ADAPTED = ("qkv.weight", "wo.weight", "ffn.w12.weight", "ffn.w3.weight")


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    """MNLI and, from its best model, RTE, both with LoRA."""
    folder = tmp_path_factory.mktemp("adapters")
    run_glue.main(flags(folder, task="rte mnli", lora_rank=RANK, learning_rate=1e-2))
    return folder


def weights_of(folder) -> dict[str, torch.Tensor]:
    """Of the backbone."""
    return {name: weight for name, weight in load_file(folder / "model.safetensors").items() if "model." in name}


def rank(difference: torch.Tensor) -> int:
    """Without what rounding to float32 adds."""
    return int(torch.linalg.matrix_rank(difference.double(), rtol=1e-3))


def test_adapters_are_merged_into_a_plain_model(trained, encoder, data_dir):
    before, after = weights_of(encoder), weights_of(model_folder(trained, "mnli"))
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in after if name.endswith(ADAPTED)} and len(changed) == 8
    assert {rank(after[name] - before[name]) for name in changed} == {RANK}
    assert not list(model_folder(trained, "mnli").glob("adapter*"))
    result = best_of(trained, "mnli")
    assert result["settings"]["lora_rank"] == RANK and result["score"] > 0.5
    predicted, labels = predictions_of(model_folder(trained, "mnli"), data_dir, "mnli", "validation_matched")
    assert accuracy_score(labels, predicted) == result["metrics"]["validation_matched_accuracy"]


def test_a_task_starts_from_one_that_was_trained_with_adapters(trained, encoder, flags):
    source = best_of(trained, "mnli")["run"]
    before, mnli, rte = (weights_of(path) for path in (encoder, *(model_folder(trained, t) for t in ("mnli", "rte"))))
    assert best_of(trained, "rte")["settings"]["start"] == source
    for name in mnli:
        # Other adapters, on top of the merged ones.
        adapted = name.endswith(ADAPTED)
        assert rank(rte[name] - mnli[name]) == RANK if adapted else torch.equal(rte[name], before[name]), name
        assert not adapted or rank(rte[name] - before[name]) > RANK, name
    # Without adapters all weights are trained, from those of MNLI.
    run_glue.main(flags(trained, task="stsb", max_steps=4, eval_steps=2))
    assert best_of(trained, "stsb")["settings"]["start"] == source
    stsb = weights_of(model_folder(trained, "stsb"))
    for name, weight in stsb.items():
        assert 0 < (weight - mnli[name]).abs().max() < 4 * 4 * 3e-3, name
    with pytest.raises(SettingsMismatch, match="other settings:\n  lora_rank: 2 there, 3 now"):
        run_glue.main(flags(trained, task="rte", lora_rank=3, learning_rate=1e-2))


def test_lower_layers_get_smaller_rates(flags, encoder, tmp_path):
    steps, rate = 10, 3e-3
    run_glue.main(flags(tmp_path, layer_decay=0.1, max_steps=steps, eval_steps=steps, weight_decay=0))
    before, after = weights_of(encoder), weights_of(model_folder(tmp_path, "sst2"))
    parts = {"model.encoder.": 1e-3, "model.transformer_encoder.0.": 1e-2, "model.transformer_encoder.1.": 1e-1}
    for part, factor in parts.items():
        change = max((after[name] - before[name]).abs().max() for name in after if name.startswith(part))
        # AdamW moves a weight by about its rate in each step.
        assert 0.1 < change / (steps * rate * factor) < 2, part
    assert best_of(tmp_path, "sst2")["settings"]["layer_decay"] == 0.1
    with pytest.raises(SettingsMismatch, match="other settings:\n  layer_decay: 0.1 there, 0.2 now"):
        run_glue.main(flags(tmp_path, layer_decay=0.2, max_steps=steps, eval_steps=steps, weight_decay=0))

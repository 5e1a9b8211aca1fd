"""What a user may choose beside the paper's recipe does in all three recipes what it is for."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.helpers.examples import load_example
from tests.helpers.task_runs import flags, text_rows, write_csv


RECIPES = {
    "classification": ("labelled", AutoModelForSequenceClassification, {}),
    "token_classification": ("tagged", AutoModelForTokenClassification, {}),
    "question_answering": ("asked", AutoModelForQuestionAnswering, {"stride": 4}),
}
# One step of AdamW moves every weight that has a gradient by the rate.
RATE, DECAY = 1e-2, 0.5
ONE_STEP = {"max_steps": 1, "eval_steps": 1, "learning_rate": RATE, "weight_decay": 0.0, "warmup_steps": 0}
# What is trained of a block as a whole, by what its rate is multiplied with. A NeoBERT of two blocks.
DEPTHS = {"encoder.": DECAY**3, "transformer_encoder.0.": DECAY**2, "transformer_encoder.1.": DECAY, "layer_norm.": 1}


@pytest.fixture(params=RECIPES)
def train(request, encoder, tmp_path):
    """Run a recipe with some settings; its output folder."""
    data, auto_class, options = RECIPES[request.param]
    data = request.getfixturevalue(data)

    def run(**settings) -> Path:
        command = flags(tmp_path / "run", encoder, data, **options | settings)
        load_example(f"run_{request.param}").main(command)
        return tmp_path / "run"

    run.auto_class = auto_class
    return run


def moved(weights: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far a weight of each depth has moved at most."""
    return {
        depth: max(
            (tensor - before[name]).abs().max().item()
            for name, tensor in weights.items()
            if name.startswith(f"model.{depth}")
        )
        for depth in DEPTHS
    }


def test_lower_blocks_move_less(train, encoder):
    folder = train(**ONE_STEP, layer_decay=DECAY) / "model"
    weights, before = load_file(folder / "model.safetensors"), load_file(encoder / "model.safetensors")
    expected = {depth: RATE * factor for depth, factor in DEPTHS.items()}
    assert moved(weights, before) == pytest.approx(expected, rel=1e-3)


def test_adapters_leave_a_plain_model(train, encoder):
    folder = train(max_steps=4, eval_steps=4, lora_rank=2, learning_rate=RATE) / "model"
    assert not list(folder.glob("adapter*"))
    weights, before = load_file(folder / "model.safetensors"), load_file(encoder / "model.safetensors")
    assert weights.keys() == train.auto_class.from_pretrained(folder).state_dict().keys()
    # Matrices of the blocks are changed, embeddings and norms are as they were.
    changed = {name for name, tensor in weights.items() if name in before and not torch.equal(tensor, before[name])}
    matrices = {name for name in before if name.startswith("model.transformer_encoder.") and before[name].ndim == 2}
    assert changed == matrices


def test_adapters_with_rates_of_their_blocks(train):
    """The matrix that begins at zero has moved by the rate of its block."""
    folder = train(**ONE_STEP, lora_rank=2, layer_decay=DECAY)
    assert (folder / "model" / "model.safetensors").is_file()
    adapters = load_file(folder / "checkpoint-1" / "adapter_model.safetensors")
    for block, factor in enumerate((DECAY**2, DECAY)):
        second = [tensor for name, tensor in adapters.items() if f"encoder.{block}." in name and "lora_B" in name]
        assert len(second) == 4
        assert max(tensor.abs().max().item() for tensor in second) == pytest.approx(RATE * factor, rel=1e-3)


def test_a_run_that_gains_nothing_stops(train):
    settings = {"max_steps": 20, "eval_steps": 2, "learning_rate": 1e-12, "early_stopping_patience": 1}
    folder = train(**settings)
    report = json.loads((folder / "report.json").read_text())
    assert [entry["step"] for entry in report["evaluations"]] == [2, 4] and report["best_step"] == 2
    # Nor is it trained on by the same command.
    train(**settings)
    assert json.loads((folder / "report.json").read_text()) == report


def test_nothing_to_train_and_no_model_are_said_before_the_rows_are_read(encoder, tmp_path):
    """0 steps were once all epochs, and the folder of a run had "no model type"."""
    classify, nowhere = load_example("run_classification"), tmp_path / "nowhere.csv"
    shutil.copytree(encoder, tmp_path / "earlier" / "model")
    with pytest.raises(
        FileNotFoundError, match="earlier', the output folder of a training run; did you mean '.*earlier/model'"
    ):
        classify.main(flags(tmp_path / "run", tmp_path / "earlier", nowhere))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".run.lock").touch()
    with pytest.raises(FileNotFoundError, match="empty', a folder without config.json, .*; it holds nothing"):
        classify.main(flags(tmp_path / "run", tmp_path / "empty", nowhere))
    with pytest.raises(FileNotFoundError, match="config.json', a file. Give the folder of a model"):
        classify.main(flags(tmp_path / "run", encoder / "config.json", nowhere))
    with pytest.raises(FileNotFoundError, match="there is no such file or folder; .*config.json"):
        classify.main(flags(tmp_path / "run", encoder / "config.json" / "model", nowhere))
    with pytest.raises(ValueError, match="empty holds no `train.csv`, .*, only nothing"):
        classify.main(flags(tmp_path / "run", encoder, tmp_path / "empty"))
    data = write_csv(tmp_path / "rows.csv", text_rows(40))
    with pytest.raises(ValueError, match="`max_steps` is 0: nothing would be trained"):
        classify.main(flags(tmp_path / "run", encoder, data, max_steps=0))

"""Every file of configs/pretrain: it runs, and it says what the paper says."""

import json
import math
import shutil
from pathlib import Path

import pytest

from neobert_hf import NeoBERTConfig
from neobert_hf.common.settings import parse_config
from neobert_hf.data.batches import DataArguments
from neobert_hf.pretraining.settings import ModelArguments, PretrainingArguments
from tests.helpers.examples import to_flags
from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import SMALL, pretrain


CONFIGS = sorted((ROOT / "configs" / "pretrain").rglob("*.yaml"))


@pytest.mark.parametrize(
    "config",
    [config if "neobert" in config.stem else pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS],
    ids=lambda path: path.stem,
)
def test_every_configuration_runs_two_steps_at_reduced_size(config, prepared, tmp_path):
    """Sizes, data and steps are cut; optimizer, schedule, masks, mixture and layout are the file's."""
    stored = settings_of(config)
    reduced = {name: SMALL[name] for name in ("use_cpu", "bf16", "report_to", "max_length")}
    reduced |= {"output_dir": tmp_path / "run", "train_data": prepared / "train", "hidden_size": 24}
    reduced |= {"validation_data": prepared / "validation", "num_hidden_layers": 2, "intermediate_size": 48}
    reduced |= {"max_steps": 2, "save_steps": 2, "logging_steps": 1, "dataloader_num_workers": 0}
    # A stage of decay alone has no warm-up.
    reduced |= {"warmup_steps": min(1, stored["warmup_steps"])}
    reduced |= {"micro_batch_tokens": 256, "global_batch_tokens": 512, "eval_steps": 1}
    if stored["min_lengths"] != [0]:
        reduced |= {"min_lengths": "0 32 60"}
    if stored["init_from"] is not None:
        # A first stage of the same architecture.
        alone = tmp_path / "first.yaml"
        alone.write_text(f"extends: {config}\ninit_from: null\ncontinue_optimizer: false\neval_on_start: false\n")
        pretrain.main(["--config", str(alone), *to_flags(reduced | {"output_dir": tmp_path / "first"})])
        shutil.rmtree(tmp_path / "first" / "model")
        reduced |= {"init_from": tmp_path / "first"}
    pretrain.main(["--config", str(config), *to_flags(reduced)])
    log = json.loads((tmp_path / "run" / "log.json").read_text())
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert all(math.isfinite(entry["eval_loss"]) for entry in log if "eval_loss" in entry)


# Table 2 of the paper, and what the files say goes with a change (see their comments).
TABLE_2 = {
    "m1": ("m0", {"rope", "hidden_act", "rms_norm", "norm_eps", "dropout"}),
    "m2": ("m1", {"train_data", "validation_data"}),
    "m3": ("m2", {"train_data", "validation_data"}),
    "m4": ("m2", {"adam_beta2", "weight_decay", "schedule"}),
    "m5": ("m4", {"mlm_probability", "mask_replace_prob", "random_replace_prob"}),
    "m6": ("m5", {"layout"}),
    "m7": ("m5", {"hidden_size", "num_hidden_layers", "intermediate_size"}),
    "m8": ("m7", {"hidden_size", "num_hidden_layers", "intermediate_size"}),
    "m9": ("m8", {"max_length", "micro_batch_tokens", "global_batch_tokens"}),
    "m10": (
        "m9",
        {"init_from", "continue_optimizer", "max_length", "min_lengths", "probabilities"}
        | {"max_steps", "learning_rate", "warmup_steps", "schedule", "eval_steps"},
    ),
}


def settings_of(config: Path) -> dict:
    parsed = parse_config(
        ModelArguments,
        DataArguments,
        PretrainingArguments,
        args=["--config", str(config), "--use_cpu", "True", "--bf16", "False"],
    )
    merged = {name: value for part in parsed for name, value in vars(part).items() if not name.startswith("_")}
    merged |= {name: getattr(NeoBERTConfig(), name) for name in vars(ModelArguments()) if merged[name] is None}
    for name in ("output_dir", "logging_dir", "run_name", "distributed_state"):
        merged.pop(name, None)
    return merged


@pytest.mark.parametrize("name", TABLE_2)
def test_each_ablation_changes_what_table_2_says(name):
    folder = ROOT / "configs" / "pretrain" / "ablations"
    before, changed = TABLE_2[name]
    before, after = settings_of(folder / f"{before}.yaml"), settings_of(folder / f"{name}.yaml")
    assert {key for key in before if before[key] != after[key]} == changed


def test_published_configurations_say_what_the_paper_says():
    first = {"hidden_size": 768, "num_hidden_layers": 28, "max_length": 1024}
    first |= {"mlm_probability": 0.2, "mask_replace_prob": 1.0, "global_batch_tokens": 2**21, "max_steps": 1_000_000}
    first |= {"learning_rate": 6e-4, "warmup_steps": 2000, "schedule": "cosine_to_floor", "weight_decay": 0.1}
    first |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1.0}
    second = {"max_length": 4096, "probabilities": [0.2, 0.4, 0.4], "min_lengths": [0, 1024, 2048]}
    second |= {"max_steps": 50_000, "learning_rate": 6e-5, "schedule": "constant", "continue_optimizer": True}
    for name, expected in (("neobert_1024", first), ("neobert_4096", second)):
        stored = settings_of(ROOT / "configs" / "pretrain" / f"{name}.yaml")
        assert {key: stored[key] for key in expected} == expected

"""Interrupted runs end with the same bits, and other settings are refused."""

import json
import re
import resource
import shutil

import pytest
import yaml
from safetensors.torch import load_file, save_file

from neobert_hf.common.run import SettingsMismatch
from tests.helpers.embedding_runs import KINDS, RECIPES, files_of, run, to_flags
from tests.helpers.pretraining_runs import (
    ScriptProcesses,
    assert_same_weights,
    interrupted_copy,
    launched_environments,
    weights,
)


# After which checkpoint a run is killed; None: it is finished.
@pytest.mark.parametrize("kind, after", [*((kind, after) for kind in KINDS for after in (6, 12)), ("dense", None)])
def test_a_resumed_run_leaves_the_same_files(trained, settings, tmp_path, kind, after):
    """Also the model card with all scores and losses, and the log."""
    if after is None:
        shutil.copytree(trained[kind], tmp_path / "run")
    else:
        interrupted_copy(trained[kind], tmp_path / "run", after)
    run(kind, settings())
    assert files_of(tmp_path / "run") == files_of(trained[kind])
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "model-index" in card and re.findall(r"^\| [0-9.]+ +\| (\d+)", card, re.MULTILINE) == [*map(str, range(13))]


def test_evaluations_do_not_change_what_is_trained(trained, settings, tmp_path):
    """Whether and how often there are any is not compared on resume."""
    run("dense", settings(eval_steps=5))
    assert_same_weights(tmp_path / "run", trained["dense"])


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_log_goes_on_where_a_checkpoint_stands_between_two_logs(settings, tmp_path, kind):
    """The losses of steps 5 and 6 belong to the log of step 8."""
    changes = {"logging_steps": 4, "eval_strategy": "no"}
    run(kind, settings(output_dir=tmp_path / "whole", **changes))
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=6)
    run(kind, settings(**changes))
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")


def test_other_settings_data_or_weights_are_refused_by_name(trained, settings, data, encoder, helper, tmp_path):
    interrupted_copy(trained["dense"], tmp_path / "run", after=6)
    shutil.copytree(data, tmp_path / "data")
    shutil.copytree(encoder, tmp_path / "encoder")
    # Other rows, and as many, in the same file.
    pairs, described = (tmp_path / "data" / name for name in ("pairs.jsonl", "datasets.yaml"))
    pairs.write_text("".join(reversed(pairs.read_text().splitlines(keepends=True))))
    content = yaml.safe_load(described.read_text())
    content["train"]["pairs"] |= {"instruction": "Another.", "document_instruction": "An answer."}
    described.write_text(yaml.safe_dump(content, sort_keys=False))
    weights = load_file(tmp_path / "encoder" / "model.safetensors")
    weights["model.layer_norm.weight"] *= 2
    save_file(weights, tmp_path / "encoder" / "model.safetensors", {"format": "pt"})

    def refused(**changes) -> list[tuple[str, str, str]]:
        with pytest.raises(SettingsMismatch) as error:
            run("dense", settings(**changes))
        return re.findall(r"^  (\S+): (.*) there, (.*) now$", str(error.value), re.MULTILINE)

    # The other datasets are the same under another path.
    found = refused(datasets=described, model=tmp_path / "encoder", guide=helper)
    assert [name for name, _, _ in found] == [
        "datasets.pairs.content",
        "datasets.pairs.document_instruction",
        "datasets.pairs.instruction",
        "guide",
        "model",
    ]
    # Settings are compared before the data are read.
    pairs.unlink()
    changes = {"learning_rate": 1e-3, "temperature": 0.05, "miner": helper, "negatives": 2, "lora_rank": 4}
    found = refused(datasets=described, **changes)
    assert [name for name, _, _ in found] == ["learning_rate", "lora_rank", "negatives", "temperature"]
    assert ("learning_rate", "0.005", "0.001") in found and ("temperature", "0.07", "0.05") in found


def test_what_a_killed_process_left_half_written_goes_and_nothing_else(trained, settings, tmp_path):
    interrupted_copy(trained["dense"], tmp_path / "run", after=6)
    left = ["model.123.partial/model.safetensors", "model.123.old.partial/config.json", "mined/a.parquet.77.partial"]
    kept = ["notes.partial", "model.partial/model.safetensors", "drafts/letter.old.partial"]
    for name in left + kept:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("half")
    run("dense", settings())
    assert not any((tmp_path / "run" / name).exists() for name in left)
    assert all((tmp_path / "run" / name).exists() for name in kept)
    assert not (tmp_path / "run" / "model.123.partial").exists()


@pytest.fixture
def little_room():
    """No file may be larger than 20 kB, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_said_in_one_line_and_leaves_no_half_checkpoint(settings, tmp_path, little_room):
    with pytest.raises(OSError, match="checkpoint-6 could not be written: the disk is full") as error:
        run("dense", settings(eval_strategy="no"))
    assert str(error.traceback[-1].path).endswith("neobert_hf/common/files.py")
    assert not (tmp_path / "run" / "checkpoint-6").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "reranker", "contextual"])
def test_two_processes_train_as_one_with_twice_the_micro_batches(settings, encoder, helper, tmp_path, kind):
    shutil.copytree(encoder, tmp_path / "encoder")
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    # Processes draw dropout from generators of their own.
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config | {"dropout": 0.0, "classifier_dropout": 0.0}))
    changes = settings(model=tmp_path / "encoder", max_steps=6, save_steps=3, eval_strategy="no")
    if kind == "contextual":
        # Of as many documents as a batch has, whose order does not count.
        changes |= {"first_model": helper, "context_size": 8, "context_dropout": 0.0, "mini_batch_size": 3}
    run(kind, changes | {"gradient_accumulation_steps": 2, "output_dir": tmp_path / "one"})
    environments = launched_environments("cpu_ddp.yaml", 2)
    processes = ScriptProcesses(to_flags(kind, changes), environments, script=RECIPES[kind][0])
    assert "2 x cpu" in processes.finish()
    folders = ("one/checkpoint-3", "one/model", "run/model")
    halfway, one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in folders)
    for name, tensor in one.items():
        # Rounding in another order, over 6 steps.
        assert (tensor - two[name]).norm() < 2e-3 * (tensor - halfway[name]).norm(), name
    # AdamW would not notice a sum in place of a mean.
    logs = [json.loads((tmp_path / name / "log.json").read_text()) for name in ("one", "run")]
    norms = [[entry["grad_norm"] for entry in log if "loss" in entry] for log in logs]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@pytest.mark.parametrize("kind", ["dense", "reranker"])
def test_the_best_weights_are_kept_and_training_stops_early(settings, tmp_path, capsys, kind):
    """Also after an interruption."""
    changes = {"load_best_model_at_end": True, "early_stopping_patience": 2, "max_steps": 40, "save_total_limit": 1}
    changes |= {"eval_steps": 2, "save_steps": 2, "logging_steps": 2}
    log = run(kind, settings(output_dir=tmp_path / "whole", **changes))
    scores = {entry["step"]: entry[name] for entry in log for name in entry if name.endswith("_ndcg@10")}
    best = max((score, -step) for step, score in scores.items() if step)
    # Two evaluations after the best one, it was over.
    assert max(scores) == -best[1] + 4 < 40
    assert f" of step {-best[1]}, the best: " in (said := capsys.readouterr().out) and f"{best[0]:.4f} (" in said
    kept = load_file(tmp_path / "whole" / f"checkpoint-{-best[1]}" / "model.safetensors")
    assert all(tensor.equal(kept[name]) for name, tensor in weights(tmp_path / "whole").items())
    card = (tmp_path / "whole" / "model" / "README.md").read_text()
    assert f"value: {best[0]}" in card
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=max(scores) - 2)
    run(kind, settings(**changes))
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")

"""examples/pretrain.py: what each promise of the recipe is worth, on the real script and a small corpus."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from plain_neobert import plain_hidden_states
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, pipeline

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.checkpoints import COMPLETE, CheckpointError, complete_checkpoints
from neobert_hf.pretraining import PretrainingArguments, training_flops


sys.path.insert(0, str(ROOT / "examples"))
import pretrain  # noqa: E402


# Mixture and dropout, so that a resume has to restore every source of randomness.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "dropout": 0.1,
    "decoder_init_range": 0.2,
    "embedding_init_range": 1.0,
    "max_length": 64,
    "micro_batch_tokens": 256,
    "global_batch_tokens": 1024,
    "min_lengths": "0 60",
    "probabilities": "0.5 0.5",
    "shuffle_shards": 2,
    "max_steps": 12,
    "warmup_steps": 2,
    "seed": 0,
    "learning_rate": 5e-3,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_steps": 3,
    "report_to": "none",
    "peak_tflops": 0.1,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Such small models lose time with more, and very much of it beside another busy process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def flags(prepared, tmp_path):
    """The command line of a run in tmp_path / "run", with changes."""

    def build(**changes) -> list[str]:
        settings = {"output_dir": tmp_path / "run", "train_data": prepared / "train"} | SMALL | changes
        return to_flags(settings)

    return build


def to_flags(settings: dict) -> list[str]:
    return [
        word for name, value in settings.items() if value is not None for word in (f"--{name}", *str(value).split())
    ]


def run(flags: list[str]) -> list[dict]:
    """Train in this process and return the log."""
    pretrain.main(flags)
    return json.loads((Path(flags[1]) / "log.json").read_text())


def start(flags: list[str], prefix: str = "", **environment) -> subprocess.Popen:
    """Train in a process of its own."""
    command = f"{prefix} exec {sys.executable} {ROOT / 'examples' / 'pretrain.py'} {' '.join(flags)}"
    return subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"} | environment,
    )


def finish(process: subprocess.Popen) -> str:
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_run_leaves_a_model_curves_and_numbers(flags, prepared, tmp_path):
    log = run(flags(validation_data=prepared / "validation", eval_strategy="steps", eval_steps=6))
    folder = tmp_path / "run"
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    assert isinstance(model, NeoBERTForMaskedLM) and not model.config.sparse_prediction
    assert pipeline("fill-mask", str(folder / "model"))("a [MASK].")
    assert (folder / "curves.png").stat().st_size > 10_000
    assert not list(folder.glob("*.partial"))
    steps = [entry for entry in log if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 13))
    for entry in steps:
        assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
        assert 0 <= entry["accuracy"] <= 1 and entry["grad_norm"] > 0
        assert entry["tokens_per_second"] > 0 and entry["mfu"] > 0
        assert entry["padding_share"] == 0
        assert entry["padded_tokens_per_second"] == entry["tokens_per_second"]
        assert entry["attention"] == "sdpa, one call a document"
    # Four micro-batches of at most 256 tokens a step.
    seen = [entry["tokens_seen"] for entry in steps]
    assert all(600 < after - before <= 1024 for before, after in zip([0, *seen], seen))
    evaluations = [entry for entry in log if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12]
    assert all(entry["peak"] == "1e+11, given" for entry in steps)
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"] < math.log(600) + 1


def test_the_same_command_again_changes_nothing(flags, tmp_path):
    run(flags())
    before = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    run(flags())
    after = weights(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)


# At 128, most documents are as long as the edge of the first bin.
@pytest.mark.parametrize("max_length", [128, 200])
def test_held_out_loss_is_the_mean_over_labels_and_by_length(flags, prepared, tmp_path, max_length):
    changes = {
        "validation_data": prepared / "validation",
        "max_length": max_length,
        "min_lengths": 0,
        "probabilities": 1,
    }
    log = run(flags(**changes, max_steps=2))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    settings = pretrain.parse_config(
        pretrain.ModelArguments, pretrain.DataArguments, PretrainingArguments, args=flags(**changes)
    )
    documents, sampler, collator = pretrain.read_data(*settings[1:])[2]
    losses, lengths = [], []
    with torch.no_grad():
        for keys in sampler:
            for document in documents.__getitems__(keys):
                batch = collator([document])
                labelled = batch["labels"][0] != -100
                logits = model(input_ids=batch["input_ids"]).logits[0]
                losses.append(F.cross_entropy(logits[labelled], batch["labels"][0][labelled], reduction="none"))
                lengths += [len(document["input_ids"])] * int(labelled.sum())
    losses, lengths = torch.cat(losses), torch.tensor(lengths)
    evaluation = next(entry for entry in log if "eval_loss" in entry)
    assert len(set(lengths.tolist())) > 1 and lengths.max() == max_length
    assert evaluation["eval_loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    bins = {"1_to_128": lengths <= 128, "129_to_256": (lengths > 128) & (lengths <= 256)}
    for name, inside in bins.items():
        assert (f"eval_loss_{name}" in evaluation) == bool(inside.any())
        if inside.any():
            assert evaluation[f"eval_loss_{name}"] == pytest.approx(losses[inside].mean().item(), abs=1e-5)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))


def test_losses_equal_a_plain_training_loop(flags, prepared, tmp_path):
    """20 steps of AdamW written out, with a plain model, on the same micro-batches."""
    changes = {"dropout": 0.0, "max_steps": 20, "save_steps": 20, "weight_decay": 0.1}
    log = run(flags(**changes))
    architecture, data, arguments = pretrain.parse_config(
        pretrain.ModelArguments, pretrain.DataArguments, PretrainingArguments, args=flags(**changes)
    )
    manifest, (documents, sampler, collator), _ = pretrain.read_data(data, arguments)
    pretrain.set_seed(arguments.seed)
    model = pretrain.build_model(architecture, data, manifest, collator.tokenizer, None)
    parameters = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in parameters.items()}
    batches, losses = iter(sampler), []
    for step in range(1, 21):
        step_documents = [documents.__getitems__(keys) for keys in islice(batches, 4)]
        total, labels = 0.0, 0
        for micro_batch in step_documents:
            for document in micro_batch:
                batch = collator([document])
                labelled = batch["labels"] != -100
                backbone = {name.removeprefix("model."): weight for name, weight in parameters.items()}
                states = plain_hidden_states(backbone, model.config, batch["input_ids"][0])[labelled[0]]
                logits = states @ parameters["decoder.weight"].T + parameters["decoder.bias"]
                total = total + F.cross_entropy(logits, batch["labels"][labelled], reduction="sum")
                labels += int(labelled.sum())
        loss = total / labels
        losses.append(loss.item())
        gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters.values())))
        norm = sum((gradient**2).sum() for gradient in gradients.values()) ** 0.5
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, (step - 1 - 2) / 16)))
        rate = 5e-3 * ((step - 1) / 2 if step - 1 < 2 else cosine)
        with torch.no_grad():
            for name, weight in parameters.items():
                gradient = gradients[name] * min(1.0, 1.0 / (norm + 1e-6))
                first, second = moments[name]
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.95).add_(gradient**2, alpha=0.05)
                denominator = (second / (1 - 0.95**step)).sqrt() + 1e-8
                weight -= rate * (first / (1 - 0.9**step) / denominator + 0.1 * weight)
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_padded_batches_report_their_padding(flags, tmp_path):
    log = run(
        flags(layout="padded", max_length=256, micro_batch_tokens=1024, max_steps=4, min_lengths=0, probabilities=1)
    )
    padding = [entry["padding_share"] for entry in log if "loss" in entry]
    assert all(0 <= share < 0.9 for share in padding) and max(padding) > 0
    for entry in log:
        if "loss" in entry:
            ratio = entry["tokens_per_second"] / entry["padded_tokens_per_second"]
            assert ratio == pytest.approx(1 - entry["padding_share"])


def test_flops_against_the_profiler(flags):
    from torch.utils.flop_counter import FlopCounterMode

    model = NeoBERTForMaskedLM(
        pretrain.NeoBERTConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=96,
            vocab_size=300,
            sparse_prediction=True,
        )
    )
    ids = torch.randint(5, 300, (3, 40))
    labels = torch.where(torch.rand(3, 40) < 0.2, ids, -100)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).loss.backward()
    expected = training_flops(model.config, 120, 3 * 40**2, int((labels != -100).sum()))
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_killed_twice_ends_with_the_same_bits(flags, tmp_path, layout):
    changes = {"max_steps": 60, "save_steps": 5, "layout": layout, "dataloader_num_workers": 2}
    finish(start(flags(**changes, output_dir=tmp_path / "whole")))
    generator = random.Random(layout)
    for _ in range(2):
        process = start(flags(**changes))
        seen = len(complete_checkpoints(tmp_path / "run"))
        while process.poll() is None and not ((tmp_path / "run").is_dir() and new_checkpoint(tmp_path / "run", seen)):
            time.sleep(0.02)
        # At any moment: in the middle of a step, of saving, of reading.
        time.sleep(generator.random())
        assert process.poll() is None, process.communicate()[0][-3000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = finish(start(flags(**changes)))
    assert re.search(r"resuming from \S+checkpoint-[1-9]", output)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    final = [json.loads((tmp_path / name / "log.json").read_text())[-2] for name in ("run", "whole")]
    assert final[0]["tokens_seen"] == final[1]["tokens_seen"] and final[0]["loss"] == final[1]["loss"]


def new_checkpoint(folder: Path, seen: int) -> bool:
    newest = complete_checkpoints(folder)[-1:]
    steps = [int(path.name.split("-")[1]) for path in newest]
    return bool(steps) and steps[0] >= 5 + 5 * seen


def interrupted(flags, tmp_path, step: int = 6) -> Path:
    """A run that stopped after this step, in the middle of its way."""
    finished_run = tmp_path / "run"
    run(flags())
    for folder in complete_checkpoints(finished_run):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    shutil.move(finished_run / "model", tmp_path / "expected" / "model")
    return finished_run / f"checkpoint-{step}"


def test_half_written_checkpoints_are_never_picked_up(flags, tmp_path):
    checkpoint = interrupted(flags, tmp_path)
    half = checkpoint.with_name("checkpoint-9")
    shutil.copytree(checkpoint, half)
    (half / COMPLETE).unlink()
    (half / "model.safetensors").write_bytes(b"half")
    pretrain.main(flags())
    assert_same_weights(tmp_path / "run", tmp_path / "expected")


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "rng_state.pth"])
def test_a_checkpoint_that_lost_a_file_is_refused(flags, tmp_path, name):
    checkpoint = interrupted(flags, tmp_path)
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        pretrain.main(flags())
    (checkpoint / name).write_bytes(b"half")
    with pytest.raises(CheckpointError, match=f"{name} is 4 bytes; it was written with [0-9,]+ bytes"):
        pretrain.main(flags())


def test_resuming_does_not_read_skipped_data(flags, tmp_path, monkeypatch):
    interrupted(flags, tmp_path)
    read = []
    original = pretrain.Documents.__getitems__
    monkeypatch.setattr(pretrain.Documents, "__getitems__", lambda self, keys: read.append(1) or original(self, keys))
    pretrain.main(flags())
    assert len(read) == (12 - 6) * 4
    assert_same_weights(tmp_path / "run", tmp_path / "expected")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate: 0.005 there, 0.001 now"),
        ({"max_length": 32}, "max_length: 64 there, 32 now"),
        ({"hidden_size": 64}, "hidden_size: 32 there, 64 now"),
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"train_data": "validation"}, "corpus: "),
    ],
)
def test_resuming_with_other_settings_names_them(flags, prepared, tmp_path, change, message):
    interrupted(flags, tmp_path)
    if "train_data" in change:
        change = {"train_data": prepared / change["train_data"]}
    else:
        # What may change.
        change |= {"logging_steps": 2, "save_steps": 4, "dataloader_num_workers": 1}
    with pytest.raises(CheckpointError, match=message) as error:
        pretrain.main(flags(**change))
    assert str(error.value).count(" there, ") == 1


def test_sigterm_saves_stops_and_the_same_command_finishes(flags, tmp_path):
    # A launcher signals the whole process group: loader workers must survive it.
    changes = {"max_steps": 40, "save_steps": 1000, "dataloader_num_workers": 2}
    finish(start(flags(**changes, output_dir=tmp_path / "whole")))
    process = start(flags(**changes))
    for line in process.stdout:
        if "'loss'" in line:
            break
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output[-3000:]
    step = int(re.search(r"Stopped by SIGTERM after step (\d+)", output)[1])
    assert 0 < step < 40
    assert f"checkpoint-{step} is complete: the same command goes on from there." in output
    assert not (tmp_path / "run" / "model").exists()
    finish(start(flags(**changes)))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_ends_with_a_message_and_a_usable_checkpoint(flags, tmp_path):
    checkpoint = interrupted(flags, tmp_path)
    # The kernel refuses to write files beyond 64 blocks of 1,024 bytes; the weights alone take more.
    process = start(flags(), prefix="ulimit -f 64; trap '' XFSZ;")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert re.search(r"The checkpoint of step 9 could not be written \(.*\); [\d,]+ bytes are free", output)
    assert f"{checkpoint} is complete: the same command goes on from there." in output
    assert complete_checkpoints(tmp_path / "run")[-1] == checkpoint
    run(flags())
    assert_same_weights(tmp_path / "run", tmp_path / "expected")


def test_old_checkpoints_go_once_the_new_one_is_whole(flags, tmp_path):
    run(flags(save_total_limit=1, save_steps=5))
    assert [folder.name for folder in complete_checkpoints(tmp_path / "run")] == ["checkpoint-12"]
    run(flags(save_total_limit=2, save_steps=5, output_dir=tmp_path / "two"))
    assert [folder.name for folder in complete_checkpoints(tmp_path / "two")] == ["checkpoint-10", "checkpoint-12"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logging_steps": 1, "save_steps": 100}, "The loss is (nan|inf) at step .* no earlier checkpoint"),
        ({"logging_steps": 100, "save_steps": 1}, "weights are not finite after step .*checkpoint-[1-9] is complete"),
    ],
    ids=["when it is logged", "when it is saved"],
)
def test_a_loss_that_is_not_finite_stops_before_it_is_saved(flags, tmp_path, changes, message):
    with pytest.raises(SystemExit, match=message):
        pretrain.main(flags(learning_rate=1e30, warmup_steps=10, schedule="linear", **changes))
    for folder in complete_checkpoints(tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in load_file(folder / "model.safetensors").values())


def test_second_stage_continues_weights_and_optimizer_once(flags, prepared, tmp_path):
    run(flags(output_dir=tmp_path / "first"))
    stage = {
        "init_from": tmp_path / "first",
        "continue_optimizer": True,
        "max_length": 128,
        "schedule": "constant",
        "learning_rate": 5e-4,
        "weight_decay": 0.05,
        "warmup_steps": 0,
        "max_steps": 4,
        "save_steps": 1,
        "save_total_limit": 10,
    }
    log = run(flags(**stage))
    first = torch.load(tmp_path / "first" / "checkpoint-12" / "optimizer.pt")
    second = torch.load(tmp_path / "run" / "checkpoint-1" / "optimizer.pt")
    # Adam's own count of its steps goes on, the settings are this stage's.
    assert {int(state["step"]) for state in first["state"].values()} == {12}
    assert {int(state["step"]) for state in second["state"].values()} == {13}
    assert [group["weight_decay"] for group in second["param_groups"]] == [0.05] * len(first["param_groups"])
    assert [entry["learning_rate"] for entry in log if "loss" in entry] == [5e-4] * 4
    assert log[0]["loss"] < json.loads((tmp_path / "first" / "log.json").read_text())[0]["loss"] - 0.3
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").config.max_length == 128
    # A checkpoint can be named, too.
    run(flags(**stage | {"init_from": tmp_path / "first" / "checkpoint-12"}, output_dir=tmp_path / "named"))
    assert_same_weights(tmp_path / "run", tmp_path / "named")
    # Interrupted, it resumes its own optimizer and not the first stage's again.
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "again" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "again" / "model")
    (tmp_path / "first").rename(tmp_path / "gone")
    run(flags(**stage, output_dir=tmp_path / "again"))
    assert_same_weights(tmp_path / "run", tmp_path / "again")


def test_second_stage_from_something_else_is_refused(flags, prepared, tmp_path):
    run(flags(output_dir=tmp_path / "first", max_steps=2, save_steps=1))
    with pytest.raises(ValueError, match="another architecture. hidden_size: 32 there, 64 now"):
        pretrain.main(flags(init_from=tmp_path / "first", hidden_size=64))
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        pretrain.main(flags(init_from=tmp_path / "first" / "model", continue_optimizer=True))
    with pytest.raises(ValueError, match="needs `init_from`"):
        pretrain.main(flags(continue_optimizer=True))
    file = tmp_path / "first" / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["the"], vocabulary["is"] = vocabulary["is"], vocabulary["the"]
    file.write_text(json.dumps(tokenizer))
    shutil.rmtree(tmp_path / "first" / "checkpoint-2")
    with pytest.raises(ValueError, match="has come to step 1 of 2 only"):
        pretrain.main(flags(init_from=tmp_path / "first"))
    shutil.rmtree(tmp_path / "first" / "checkpoint-1")
    with pytest.raises(ValueError, match="first/model has another tokenizer"):
        pretrain.main(flags(init_from=tmp_path / "first"))
    with pytest.raises(FileNotFoundError, match="holds neither a checkpoint nor a model"):
        pretrain.main(flags(init_from=prepared))


def test_a_checkpoint_of_another_engine_is_refused(flags, tmp_path):
    """Transformers would find no `optimizer.pt` in it and start the optimizer anew."""
    checkpoint = interrupted(flags, tmp_path)
    content = json.loads((checkpoint / COMPLETE).read_text())
    (checkpoint / COMPLETE).write_text(json.dumps(content | {"engine": "DeepSpeed"}))
    message = "checkpoint-6 was written by the engine DeepSpeed, and this run has plain"
    with pytest.raises(CheckpointError, match=message):
        pretrain.main(flags())
    with pytest.raises(CheckpointError, match=message):
        pretrain.main(flags(init_from=checkpoint, continue_optimizer=True, output_dir=tmp_path / "second"))


def test_a_copy_of_a_checkpoint_is_left_alone(flags, tmp_path):
    checkpoint = interrupted(flags, tmp_path)
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-6-backup"))
    run(flags(save_total_limit=1))
    assert_same_weights(tmp_path / "run", tmp_path / "expected")
    assert checkpoint.with_name("checkpoint-6-backup").is_dir() and not checkpoint.exists()


def test_held_out_masks_are_the_same_for_every_seed(flags, prepared):
    labels = []
    for seed in (0, 1):
        settings = pretrain.parse_config(
            pretrain.ModelArguments,
            pretrain.DataArguments,
            PretrainingArguments,
            args=flags(validation_data=prepared / "validation", seed=seed),
        )
        documents, sampler, collator = pretrain.read_data(*settings[1:])[2]
        labels.append(collator(documents.__getitems__(next(iter(sampler))))["labels"])
    assert torch.equal(*labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_data": "nowhere"}, "nowhere holds no manifest.json"),
        ({"probabilities": "0.5 0.4"}, "sum 0.9"),
        ({"min_lengths": "0 5000"}, "No document has 5,000 tokens"),
        ({"micro_batch_tokens": 300}, "must be a multiple of"),
        ({"max_length": 1024}, "less than one document"),
        ({"ignore_data_skip": False}, "`ignore_data_skip` is False; this recipe needs True"),
        ({"logging_nan_inf_filter": True}, "`logging_nan_inf_filter` is True"),
        ({"gradient_accumulation_steps": 7}, "`gradient_accumulation_steps` is 7; .*set `global_batch_tokens` instead"),
        ({"lr_scheduler_type": "cosine"}, "`lr_scheduler_type` .*set `schedule` instead"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` is 0.1; .*leave it out"),
        ({"save_strategy": "epoch"}, "`save_strategy` is 'epoch'; it must be 'steps' or 'no'"),
        ({"max_length": 4}, "`max_length` is 4; it must be 8 or more"),
        ({"shuffle_shards": 0}, "`shuffle_shards` is 0"),
        ({"micro_batch_tokens": 0}, "must be a multiple of"),
        ({"max_steps": -1}, "`max_steps` is -1"),
        ({"warmup_steps": 100}, "no step would follow"),
        ({"optimizer": "adam"}, "`weight_decay` is 0.1: set it to 0"),
        ({"eval_strategy": "steps"}, "set `validation_data`"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"mlm_probability": 0}, "nothing would be predicted"),
    ],
)
def test_bad_input_is_refused_before_the_first_step(flags, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match="(?s)" + message):
        pretrain.main(flags(**change))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_validation_data_of_another_tokenizer_is_refused(flags, prepared, tmp_path):
    shutil.copytree(prepared / "validation", tmp_path / "other")
    manifest = json.loads((tmp_path / "other" / "manifest.json").read_text())
    manifest["tokenizer_fingerprint"] = "0" * 64
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="another tokenizer"):
        pretrain.main(flags(validation_data=tmp_path / "other"))


@pytest.mark.parametrize("optimizer", ["soap", "muon"])
def test_library_optimizers_train_and_resume(flags, tmp_path, optimizer):
    changes = {"optimizer": optimizer, "min_lengths": 0, "probabilities": 1}
    log = run(flags(**changes, output_dir=tmp_path / "whole"))
    losses = [entry["loss"] for entry in log if "loss" in entry]
    # SOAP's first step only starts its preconditioner.
    assert min(losses[-3:]) < losses[0] - 0.03
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (9, 12):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "run" / "model")
    run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_tensorboard_gets_every_number(flags, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(flags(report_to="tensorboard", max_steps=3))
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    numbers = "loss perplexity accuracy grad_norm learning_rate tokens_per_second padding_share tokens_seen mfu".split()
    for name in numbers:
        assert [event.step for event in events.Scalars(f"train/{name}")] == [1, 2, 3], name


def test_bf16_autocast_keeps_float32_weights(flags, tmp_path):
    exact, rounded = (
        [
            entry["loss"]
            for entry in run(flags(bf16=bf16, dropout=0.0, output_dir=tmp_path / str(bf16)))
            if "loss" in entry
        ]
        for bf16 in (False, True)
    )
    # Rounded products, not rounded weights: close to float32, and not the same.
    assert rounded != exact and rounded == pytest.approx(exact, abs=0.05)
    checkpoint = tmp_path / "True" / "checkpoint-12"
    assert {tensor.dtype for tensor in load_file(checkpoint / "model.safetensors").values()} == {torch.float32}
    moments = torch.load(checkpoint / "optimizer.pt")["state"][0]
    assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.float32


def test_gradient_checkpointing_changes_nothing(flags, tmp_path):
    run(flags(output_dir=tmp_path / "kept"))
    run(flags(gradient_checkpointing=True))
    assert_same_weights(tmp_path / "run", tmp_path / "kept")


def test_byte_level_bpe_trains_as_well(flags, prepared, tmp_path, monkeypatch):
    """Ablation M3."""
    import prepare_data
    import train_tokenizer

    texts = [json.loads(line)["text"] for line in (prepared / "train.jsonl").read_text().splitlines()]
    train_tokenizer.train_bpe(iter([texts]), 600, 128).save_pretrained(tmp_path / "bpe")
    source = f"--source {prepared}/train.jsonl --tokenizer {tmp_path}/bpe --output_dir {tmp_path}/data"
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *source.split()])
    prepare_data.main()
    log = run(flags(train_data=tmp_path / "data"))
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    # The corpora of two tokenizers do not mix.
    with pytest.raises(ValueError, match="another tokenizer"):
        pretrain.main(
            flags(train_data=tmp_path / "data", validation_data=prepared / "validation", output_dir=tmp_path / "x")
        )


CONFIGS = sorted((ROOT / "configs" / "pretrain").rglob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_runs_two_steps_at_reduced_size(config, flags, prepared, tmp_path):
    """Sizes, data and steps are cut; optimizer, schedule, masks, mixture and layout are the file's."""
    stored = settings_of(config)
    reduced = {name: SMALL[name] for name in ("use_cpu", "bf16", "report_to", "peak_tflops", "max_length")}
    reduced |= {"output_dir": tmp_path / "run", "train_data": prepared / "train", "hidden_size": 24}
    reduced |= {"validation_data": prepared / "validation", "num_hidden_layers": 2, "intermediate_size": 48}
    reduced |= {"max_steps": 2, "warmup_steps": 1, "save_steps": 2, "logging_steps": 1, "dataloader_num_workers": 0}
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
    "m4": ("m2", {"optimizer", "adam_beta2", "weight_decay", "schedule"}),
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
    parsed = pretrain.parse_config(
        pretrain.ModelArguments,
        pretrain.DataArguments,
        PretrainingArguments,
        args=["--config", str(config), "--use_cpu", "True", "--bf16", "False"],
    )
    merged = {name: value for part in parsed for name, value in vars(part).items() if not name.startswith("_")}
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
    stage_1 = settings_of(ROOT / "configs" / "pretrain" / "neobert_1024.yaml")
    expected = {
        "hidden_size": 768,
        "num_hidden_layers": 28,
        "max_length": 1024,
        "mlm_probability": 0.2,
        "mask_replace_prob": 1.0,
        "global_batch_tokens": 2**21,
        "max_steps": 1_000_000,
        "learning_rate": 6e-4,
        "warmup_steps": 2000,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "schedule": "cosine_to_floor",
        "decay_norms_and_biases": True,
    }
    assert {key: stage_1[key] for key in expected} == expected
    stage_2 = settings_of(ROOT / "configs" / "pretrain" / "neobert_4096.yaml")
    changed = {
        "max_length": 4096,
        "max_steps": 50_000,
        "probabilities": [0.2, 0.4, 0.4],
        "min_lengths": [0, 1024, 2048],
    }
    changed |= {"learning_rate": 6e-5, "schedule": "constant", "continue_optimizer": True}
    assert {key: stage_2[key] for key in changed} == changed

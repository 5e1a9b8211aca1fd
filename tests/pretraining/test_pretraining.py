"""Promises 8, 9 and 12: what examples/pretrain.py leaves, and that it goes on, from a checkpoint or a first stage."""

import json
import math
import re
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline, trainer_utils

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.run import SettingsMismatch
from neobert_hf.common.settings import parse_config
from neobert_hf.data.batches import DataArguments
from neobert_hf.data.documents import PreparedDocuments
from neobert_hf.data.tokenizer import train_bpe
from neobert_hf.pretraining.data import read_data
from neobert_hf.pretraining.settings import ModelArguments, PretrainingArguments
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.run import CheckpointError, complete_checkpoints
from neobert_hf.training.trainer import Stopped
from tests.helpers.examples import load_example
from tests.helpers.pretraining_runs import (
    SMALL,
    assert_same_weights,
    interrupted_behind,
    interrupted_copy,
    pretrain,
    run,
    small_flags,
    start,
)


@pytest.fixture
def flags(prepared, tmp_path):
    """The command line of a run in tmp_path / "run", with changes."""

    def build(output_dir=tmp_path / "run", **changes) -> list[str]:
        return small_flags(prepared, output_dir, **changes)

    return build


@pytest.fixture(scope="module")
def held_out(prepared, tmp_path_factory) -> dict:
    """Two folders of held-out text, the second a copy of the first, read after steps 6 and 12."""
    second = shutil.copytree(prepared / "validation", tmp_path_factory.mktemp("held_out") / "second")
    return {"validation_data": f"{prepared / 'validation'} {second}", "eval_strategy": "steps", "eval_steps": 6}


@pytest.fixture(scope="module")
def finished(prepared, held_out, tmp_path_factory) -> Path:
    """The folder of a run to the end, for all tests: to be copied and compared with, never changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(small_flags(prepared, folder, **held_out))
    return folder


def test_a_run_leaves_a_model_curves_and_numbers(finished):
    log = json.loads((finished / "log.json").read_text())
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    assert isinstance(model, NeoBERTForMaskedLM) and not model.config.sparse_prediction
    assert AutoTokenizer.from_pretrained(finished / "model").model_max_length == 64
    assert pipeline("fill-mask", str(finished / "model"))("a [MASK].")
    assert (finished / "curves.png").stat().st_size > 10_000
    assert not list(finished.glob("*.partial"))
    steps = [entry for entry in log if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 13))
    for entry in steps:
        assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
        assert 0 <= entry["accuracy"] <= 1 and entry["grad_norm"] > 0 and entry["tokens_per_second"] > 0
    # Four micro-batches of at most 256 tokens a step.
    seen = [entry["tokens_seen"] for entry in steps]
    assert all(600 < after - before <= 1024 for before, after in zip([0, *seen], seen))
    evaluations = [entry for entry in log if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"] < math.log(600) + 1
    # Each held-out folder has its loss.
    assert evaluations[1]["eval_loss_2"] == evaluations[1]["eval_loss"]


def test_held_out_loss_is_the_mean_over_labels(flags, finished, held_out):
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    _, settings, arguments = parse_config(ModelArguments, DataArguments, PretrainingArguments, args=flags(**held_out))
    rows, losses = read_data(settings, arguments).held_out[0], []
    with torch.no_grad():
        for keys in rows.sampler:
            for document in rows.documents.__getitems__(keys):
                batch = rows.collator([document])
                labelled = batch["labels"][0] != -100
                logits = model(input_ids=batch["input_ids"]).logits[0]
                losses.append(F.cross_entropy(logits[labelled], batch["labels"][0][labelled], reduction="none"))
    evaluation = [entry for entry in json.loads((finished / "log.json").read_text()) if "eval_loss" in entry][-1]
    assert evaluation["eval_loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(evaluation["eval_loss"]))


@pytest.mark.parametrize("changes", [{"logging_steps": 1, "save_steps": 100}, {"logging_steps": 100, "save_steps": 1}])
def test_a_loss_that_is_not_finite_stops_before_it_is_saved(flags, tmp_path, changes):
    with pytest.raises(FloatingPointError):
        pretrain.main(flags(learning_rate=1e30, warmup_steps=10, schedule="linear", **changes))
    for folder in complete_checkpoints(tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_data": "nowhere"}, "nowhere holds no manifest.json"),
        ({"validation_data": "null", "eval_strategy": "steps"}, "`validation_data` names no folder to evaluate on"),
        ({"validation_data": "./nowhere"}, "`validation_data` is './nowhere', but there is no such file or folder"),
        ({"min_lengths": "0 5000"}, "No document has 5,000 tokens"),
        ({"max_length": 2}, "`max_length` is 2; it must be 4 or more"),
        ({"mlm_probability": 20}, "`mlm_probability` is 20.0; it must be 0 to 1"),
        ({"random_replace_prob": 0.5}, "`mask_replace_prob` and `random_replace_prob` add up to 1.5"),
        ({"max_length": 8192, "micro_batch_tokens": 8192, "global_batch_tokens": 8192}, "`max_length` is 8192"),
        ({"gradient_accumulation_steps": 7}, "`gradient_accumulation_steps` is 7, .*set `global_batch_tokens` instead"),
        ({"save_strategy": "epoch"}, "`save_strategy` is 'epoch'"),
        ({"warmup_steps": 100}, "`warmup_steps` is 100"),
    ],
)
def test_bad_input_is_refused_before_the_first_step(flags, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match="(?s)" + message):
        pretrain.main(flags(**change))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_adapters_without_their_model_are_refused(flags, tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(OSError, match="`init_from` is .*the adapters of a model alone"):
        pretrain.main(flags(init_from=tmp_path / "adapters"))


def prepare(prepared, folder, options: str) -> Path:
    source = f"--source {prepared}/train.jsonl --tokenizer {prepared}/tokenizer --max_length 64"
    load_example("prepare_data").main(f"{source} {options} --output_dir {folder}".split())
    return folder


@pytest.mark.parametrize(
    ("trained", "held_out", "apart"),
    [
        ("--held_out_share 0.1", "--held_out_share 0.3 --part held_out", False),
        ("--skip_documents 19", "--max_documents 20", False),
        ("--skip_documents 20", "--max_documents 20", True),
        ("--held_out_share 0.3", "--held_out_share 0.3 --part held_out", True),
    ],
)
def test_held_out_text_that_may_be_trained_on_is_refused(prepared, tmp_path, trained, held_out, apart):
    """Its loss would be too good, and nothing would show it."""
    folders = [prepare(prepared, tmp_path / name, part) for name, part in (("train", trained), ("other", held_out))]
    data = DataArguments([str(folders[0])], 64, [str(folders[1])], micro_batch_tokens=256)
    arguments = PretrainingArguments(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with nullcontext() if apart else pytest.raises(ValueError, match="other may hold rows of .*train, which"):
        assert read_data(data, arguments).held_out


def test_little_held_out_text_is_said_with_its_masked_tokens(prepared, tmp_path, capsys):
    arguments = PretrainingArguments(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    data = DataArguments([str(prepared / "train")], 64, [str(prepared / "validation")], micro_batch_tokens=256)
    (held_out,) = read_data(data, arguments).held_out
    tokens = sum(len(ids) for ids in held_out.documents)
    assert f"has about {int(0.2 * tokens):,} masked tokens to measure on" in capsys.readouterr().out
    more = replace(data, train_data=data.validation_data, validation_data=data.train_data)
    read_data(more, arguments)
    assert "masked tokens" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"]
)
def test_a_checkpoint_that_has_lost_a_file_is_named_and_nothing_is_trained(flags, finished, tmp_path, name):
    """Cut, empty or deleted: of the run itself, and of a first stage whose optimizer goes on."""
    interrupted_copy(finished, tmp_path / "run", after=6)
    file = tmp_path / "run" / "checkpoint-6" / name
    for damage in ("cut", "empty", "deleted"):
        file.unlink() if damage == "deleted" else file.write_bytes(file.read_bytes()[: 30 if damage == "cut" else 0])
        for changes in ({}, {"output_dir": tmp_path / "second", "init_from": file.parent, "continue_optimizer": True}):
            with pytest.raises(CheckpointError, match=f"checkpoint-6/{name} (has|is missing)"):
                pretrain.main(flags(**changes))


def test_passes_over_the_data_are_a_number_of_steps(flags, prepared, tmp_path):
    folder = prepare(prepared, tmp_path / "data", "--max_documents 50")
    log = run(flags(train_data=folder, max_steps=None, num_train_epochs=2, min_lengths=0, probabilities=1))
    epochs = [entry["epoch"] for entry in log if "loss" in entry]
    ids = sum(map(len, PreparedDocuments([folder])))
    assert 2 * ids / 1024 <= len(epochs) and epochs[-2] < 2 <= epochs[-1]


def test_corpora_of_two_tokenizers_do_not_mix(flags, prepared, tmp_path):
    """Also not with a byte-level BPE (ablation M3)."""
    texts = [json.loads(line)["text"] for line in (prepared / "train.jsonl").read_text().splitlines()]
    train_bpe(iter(texts), 600, 128).save_pretrained(tmp_path / "bpe")
    other = prepare(prepared, tmp_path / "data", f"--tokenizer {tmp_path}/bpe")
    with pytest.raises(ValueError, match="another tokenizer"):
        pretrain.main(flags(train_data=other, validation_data=prepared / "validation"))


def losses(folder) -> list[tuple[int, float]]:
    """Step and loss of every entry of the log, but for evaluations."""
    log = json.loads((folder / "log.json").read_text())
    return [(entry["step"], entry.get("loss")) for entry in log if "eval_loss" not in entry]


def test_a_resumed_run_reads_only_what_is_left_and_refuses_other_settings(flags, finished, tmp_path, monkeypatch):
    interrupted_copy(finished, tmp_path / "run", after=6)
    may_change = {"logging_steps": 2, "save_steps": 4, "dataloader_num_workers": 1}
    with pytest.raises(SettingsMismatch) as error:
        pretrain.main(flags(learning_rate=1e-3, hidden_size=64, **may_change))
    found = re.findall(r"^  (\S+): (.*) there, (.*) now$", str(error.value), re.MULTILINE)
    assert found == [("hidden_size", "32", "64"), ("learning_rate", "0.005", "0.001")]
    read, original = [], PreparedDocuments.__getitems__
    monkeypatch.setattr(PreparedDocuments, "__getitems__", lambda self, keys: read.append(1) or original(self, keys))
    for steps in (12 - 6, 0):
        # Once it is finished, nothing is trained again, also if the model is gone.
        shutil.rmtree(tmp_path / "run" / "model", ignore_errors=True)
        read.clear()
        pretrain.main(flags())
        assert len(read) == steps * 4
        assert_same_weights(tmp_path / "run", finished)
        assert losses(tmp_path / "run") == losses(finished)


def test_shares_of_all_steps_alarm_nobody_on_resume(flags, tmp_path, monkeypatch):
    """Transformers would say that arguments do not match, though the command is the same."""
    said = []
    monkeypatch.setattr(trainer_utils.logger, "warning_once", said.append)
    changes = {"logging_steps": 0.3, "save_steps": 0.25, "eval_steps": 0.4}
    with interrupted_behind("checkpoint-6"):
        pretrain.main(flags(**changes))
    pretrain.main(flags(**changes))
    assert not said
    steps = [entry["step"] for entry in json.loads((tmp_path / "run" / "log.json").read_text()) if "loss" in entry]
    assert steps == [4, 8, 12]


def test_a_log_goes_on_where_a_checkpoint_stands_between_two_logs(prepared, tmp_path):
    """Steps 5 and 6, before the checkpoint, belong to the log of step 8."""

    def measured(folder: str) -> str:
        log = run(small_flags(prepared, tmp_path / folder, logging_steps=4))
        # In the order of the file, without how fast it was.
        return json.dumps([{name: entry[name] for name in entry if name != "tokens_per_second"} for entry in log])

    expected = measured("whole")
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=6)
    assert measured("run") == expected


def test_a_signal_saves_stops_and_the_same_command_goes_on(flags, tmp_path):
    """A terminal signals the whole process group: loader workers must survive it."""
    changes = {"max_steps": 30, "save_steps": 1000, "dataloader_num_workers": 2}
    run(flags(**changes, output_dir=tmp_path / "whole"))
    training = start(flags(**changes))
    while not re.search(r"step 1 of|'loss'", training.output):
        training.check_running()
    training.signal(signal.SIGINT)
    assert training.end() == [128 + signal.SIGINT], training.output[-3000:]
    step = int(re.search("Stopped by SIGINT after step (\\d+)", training.output)[1])
    assert f"checkpoint-{step} is complete: the same command goes on from there." in training.output
    assert 0 < step < 30 and not (tmp_path / "run" / "model").exists()
    run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    # The tokenizer is the same to the byte, however the run went.
    for file in (tmp_path / "whole" / "model").glob("*.json"):
        assert file.read_bytes() == (tmp_path / "run" / "model" / file.name).read_bytes(), file


def test_a_notebook_cell_that_was_interrupted_goes_on_when_it_is_called_again(prepared, tmp_path, monkeypatch):
    """With the names of settings, and with the bytes of the command."""
    settings = {"train_data": prepared / "train", "validation_data": prepared / "validation"}
    settings |= SMALL | {"min_lengths": [0, 60], "probabilities": [0.5, 0.5]}
    run(small_flags(prepared, tmp_path / "command", validation_data=settings["validation_data"]))
    step = MLMTrainer.training_step

    def interrupt(self, *arguments, **options):
        if self.state.global_step == 4:
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments, **options)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="after step 5. .*checkpoint-5 is complete"):
        patch.setattr(MLMTrainer, "training_step", interrupt)
        pretrain(output_dir=tmp_path / "notebook", **settings)
    # The kernel keeps its own way with Ctrl-C.
    assert signal.getsignal(signal.SIGINT) is before
    result = pretrain(output_dir=tmp_path / "notebook", **settings)
    for file in (tmp_path / "command" / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "notebook" / "model" / file.name).read_bytes(), file
    log = json.loads((tmp_path / "command" / "log.json").read_text())
    assert result.model == tmp_path / "notebook" / "model" and result.scores["loss"] == log[-1]["eval_loss"]


def test_second_stage_continues_weights_and_optimizer_once(flags, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "first")
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
    # Interrupted, it resumes its own optimizer and not the first stage's again; a checkpoint can be named, too.
    interrupted_copy(tmp_path / "run", tmp_path / "again", after=2)
    stage["init_from"] = tmp_path / "first" / "checkpoint-12"
    run(flags(**stage, output_dir=tmp_path / "again"))
    assert_same_weights(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "factor": 2.0}], ids=["as it was", "new"])
def test_a_run_from_a_model_keeps_what_no_setting_names(flags, finished, tmp_path, rope):
    """Architecture, rotary positions and rows of the vocabulary."""
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    rows = model.config.vocab_size + 8
    model.resize_token_embeddings(rows)
    if rope is None:
        model.config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    shutil.copytree(finished / "model", tmp_path / "first" / "model")
    model.save_pretrained(tmp_path / "first" / "model")
    stage = {"init_from": tmp_path / "first", "max_length": 128, "max_steps": 2}
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "dropout")
    stage |= dict.fromkeys((*names, "decoder_init_range", "embedding_init_range"))
    run([*flags(**stage), *(["--rope_parameters", json.dumps(rope)] if rope else [])])
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").config
    assert all(getattr(config, name) == getattr(model.config, name) for name in names)
    assert config.vocab_size == rows and config.max_length == 128
    # As in configs/adapt/length.yaml: the model remembers the length that it was trained with before.
    expected = rope | {"original_max_position_embeddings": 64} if rope else model.config.rope_parameters
    assert expected.items() <= config.rope_parameters.items()
    with pytest.raises(SettingsMismatch, match="rope_parameters"):
        pretrain.main([*flags(**stage), "--rope_parameters", '{"rope_type": "yarn", "factor": 3.0}'])


COURSES = {
    "stable, then a decay": {"schedule": "wsd", "decay_steps": 0.5},
    "masks that fall": {"mlm_probability": 0.4, "final_mlm_probability": 0.1, "validation_mlm_probability": 0.2},
    "Muon": {"optimizer": "muon"},
}


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("after", [3, 9])
def test_a_course_that_was_interrupted_anywhere_ends_with_the_same_bits(flags, held_out, tmp_path, course, after):
    changes = COURSES[course] | held_out
    log = run(flags(**changes, output_dir=tmp_path / "whole"))
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=after)
    again = run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert [entry.get("learning_rate") for entry in log] == [entry.get("learning_rate") for entry in again]
    shares = [entry["mlm_probability"] for entry in log if "mlm_probability" in entry]
    assert not shares or shares == pytest.approx([0.4 - 0.3 * step / 11 for step in range(12)])


def test_held_out_masks_do_not_follow_the_course(prepared, tmp_path):
    """So that runs of other courses can be compared."""
    arguments = PretrainingArguments(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    folders = {"train_data": [str(prepared / "train")], "validation_data": [str(prepared / "validation")]}
    labels = []
    for course in ({"mlm_probability": 0.2}, {"mlm_probability": 0.4, "final_mlm_probability": 0.1}):
        data = DataArguments(**folders, **course, max_length=64, micro_batch_tokens=256, validation_mlm_probability=0.2)
        (held_out,) = read_data(data, arguments).held_out
        labels.append(held_out.collator(held_out.documents.__getitems__(next(iter(held_out.sampler))))["labels"])
    assert torch.equal(*labels)


def test_a_stable_stage_and_its_decay_on_other_text_are_two_runs(flags, prepared, tmp_path):
    """Killed in each stage and between them, they end with the same bits."""
    stable = {"schedule": "constant", "max_steps": 9}
    decay = {"schedule": "wsd", "decay_steps": 6, "warmup_steps": 0, "max_steps": 6, "seed": 1}
    decay |= {"train_data": prepared / "validation", "continue_optimizer": True}
    for name in ("whole", "killed"):
        for stage, changes in (("stable", stable), ("decay", decay | {"init_from": tmp_path / name / "stable"})):
            if name == "killed":
                with interrupted_behind("checkpoint-3"):
                    pretrain.main(flags(**changes, output_dir=tmp_path / name / stage))
            log = run(flags(**changes, output_dir=tmp_path / name / stage))
    assert_same_weights(tmp_path / "killed" / "decay", tmp_path / "whole" / "decay")
    rates = [entry["learning_rate"] for entry in log if "loss" in entry]
    assert rates == pytest.approx([5e-3 * (1 - math.sqrt(step / 6)) for step in range(6)])


def test_several_folders_resume_with_the_same_bits(flags, prepared, tmp_path):
    """With other shares, or the folders in another order, it is another run."""
    domain, general = tmp_path / "domain", prepared / "train"
    shutil.copytree(prepared / "validation", domain)
    changes = {"max_steps": 12, "min_lengths": 0, "probabilities": 1, "train_data": f"{domain}:1 {general}:0.5"}
    run(flags(**changes, output_dir=tmp_path / "whole"))
    interrupted_copy(tmp_path / "whole", tmp_path / "run", after=6)
    run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    for other, name in ((f"{domain} {general}", "shares"), (f"{general}:1 {domain}:0.5", "corpus")):
        with pytest.raises(SettingsMismatch, match=f"{name}: "):
            pretrain.main(flags(**changes | {"train_data": other}))


def test_second_stage_from_something_else_is_refused(flags, finished, tmp_path):
    first = shutil.copytree(finished, tmp_path / "first")
    for changes, error, message in (
        ({"init_from": first, "hidden_size": 64}, ValueError, "`hidden_size` is 64"),
        ({"init_from": first / "model", "continue_optimizer": True}, CheckpointError, "not a complete checkpoint"),
        ({"continue_optimizer": True}, ValueError, "needs `init_from`"),
        ({"init_from": first, "continue_optimizer": True, "optimizer": "muon"}, ValueError, "`optimizer`"),
        ({"init_from": tmp_path / "nowhere"}, FileNotFoundError, "`init_from` is .*nowhere"),
    ):
        with pytest.raises(error, match=message):
            pretrain.main(flags(**changes, output_dir=tmp_path / "second"))
    # As if it had been interrupted.
    shutil.rmtree(first / "checkpoint-12")
    with pytest.raises(ValueError, match="has reached only step 9 of 12"):
        pretrain.main(flags(init_from=first, continue_optimizer=True))
    weights = first / "model" / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (b"", b"version https://git-lfs.github.com/spec/v1", whole[:-9]):
        weights.write_bytes(cut)
        with pytest.raises(OSError, match="first/model/model.safetensors has .* bytes and is damaged"):
            pretrain.main(flags(init_from=first))
    weights.write_bytes(whole)
    file = first / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["the"], vocabulary["is"] = vocabulary["is"], vocabulary["the"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="first/model has another tokenizer"):
        pretrain.main(flags(init_from=first))

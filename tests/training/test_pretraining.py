"""examples/pretrain.py: what each promise of the recipe is worth, on the real script and a small corpus."""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.settings import parse_config
from neobert_hf.data.batches import DataArguments
from neobert_hf.data.documents import Documents
from neobert_hf.data.tokenizer import train_bpe
from neobert_hf.training.flops import training_flops
from neobert_hf.training.pretraining import ModelArguments, PretrainingArguments, read_data
from neobert_hf.training.run_checkpoints import complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.models import small_model
from tests.helpers.pretraining_runs import pretrain, run


def parse(flags: list[str]) -> tuple[ModelArguments, DataArguments, PretrainingArguments]:
    return parse_config(ModelArguments, DataArguments, PretrainingArguments, args=flags)


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
    _, settings, arguments = parse(flags(**held_out))
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


def test_flops_against_the_profiler():
    from torch.utils.flop_counter import FlopCounterMode

    model = small_model(NeoBERTForMaskedLM, sparse_prediction=True)
    ids = torch.randint(5, model.config.vocab_size, (3, 40))
    labels = torch.where(torch.rand(3, 40) < 0.2, ids, -100)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).loss.backward()
    expected = training_flops(model.config, 120, 3 * 40**2, int((labels != -100).sum()))
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


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
        ({"min_lengths": "0 5000"}, "No document has 5,000 tokens"),
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


def test_passes_over_the_data_are_a_number_of_steps(flags, prepared, tmp_path):
    folder = prepare(prepared, tmp_path / "data", "--max_documents 50")
    log = run(flags(train_data=folder, max_steps=None, num_train_epochs=2, min_lengths=0, probabilities=1))
    epochs = [entry["epoch"] for entry in log if "loss" in entry]
    ids = sum(map(len, Documents([folder])))
    assert 2 * ids / 1024 <= len(epochs) and epochs[-2] < 2 <= epochs[-1]


def test_corpora_of_two_tokenizers_do_not_mix(flags, prepared, tmp_path):
    """Also not with a byte-level BPE (ablation M3)."""
    texts = [json.loads(line)["text"] for line in (prepared / "train.jsonl").read_text().splitlines()]
    train_bpe(iter(texts), 600, 128).save_pretrained(tmp_path / "bpe")
    other = prepare(prepared, tmp_path / "data", f"--tokenizer {tmp_path}/bpe")
    with pytest.raises(ValueError, match="another tokenizer"):
        pretrain.main(flags(train_data=other, validation_data=prepared / "validation"))

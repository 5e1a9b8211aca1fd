"""examples/extend_length.py: a model reads farther, is measured before and after; runs go on and refuse."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.common.fingerprints import is_held_out
from neobert_hf.common.results import ResultError
from neobert_hf.evaluation.facts import FACT, ask, choose_candidates, find_facts
from neobert_hf.pretraining import preparing
from neobert_hf.pretraining.length import LengthSettings, new_config
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT, small_config
from tests.helpers.pretraining_runs import assert_same_weights, interrupted_behind, kill_twice, start, to_flags
from tests.helpers.word_tokenizer import word_tokenizer


extend_length = load_example("extend_length")
# It was trained with 256 tokens.
MODEL = ROOT / "benchmarks" / "models" / "small"
# Each has more than 512 tokens.
LONG = ("class", "function", "import")
SMALL = {
    "config": ROOT / "configs" / "adapt" / "length.yaml",
    "model": MODEL,
    "max_length": 512,
    "max_steps": 6,
    "eval_steps": 2,
    "learning_rate": 1e-3,
    "global_batch_tokens": 1024,
    "micro_batch_tokens": 512,
    "held_out_share": 0.3,
    "held_out_documents": 12,
    "measured_documents": 2,
    "sample": 2,
    "facts": 4,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "peak_tflops": 0.1,
}


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("length") / "topics.jsonl"
    file.write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)))
    return file


@pytest.fixture
def length_flags(text, tmp_path):
    def build(output_dir=tmp_path / "run", **changes) -> list[str]:
        return to_flags({"output_dir": output_dir, "text": text} | SMALL | changes)

    return build


@pytest.fixture
def extend(length_flags, tmp_path, monkeypatch):
    """Runs the script in this process, with threads for workers; its report."""
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)

    def run(output_dir=tmp_path / "run", **changes) -> dict:
        extend_length.main(length_flags(output_dir, **changes))
        return json.loads((output_dir / "report.json").read_text())

    return run


def test_a_run_reads_longer_texts_and_reports_before_and_after(extend, text, tmp_path):
    folder = tmp_path / "run"
    # Of an interrupted run with another share: it is not measured on.
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "held_out.jsonl").write_text(text.read_text())
    report = extend()
    measured = report["measured"]
    assert list(measured) == ["before", "before, yarn:2", "after"] and report["steps"] == 6
    for curve in measured.values():
        assert list(curve) == ["128", "256", "512"]
        assert all(point["pseudo_perplexity"] > 1 and 0 <= point["found"] <= 1 for point in curve.values())
    # Not the numbers of one model three times.
    assert len({json.dumps(curve) for curve in measured.values()}) == 3
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    assert isinstance(model, NeoBERTForMaskedLM) and model.config.max_length == 512
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    assert model.config.rope_parameters == scaled and not model.config.sparse_prediction
    # Of the documents, those of a quarter and of half of the length or more.
    stored = json.loads((complete_checkpoints(folder)[-1] / "complete.json").read_text())["settings"]
    assert (stored["min_lengths"], stored["probabilities"]) == ([0, 128, 256], [0.2, 0.4, 0.4])
    # What was measured was not trained on, and is long enough to be.
    held_out = [json.loads(line)["text"] for line in (folder / "data" / "held_out.jsonl").open()]
    assert len(held_out) == 12 and all(is_held_out(text, 0.3) for text in held_out)
    for name in ("report.md", "lengths.png", "curves.png"):
        assert (folder / name).stat().st_size > 500
    # The same command neither trains nor measures again.
    newest = complete_checkpoints(folder)[-1].stat().st_mtime_ns
    assert extend() == report and complete_checkpoints(folder)[-1].stat().st_mtime_ns == newest


def test_another_base_and_an_own_mixture(extend, tmp_path):
    report = extend(rope="theta:40000", min_lengths="0 400", probabilities="0.5 0.5", max_steps=2, eval_steps=1)
    assert list(report["measured"]) == ["before", "after"]
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 40000.0}
    stored = json.loads((complete_checkpoints(tmp_path / "run")[-1] / "complete.json").read_text())["settings"]
    assert (stored["min_lengths"], stored["probabilities"]) == ([0, 400], [0.5, 0.5])


def test_all_documents_alike_are_a_mixture_too():
    given = {"model": "m", "text": "t", "max_length": 512}
    whole = LengthSettings(**given, min_lengths=[0], probabilities=[1.0]).of_batches()
    assert (whole["min_lengths"], whole["probabilities"]) == ([0], [1.0])
    with pytest.raises(ValueError, match="`min_lengths` names 1 subsets and `probabilities` 3"):
        LengthSettings(**given, min_lengths=[0])


def test_an_interrupted_run_goes_on_to_the_same_bits(extend, tmp_path):
    whole = extend(tmp_path / "whole")

    with interrupted_behind("checkpoint-4"):
        extend()
    assert extend() == whole
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(CheckpointError, match="rope_parameters: "):
        extend(rope="theta:40000")
    with pytest.raises(ResultError, match="sample: 2 there, 3 now"):
        extend(sample=3)


@pytest.mark.slow
def test_many_more_tokens(extend, tmp_path):
    """32 times as many as the model knows, in one document and in one micro-batch. 16,384 and 32,768 passed, too."""
    length = 8192
    book = tmp_path / "books.jsonl"
    whole = " ".join(topics[name] for name in sorted(topics))
    # Each of some 1.2 times as many tokens.
    pages = [whole[start : start + 5 * length] for start in range(0, 10_000, 1_000)]
    book.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    tokens = {"max_length": length, "micro_batch_tokens": length, "global_batch_tokens": length}
    few = {"sample": 2, "facts": 2, "measured_documents": 1, "held_out_documents": 2}
    report = extend(text=book, max_steps=2, eval_steps=2, **few, **tokens)
    assert list(report["measured"]["after"]) == [str(128 * 2**power) for power in range(int(length / 128).bit_length())]
    assert all(point["pseudo_perplexity"] > 1 for point in report["measured"]["after"].values())
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").config
    assert config.max_length == length and config.rope_parameters["factor"] == length / 256


@pytest.mark.slow
def test_killed_twice_ends_with_the_same_bits(length_flags, tmp_path):
    changes = {"max_steps": 24, "eval_steps": 4, "early_stopping_patience": 9}
    start(length_flags(tmp_path / "whole", **changes), script="extend_length").finish()
    kill_twice(length_flags(**changes), tmp_path / "run", "extend_length")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    reports = [(tmp_path / name / "report.json").read_text() for name in ("run", "whole")]
    assert reports[0] == reports[1]


def test_a_trained_model_finds_facts_and_only_by_the_statement():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = NeoBERTForMaskedLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    candidates = choose_candidates(tokenizer)
    texts = [tokenizer(topics[name], add_special_tokens=False)["input_ids"] for name in LONG]
    assert len(set(candidates)) == 100

    def found(questions) -> dict[str, float]:
        return find_facts(model, questions, candidates, tokenizer.mask_token_id, batch_tokens=1024)

    near, far = (ask(tokenizer, texts, candidates, length, 48) for length in (64, 512))
    assert {len(question.ids) for question in far} == {512}
    assert found(near)["found"] > 0.2 > 0.1 > found(far)["found"]
    # The mask asks for the word of the statement, which lies once before it, at another depth in each text.
    frame = tokenizer(FACT.format(tokenizer.mask_token), add_special_tokens=False)["input_ids"]
    for number, question in enumerate(far):
        ids = question.ids.tolist()
        assert ids[-len(frame) - 1 : -1] == frame
        fact = [candidates[question.answer] if each == tokenizer.mask_token_id else each for each in frame]
        (place,) = [start for start in range(512) if ids[start : start + len(fact)] == fact]
        assert abs(place / 512 - (number + 0.5) / 48) < 0.05
    # With the words of other statements in the same texts the answers are guessed, not found.
    wrong = [type(question)(question.ids, (question.answer + 1) % 100) for question in near]
    assert found(wrong)["found"] < 0.1 and found(wrong)["fact_loss"] > 2 * found(near)["fact_loss"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 256}, "`max_length` is 256, but .*small was trained with 256 tokens already"),
        ({"rope": "yarn:4"}, "`rope` is 'yarn:4'; it must be yarn, linear, native, or theta:"),
        ({"rope": "theta:-1"}, "`rope` is 'theta:-1'"),
        ({"rope": "theta:²"}, "`rope` is 'theta:²'"),
        ({"max_length": 32768, "micro_batch_tokens": 32768, "global_batch_tokens": 32768}, "No document .*the longest"),
        ({"micro_batch_tokens": 256}, "less than one document of `max_length` = 512"),
        ({"text": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"text_column": "body"}, "body"),
        ({"text_subset": "en"}, "is local and has no subset 'en'"),
        ({"sample": 1}, "`sample` is 1"),
        ({"facts": 1}, "`facts` is 1"),
    ],
)
def test_bad_input_is_refused_before_training(extend, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match="(?s)" + message):
        extend(**change)
    assert not complete_checkpoints(tmp_path / "run")


def test_models_whose_positions_end_or_are_scaled_are_refused():
    settings = LengthSettings(model="m", text="t", max_length=512, micro_batch_tokens=512, global_batch_tokens=512)
    with pytest.raises(ValueError, match="`model` m has learned positions, which end at 64 tokens"):
        new_config(settings, small_config(rope=False, max_length=64))
    scaled = small_config(max_length=64, rope_parameters={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match="`rope`: the RoPE of m is scaled already"):
        new_config(settings, scaled)
    settings.rope = "native"
    assert new_config(settings, scaled) == {"max_length": 512}


def test_a_vocabulary_of_few_words_is_refused():
    with pytest.raises(ValueError, match=r"The vocabulary holds \d+ words of 5 letters or more; finding facts needs"):
        choose_candidates(word_tokenizer("The name of the new package is here.", 60, 64))

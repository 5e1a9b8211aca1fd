"""examples/adapt_domain.py: what a run leaves, that it stops, goes on and refuses; and words that are added."""

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from neobert_hf.common.fingerprints import identifying_config
from neobert_hf.pretraining import preparing
from neobert_hf.pretraining.adapting import AdaptationArguments
from neobert_hf.pretraining.domain import DomainSettings
from neobert_hf.pretraining.shards import load_shards, read_manifest
from neobert_hf.pretraining.vocabulary import add_words, choose_words
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT, small_model
from tests.helpers.pretraining_runs import assert_same_weights, interrupted_behind, kill_twice, start, to_flags
from tests.pretraining.test_batches import LENGTHS, first_epochs, sampler


adapt_domain = load_example("adapt_domain")
CONFIG = ROOT / "configs" / "adapt" / "domain.yaml"
SMALL = {
    "config": CONFIG,
    "learning_rate": 5e-3,
    "max_steps": 12,
    "eval_steps": 3,
    "global_batch_tokens": 512,
    "micro_batch_tokens": 128,
    "held_out_share": 0.2,
    "held_out_documents": 6,
    "general_documents": 40,
    "num_proc": 1,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "peak_tflops": 0.1,
}
WITHOUT_GENERAL = {"general": None, "general_documents": None, "replay_share": 0}
ODD = ("kmalloc", "zspage", "vfsmount", "slabinfo")


def domain_texts(number: int) -> list[str]:
    generator = random.Random(0)
    words = [*ODD, "the", "of", "page", "is", "freed", "by", "and", "memory", "a", "list"]
    return [" ".join(generator.choices(words, k=60)) + "." for _ in range(number)]


@pytest.fixture(scope="session")
def domain(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("domain") / "domain.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in domain_texts(80)))
    return file


@pytest.fixture
def domain_flags(finished, corpus, domain, tmp_path):
    def build(output_dir=tmp_path / "run", **changes) -> list[str]:
        sources = {"model": finished / "model", "domain": domain, "general": corpus / "train.jsonl"}
        return to_flags({"output_dir": output_dir} | sources | SMALL | changes)

    return build


@pytest.fixture
def adapt(domain_flags, tmp_path, monkeypatch):
    """Runs the script in this process, with threads for workers; its report."""
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)

    def run(output_dir=tmp_path / "run", **changes) -> dict:
        adapt_domain.main(domain_flags(output_dir, **changes))
        return json.loads((output_dir / "report.json").read_text())

    return run


def texts_of(folder: Path) -> set[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return {tokenizer.decode(row["input_ids"]) for row in load_shards(folder)}


def test_a_run_learns_the_domain_and_reports_before_and_after(adapt, finished, tmp_path, capsys):
    report, folder = adapt(), tmp_path / "run"
    before, after = report["before"], report["after"]
    assert after["loss"] < before["loss"] - 0.3 and after["replay_loss"] != before["replay_loss"]
    assert report["best_step"] == 12 and report["steps"] == 12
    text = (folder / "report.md").read_text()
    assert text in capsys.readouterr().out and "did not fall" not in text
    for name, prefix in (("domain", ""), ("general", "replay_")):
        (row,) = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {name} ")]
        assert row[2:4] == [f"{look[f'{prefix}loss']:.3f}" for look in (before, after)]
    assert text.count("[MASK]") == 2 and [len(guesses) for guesses in after["guesses"]] == [5, 5]
    # The model is whole, and as long as it was.
    model = AutoModelForMaskedLM.from_pretrained(folder / "model")
    first = AutoModelForMaskedLM.from_pretrained(finished / "model")
    assert isinstance(model, NeoBERTForMaskedLM)
    assert identifying_config(model.config) == identifying_config(first.config)
    log = json.loads((folder / "log.json").read_text())
    assert [entry["step"] for entry in log if "eval_replay_loss" in entry] == [0, 3, 6, 9, 12]
    assert (folder / "curves.png").stat().st_size > 10_000
    for name in ("domain", "general"):
        assert not texts_of(folder / "data" / f"{name}_train") & texts_of(folder / "data" / f"{name}_held_out")
    # A quarter of the micro-batches is replayed: some, and by far not all.
    settings = json.loads((complete_checkpoints(folder)[-1] / "complete.json").read_text())
    replayed = settings["cursor"]["subsets"][1]
    assert len(settings["cursor"]["subsets"]) == 2 and 0 < replayed["document"] < 40 and replayed["epoch"] == 0


def test_training_ends_when_the_loss_falls_no_more_and_only_once(adapt, tmp_path, capsys):
    changes = {"learning_rate": 1e-30, "early_stopping_patience": 2, "replay_share": 0, "max_steps": 18}
    report = adapt(**changes)
    assert report["best_step"] == 3 and report["steps"] == 9
    assert report["after"]["loss"] == report["before"]["loss"]
    text = (tmp_path / "run" / "report.md").read_text()
    assert "did not fall" in text and "nothing replayed" in text and "| general |" in text
    # `data/` has no general text to train on, and the same command does not train again.
    assert not (tmp_path / "run" / "data" / "general_train").exists()
    newest = complete_checkpoints(tmp_path / "run")[-1].stat().st_mtime_ns
    assert adapt(**changes) == report
    assert complete_checkpoints(tmp_path / "run")[-1].stat().st_mtime_ns == newest


def test_evaluations_divide_the_steps_and_there_are_no_more_than_asked_for(tmp_path):
    given = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True, "report_to": "none"}
    batches = DomainSettings(model="m", domain="d", general="g", global_batch_tokens=1024, micro_batch_tokens=512)
    train = SimpleNamespace(sampler=sampler())
    text = SimpleNamespace(manifest=SimpleNamespace(tokens=int(np.minimum(LENGTHS, 128).sum())), train=train)
    arguments = AdaptationArguments(**given, max_steps=1000, eval_steps=400)
    assert arguments.planned(batches, 20, text).max_steps == 800
    # Over a text that is read sooner, the last evaluation is at its end or soon after.
    planned = arguments.planned(batches, 6, text)
    assert (planned.max_steps, planned.eval_steps, planned.save_steps) == (800, 400, 400)
    every_step = AdaptationArguments(**given, max_steps=1000, eval_steps=1)
    assert every_step.planned(batches, 6, text).max_steps == -(-len(first_epochs(sampler(), 6)) // 2)
    with pytest.raises(ValueError, match="`save_steps` is 50; this recipe saves at every evaluation: set `eval_steps`"):
        AdaptationArguments(**given, save_steps=50)


def test_the_best_weights_are_kept(adapt, tmp_path):
    """At such a rate the loss falls and then rises."""
    report = adapt(learning_rate=0.2, max_steps=24, schedule="constant", **WITHOUT_GENERAL)
    log = [entry for entry in json.loads((tmp_path / "run" / "log.json").read_text()) if "eval_loss" in entry]
    best = min(log[1:], key=lambda entry: entry["eval_loss"])
    assert best["step"] == report["best_step"] and report["after"]["loss"] == best["eval_loss"]
    assert "not measured: no general text" in (tmp_path / "run" / "report.md").read_text()


def test_an_interrupted_run_goes_on_to_the_same_bits(adapt, tmp_path):
    whole = adapt(tmp_path / "whole", new_words=3)

    with interrupted_behind("checkpoint-6"):
        adapt(new_words=3)
    assert adapt(new_words=3) == whole
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(CheckpointError, match="learning_rate: 0.005 there, 0.001 now"):
        adapt(new_words=3, learning_rate=1e-3)
    with pytest.raises(ValueError, match="(?s)start was made with other settings.*new_words: 3 there, 4 now"):
        adapt(new_words=4)
    # Of another text its words would be others, also where what was prepared of the first one has been deleted.
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"other words {number}"}) + "\n" for number in range(60)))
    shutil.rmtree(tmp_path / "run" / "data")
    with pytest.raises(ValueError, match="(?s)start was made with other settings.*domain_fingerprint"):
        adapt(new_words=3, domain=other)


@pytest.mark.slow
def test_killed_twice_ends_with_the_same_bits(domain_flags, tmp_path):
    changes = {"max_steps": 36, "eval_steps": 4, "new_words": 4, "early_stopping_patience": 9}
    start(domain_flags(tmp_path / "whole", **changes), script="adapt_domain").finish()
    kill_twice(domain_flags(**changes), tmp_path / "run", "adapt_domain")
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "whole")]
    assert reports[0] == reports[1]


def test_the_weights_that_it_starts_from_count(adapt, finished, tmp_path):
    """Not only where they lie."""
    model = tmp_path / "model"
    shutil.copytree(finished / "model", model)
    adapt(model=model, max_steps=3)
    changed = NeoBERTForMaskedLM.from_pretrained(model)
    changed.decoder.bias.data[5] += 1
    changed.save_pretrained(model)
    with pytest.raises(CheckpointError, match="init_from: "):
        adapt(model=model, max_steps=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general": None}, "`replay_share` is 0.25, but `general` names no text"),
        ({"domain": "a.jsonl", "general": "a.jsonl"}, "`general` is the domain itself, 'a.jsonl': name text"),
        ({"domain_subset": "en"}, "is local and has no subset 'en'"),
        ({"domain_subset": "en", "new_words": 2}, "is local and has no subset 'en'"),
        ({"general_subset": "en"}, "is local and has no subset 'en'"),
        (WITHOUT_GENERAL | {"general_documents": 40}, "`general_documents` is 40 without `general`"),
        ({"replay_share": -0.1}, "`replay_share` is -0.1; it must be"),
        ({"replay_share": 1}, "`replay_share` is 1"),
        ({"held_out_share": 0}, "`held_out_share` is 0"),
        ({"held_out_share": 0.001}, "holds 0 documents to hold out.* change `held_out_share`, which is 0.001"),
        ({"held_out_share": 0.999}, "to train on.* change `held_out_share`"),
        ({"new_words": -1}, "`new_words` is -1"),
        ({"new_words": 500}, r"`new_words` is 500; it must be \d+ or less, the number of words that occur 5 times"),
        ({"model": "./nowhere"}, "`model` is './nowhere', but there is no such file or folder"),
        ({"domain": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"domain_column": "body"}, "body"),
        ({"micro_batch_tokens": 32, "global_batch_tokens": 32}, "less than one document of `max_length` = 64"),
        ({"global_batch_tokens": 500}, "must be a multiple of"),
        ({"metric_for_best_model": "accuracy"}, "`metric_for_best_model` is 'accuracy'; this recipe needs 'loss'"),
        ({"max_length": 64}, "Unknown argument '--max_length'"),
    ],
)
def test_bad_input_is_refused_before_training(adapt, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match="(?s)" + message):
        adapt(**change)
    assert not complete_checkpoints(tmp_path / "run")


def test_other_models_are_refused(adapt, finished, corpus, domain, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    small_model(NeoBERTForSequenceClassification, vocab_size=600).save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="classifier', which is not a masked language model of NeoBERT: .*decoder"):
        adapt(model=tmp_path / "classifier")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="of the type 'bert'; it must be a masked language model of NeoBERT"):
        adapt(model=tmp_path / "bert")
    with pytest.raises(FileNotFoundError, match="the output folder of a training run; did you mean '.*model'"):
        adapt(model=finished)
    domain.with_name("empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="is empty: it holds no document"):
        adapt(domain=domain.with_name("empty.jsonl"))


@pytest.mark.parametrize("tied", [False, True])
def test_new_words_change_nothing_for_old_ones(finished, tmp_path, tied):
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    before = small_model(NeoBERTForMaskedLM, vocab_size=600, tie_word_embeddings=tied)
    torch.nn.init.normal_(before.decoder.bias)
    after = small_model(NeoBERTForMaskedLM, vocab_size=600, tie_word_embeddings=tied)
    after.load_state_dict(before.state_dict())
    words, counted = choose_words(domain_texts(80), tokenizer, 5)
    assert set(words) == {*ODD, "memory"} and all(len(pieces) > 1 for pieces in words.values())
    add_words(after, tokenizer, words, tmp_path)
    new = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert loaded.config.vocab_size == 605 and AutoModel.from_pretrained(tmp_path).config.vocab_size == 605
    assert (loaded.decoder.weight is loaded.model.encoder.weight) is tied
    # A text without new words: the same ids, and the same logits but for what a product with more columns rounds.
    text = "the list of a page is freed."
    assert new(text)["input_ids"] == tokenizer(text)["input_ids"]
    with torch.no_grad():
        logits = [model(**new(text, return_tensors="pt")).logits for model in (before, loaded)]
    torch.testing.assert_close(logits[1][..., :600], logits[0], rtol=0, atol=1e-5)
    # A new word is one token: the mean of its pieces, in the embeddings and in the decoder.
    for number, (word, pieces) in enumerate(words.items(), 600):
        assert new(word.upper(), add_special_tokens=False)["input_ids"] == [number]
        assert tokenizer(word, add_special_tokens=False)["input_ids"] == pieces
        assert new.decode([number]) == word
        for weight in ("model.encoder.weight", "decoder.weight", "decoder.bias"):
            tensors = [dict(model.named_parameters(remove_duplicate=False))[weight] for model in (before, loaded)]
            torch.testing.assert_close(tensors[1][number], tensors[0][pieces].mean(0))
    total = [
        sum(len(each(text, add_special_tokens=False)["input_ids"]) for text in domain_texts(80))
        for each in (tokenizer, new)
    ]
    assert total == [counted["pieces"], counted["with_new_words"]]


def test_rows_that_a_model_has_to_spare_are_used(finished, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    model = small_model(NeoBERTForMaskedLM, vocab_size=640)
    words, _ = choose_words(domain_texts(80), tokenizer, 2)
    add_words(model, tokenizer, words, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["decoder.weight"].shape == (640, 64)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 602


def test_words_are_not_added_to_a_byte_level_vocabulary(tmp_path):
    from neobert_hf.pretraining.tokenizer import train_bpe

    with pytest.raises(ValueError, match="`new_words` is 2, but the tokenizer is of the kind BPE"):
        choose_words(domain_texts(9), train_bpe(iter(domain_texts(9)), 300, 64), 2)


def test_every_document_of_a_source_is_in_one_part(corpus, domain, tmp_path, monkeypatch):
    """Also in a run that is interrupted, and of equal documents all in one."""
    monkeypatch.setattr(preparing, "start_workers", ThreadPoolExecutor)
    twice = tmp_path / "twice.jsonl"
    twice.write_text(2 * domain.read_text())
    prepare_data, parts = load_example("prepare_data"), {}
    paths = {"source": twice, "tokenizer": corpus / "tokenizer", "max_length": 128, "documents_per_shard": 10}
    options = paths | {"num_proc": 1, "held_out_share": 0.3}
    for part in ("train", "held_out"):
        prepare_data.main(to_flags(options | {"part": part, "output_dir": tmp_path / part}))
        parts[part] = texts_of(tmp_path / part)
    assert not parts["train"] & parts["held_out"] and len(parts["train"] | parts["held_out"]) == 80
    assert 10 < len(parts["held_out"]) < 40
    assert sum(read_manifest(tmp_path / part).documents for part in parts) == 160
    prepare_shard = preparing.prepare_shard

    def failing(texts, tokenizer_json, manifest, path):
        if path.name == "shard-00004.arrow":
            raise MemoryError
        return prepare_shard(texts, tokenizer_json, manifest, path)

    again = to_flags(options | {"output_dir": tmp_path / "again"})
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "prepare_shard", failing)
        with pytest.raises(MemoryError):
            prepare_data.main(again)
    prepare_data.main(again)
    checksums = [[shard["checksum"] for shard in read_manifest(tmp_path / name).shards] for name in ("train", "again")]
    assert checksums[0] == checksums[1]
    with pytest.raises(ValueError, match="`part` is held_out, but nothing is held out"):
        prepare_data.main(to_flags(paths | {"part": "held_out", "output_dir": tmp_path / "none"}))

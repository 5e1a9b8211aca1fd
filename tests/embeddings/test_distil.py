"""Promises 9, 10, 13 and 16 for examples/distil.py: any teacher, kill -9, ordinary mistakes."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import AutoTokenizer, BertConfig, BertModel

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.data.tables import stream_text
from neobert_hf.embeddings import distil, teacher
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.student import prune_vocabulary
from tests.helpers.embedding_runs import assert_same_weights
from tests.helpers.examples import load_example


SMALL = {
    "passages": 120,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "epochs": 2,
    "batch_size": 16,
    "block_rate": 2e-3,
    "embedding_rate": 1e-3,
    "save_steps": 5,
    "logging_steps": 10,
}


@pytest.fixture(scope="session")
def teachers(corpus, tmp_path_factory) -> dict[str, Path]:
    """`normalised`: the mean of the token states, of length 1. `free`: a linear layer behind [CLS], with prompts."""
    folder = tmp_path_factory.mktemp("teachers")
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(tokenizer), initializer_range=0.2, **sizes)).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    encoder = Transformer(str(folder / "bert"), max_seq_length=48)
    means = [encoder, Pooling(32, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=means).save(str(folder / "normalised"), create_model_card=False)
    free = [encoder, Pooling(32, pooling_mode="cls"), Dense(32, 20)]
    prompts = {"query": "what is ", "passage": "text "}
    SentenceTransformer(modules=free, prompts=prompts).save(str(folder / "free"), create_model_card=False)
    return {name: folder / name for name in ("normalised", "free", "bert")}


@pytest.fixture
def distilled(teachers, corpus, tmp_path, monkeypatch):
    """Run examples/distil.py with changes to the settings; the output folder."""
    monkeypatch.setattr(teacher, "TEXTS_OF_FILE", 100)

    def run(output: Path = tmp_path / "run", **changes) -> Path:
        paths = {"teacher": teachers["normalised"], "texts": corpus / "train.jsonl", "output_dir": output}
        settings = paths | SMALL | changes
        load_example("distil").main([part for name, each in settings.items() for part in (f"--{name}", str(each))])
        return output

    return run


@pytest.mark.parametrize("name", ["normalised", "free"])
def test_the_student_comes_to_lie_in_the_space_of_its_teacher(distilled, teachers, corpus, capsys, name):
    output = distilled(teacher=teachers[name])
    before = float(capsys.readouterr().out.split("before the first: ")[1].split()[0])
    log = json.loads((output / "log.json").read_text())
    assert log[-1]["held_out_cosine"] > max(before, log[0]["held_out_cosine"])
    student, model = SentenceTransformer(str(output / "model")), SentenceTransformer(str(teachers[name]))
    # Texts that are not in the file that it learned from.
    texts = [row["text"] for row in stream_text(str(corpus / "validation.jsonl"), "text")]
    for kind in ("query", "document"):
        assert prompt_of(student, kind) == prompt_of(model, kind)
        found, wanted = (
            each.encode(texts, prompt=prompt_of(each, kind), convert_to_tensor=True) for each in (student, model)
        )
        assert found.norm(dim=1).allclose(torch.ones(len(texts)))
        cosines = F.normalize(found - found.mean(0), dim=1) @ F.normalize(wanted - wanted.mean(0), dim=1).T
        # Without the part that all vectors share, each is still nearer to the teacher's vector of its own text.
        assert cosines.diagonal().mean() > cosines.mean() + 0.3


def test_ctrl_c_saves_and_other_settings_are_refused(distilled, tmp_path, monkeypatch, corpus):
    learn = distil.Training._learn

    def interrupted(training, batch):
        if training.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return learn(training, batch)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(distil.Training, "_learn", interrupted)
        distilled()
    read = {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / "teacher").rglob("*.safetensors")}
    for name, change in (("epochs", 3), ("block_rate", 1e-3), ("texts", corpus / "validation.jsonl")):
        with pytest.raises(SettingsMismatch, match=name):
            distilled(**{name: change})
    distilled()
    assert {file: file.stat().st_mtime_ns for file in read} == read
    assert_same_weights(distilled(tmp_path / "whole"), tmp_path / "run")


def test_a_student_without_layers_and_with_the_used_entries_reads_alike(distilled, teachers, corpus):
    output = distilled(num_hidden_layers=0, vocabulary="used", passages=40)
    old = AutoTokenizer.from_pretrained(teachers["normalised"])
    new = AutoTokenizer.from_pretrained(output / "model")
    assert len(new) < len(old)
    learned, _ = teacher.choose_texts([str(corpus / "train.jsonl")], "text", 40)
    for text in learned:
        # What the teacher read of it.
        entries = [
            each.convert_ids_to_tokens(each(text.words, truncation=True, max_length=48)["input_ids"])
            for each in (old, new)
        ]
        assert entries[0] == entries[1]
    # Words without an entry of their own are divided into pieces that have one.
    others = [row["text"] for row in stream_text(str(corpus / "validation.jsonl"), "text")]
    assert not any(new.unk_token in new.tokenize(text) and old.unk_token not in old.tokenize(text) for text in others)
    assert SentenceTransformer(str(output / "model"))[0].model.config.vocab_size == len(new)


def test_kept_entries_keep_their_order(teachers):
    tokenizer = AutoTokenizer.from_pretrained(teachers["bert"])
    kept = np.arange(0, len(tokenizer) - 100)
    pruned = prune_vocabulary(tokenizer, kept)
    assert pruned.get_vocab() == {entry: number for entry, number in tokenizer.get_vocab().items() if number in kept}


def test_mistakes_are_refused_before_the_teacher_reads(distilled, teachers, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "short.jsonl").write_text('{"text": "One sentence."}\n')
    for change, message in (
        ({"teacher": teachers["bert"]}, "no embedding model"),
        ({"teacher": tmp_path / "none"}, "none"),
        ({"texts": tmp_path / "empty.jsonl"}, "empty"),
        ({"texts": tmp_path / "short.jsonl"}, "holds 1 passages"),
        ({"column": "body"}, "no column 'body'"),
        ({"vocabulary": "some"}, "'all' or 'used'"),
        ({"output": teachers["normalised"]}, "would be replaced: choose another `output_dir`"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            distilled(**change)
    assert not list(tmp_path.rglob("*.safetensors"))

"""Which tokenizers are refused, and which small and foreign ones are not."""

import json
import string
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.common.tokenizers import check_tokenizer, load_tokenizer
from neobert_hf.data.preparing import PrepareArguments, load_fast_tokenizer
from neobert_hf.data.tokenizer import train_bpe, train_wordpiece
from neobert_hf.embeddings.arguments import RerankerArguments
from neobert_hf.embeddings.inference import load_embedding_model
from neobert_hf.embeddings.mining import mine_negatives
from neobert_hf.embeddings.models import (
    build_encoder,
    build_multi_vector_encoder,
    build_reranker,
    build_sparse_encoder,
)
from neobert_hf.evaluation.pseudo_perplexity import recipe as pseudo_perplexity
from neobert_hf.hub.convert import ConvertSettings, convert
from neobert_hf.hub.doctor import check_tokenizer as check_tokenizer_of_folder
from neobert_hf.hub.model_folder import ModelFolder
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.training import starting_points
from neobert_hf.training.starting_points import StartingPoint
from tests.helpers.embedding_runs import described
from tests.helpers.models import ROOT, small_model
from tests.helpers.small_tokenizer import small_tokenizer, tiny_tokenizer


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert(entries, **options) -> BertTokenizer:
    return BertTokenizer(vocab={entry: number for number, entry in enumerate([*SPECIAL, *entries])}, **options)


def word_level(words) -> PreTrainedTokenizerFast:
    vocab = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


LETTERS = [form + letter for form in ("", "##") for letter in string.ascii_lowercase]
WORDS = "about after before city every house language learns model other people public water which words world".split()
SOUND = {
    "a dozen words": tiny_tokenizer(),
    "letters": small_tokenizer(),
    "amino acids": bert("LAGVESIKRDTPNQFYMHCWXUBZO", do_lower_case=False),
    "lower-case phones": bert("aeiouɑɛɪʃθ", do_lower_case=False),
    "Chinese": bert("的一是不了人我在有他这中大来上国"),
    "Russian": bert(["мир", "дом", *"абвгдежзиклмнопрст", *("##" + letter for letter in "абвгдежзиклмнопрст")]),
    "Hindi": bert(["किताब", "घर", "क", *("##" + piece for piece in ("ि", "ा", "िता", "ाब", "ों", "ी"))]),
    "cased": bert([*LETTERS, *map(str.capitalize, WORDS), *string.ascii_uppercase, *WORDS], do_lower_case=False),
    "uncased": bert([*LETTERS, *WORDS]),
    "words only": word_level(["kinase", "ligand", "7"]),
    "bytes": train_bpe(iter(["some text"]), 270, 64),
    "trained on little": train_wordpiece(iter(["Ein kleiner Text über Tokenizer."]), 200, 64),
    "without a vocabulary file": ByT5Tokenizer(),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_tokenizers_pass(name):
    check_tokenizer(SOUND[name], max(SOUND[name].get_vocab().values()) + 1, name)


def test_every_part_of_a_vocabulary_is_needed(tmp_path):
    """The files of a folder, deleted or changed one way or another."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"has no words, only \[PAD\], .*: its vocabulary .* is missing"):
        load_tokenizer(tmp_path)
    # The settings are there, the vocabulary is not.
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} has no words"):
        load_tokenizer(tmp_path)
    bert([f"[unused{number}]" for number in range(95)]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no words"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"tokenizer of {tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    NeoBERTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer. Save the tokenizer of its model"):
        load_tokenizer(tmp_path)
    with pytest.raises(OSError, match="and no model of that id could be loaded from the Hub: "):
        load_tokenizer("nobody/has-this")


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    bert([*LETTERS, *WORDS]).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    with pytest.raises(ValueError, match="lower-cased vocabulary but does not lower-case texts: 'About' becomes .UNK."):
        load_tokenizer(tmp_path)
    # A normaliser of another vocabulary.
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[a-z]"), "☃")
    with pytest.raises(ValueError, match="turns 26 of 36 words of its own vocabulary into .UNK., such as 'a'"):
        check_tokenizer(tokenizer, None, "here")
    # Without an unknown token, what is unknown vanishes.
    silent = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    silent.normalizer = normalizers.Replace(Regex("[ab]"), "d")
    with pytest.raises(ValueError, match="turns 2 of 3 words of its own vocabulary into nothing"):
        check_tokenizer(PreTrainedTokenizerFast(tokenizer_object=silent), None, "here")


def test_ids_and_rows_belong_together():
    tokenizer = small_tokenizer(100)
    check_tokenizer(tokenizer, 100, "here")
    with pytest.raises(ValueError, match="here has ids up to 99, but `vocab_size` of the model is 99"):
        check_tokenizer(tokenizer, 99, "here")
    check_tokenizer(tokenizer, 1_100, "here")
    with pytest.raises(ValueError, match="here has ids up to 99 only, but `vocab_size` of the model is 1,101"):
        check_tokenizer(tokenizer, 1_101, "here")
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="ids up to 100, but"):
        check_tokenizer(tokenizer, 100, "here")
    # Of models of texts and images.
    tokenizer = small_tokenizer(100)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    check_tokenizer(tokenizer, 100, "here")


def load_in_every_room(folder: Path) -> dict:
    """What each command does with the tokenizer of a folder, before its work."""
    name = str(folder)
    prepare = PrepareArguments(source="a.txt", tokenizer=name, output_dir="out")
    reranker = RerankerArguments(name, "datasets.yaml", negatives=1, miner=name)
    pairs = Dataset.from_dict({"query": ["a", "b"], "positive": ["c", "d"], "negatives": [[], []]})
    return {
        "prepare": lambda: load_fast_tokenizer(prepare),
        "search": lambda: PassageEncoder(EmbeddingSettings(name), "cpu"),
        "mteb": lambda: load_embedding_model(name, torch.float32, device="cpu"),
        "dense": lambda: build_encoder(name, 8),
        "sparse": lambda: build_sparse_encoder(name, 8),
        "multi_vector": lambda: build_multi_vector_encoder(name, 8),
        "reranker": lambda: build_reranker(name, 8),
        "miner": lambda: mine_negatives(pairs, described(""), reranker, folder / "mined"),
        "glue": lambda: starting_points.tokenizer_of(StartingPoint(name)),
        "pseudo_perplexity": lambda: pseudo_perplexity.tokenizer_of(name),
        "convert": lambda: convert(ConvertSettings(name, str(folder / "new"), to="original")),
        "doctor": lambda: check_tokenizer_of_folder(ModelFolder(folder)),
    }


@pytest.mark.parametrize("left", [["tokenizer_config.json"], []], ids=["its settings only", "nothing"])
def test_no_room_takes_a_folder_that_lost_its_vocabulary(tmp_path, left):
    small_model(NeoBERTForMaskedLM, rope=True).save_pretrained(tmp_path)
    small_tokenizer(100).save_pretrained(tmp_path)
    for file in tmp_path.glob("*token*"):
        if file.name not in left:
            file.unlink()
    for room, load in load_in_every_room(tmp_path).items():
        # A checkpoint without a tokenizer is healthy, and one that lost a part of it is not.
        if left or room not in ("convert", "doctor"):
            with pytest.raises((ValueError, OSError), match=str(tmp_path)):
                print(room, load())


def test_nothing_else_loads_tokenizers():
    for folder in ("src", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name != "tokenizers.py":
                assert "AutoTokenizer.from_pretrained(" not in file.read_text(), file

"""Which tokenizers are refused, and which small and foreign ones are not."""

import json
import string

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.tokenizers import check_tokenizer, length_to_cut_at, load_tokenizer
from neobert_hf.data.tokenizer import train_bpe
from tests.helpers.models import small_model
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
    "letters": small_tokenizer(),
    "amino acids": bert("LAGVESIKRDTPNQFYMHCWXUBZO", do_lower_case=False),
    "Chinese": bert("的一是不了人我在有他这中大来上国"),
    "Russian": bert(["мир", "дом", *"абвгдежзиклмнопрст", *("##" + letter for letter in "абвгдежзиклмнопрст")]),
    "Hindi": bert(["किताब", "घर", "क", *("##" + piece for piece in ("ि", "ा", "िता", "ाब", "ों", "ी"))]),
    "cased": bert([*LETTERS, *map(str.capitalize, WORDS), *string.ascii_uppercase, *WORDS], do_lower_case=False),
    "uncased": bert([*LETTERS, *WORDS]),
    "words only": word_level(["kinase", "ligand", "7"]),
    "bytes": train_bpe(iter(["some text"]), 270, 64),
    "without a vocabulary file": ByT5Tokenizer(),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_tokenizers_pass(name):
    check_tokenizer(SOUND[name], max(SOUND[name].get_vocab().values()) + 1, name)


LOST = {
    "a config alone": lambda folder: NeoBERTConfig().save_pretrained(folder),
    "settings alone": lambda folder: tiny_tokenizer().save_pretrained(folder) and (folder / "tokenizer.json").unlink(),
    "no words": lambda folder: bert([f"[unused{number}]" for number in range(95)]).save_pretrained(folder),
    "no JSON": lambda folder: (folder / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_folder_that_lost_its_vocabulary_is_refused(lost, tmp_path):
    """Transformers would make a tokenizer of special tokens only."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    LOST[lost](tmp_path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_nowhere_is_named():
    with pytest.raises(OSError, match="nobody/has-this"):
        load_tokenizer("nobody/has-this")


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    bert([*LETTERS, *WORDS]).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    with pytest.raises(ValueError, match="`do_lower_case`"):
        load_tokenizer(tmp_path)
    # A normaliser of another vocabulary.
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[a-z]"), "☃")
    with pytest.raises(ValueError, match="26 of 36 words"):
        check_tokenizer(tokenizer, None, "here")


def test_ids_and_rows_belong_together():
    tokenizer = small_tokenizer(100)
    for rows in (100, 1_100):
        check_tokenizer(tokenizer, rows, "here")
    for rows in (99, 1_101):
        with pytest.raises(ValueError, match=f"`vocab_size` of the model is {rows:,}"):
            check_tokenizer(tokenizer, rows, "here")
    # Of models of texts and images.
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    check_tokenizer(tokenizer, 100, "here")


@pytest.mark.parametrize(
    "rope, of_tokenizer, wanted, expected",
    [
        ({}, 64, 128, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 1000, 1000, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 100, 128, 100),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, 128, 64),
    ],
)
def test_texts_are_cut_at_what_the_model_reads(rope, of_tokenizer, wanted, expected, capsys):
    model = small_model(NeoBERTModel, max_length=64, **({"rope_parameters": rope} if rope else {}))
    assert length_to_cut_at(model, small_tokenizer(model_max_length=of_tokenizer), wanted) == expected
    assert bool(capsys.readouterr().out) is (expected != wanted)

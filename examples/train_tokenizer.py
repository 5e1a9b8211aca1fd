"""A tokenizer from your own text.

    python examples/train_tokenizer.py --source 'corpus/*.parquet' --kind wordpiece --output_dir runs/tokenizer

`wordpiece` is made like bert-base-uncased (NeoBERT's tokenizer): lower case, 30,522 entries, the special tokens and
unused entries at the same ids. `bpe` is byte-level and cased, with 32,000 entries, for the paper's ablation M3; it
knows every byte, so no text gives [UNK].

The same text gives the same `wordpiece` entries each time, but not all at the same ids, since `tokenizers` breaks ties
by chance: models and data of one project need one and the same folder.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from datasets import IterableDataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import BertTokenizer, PreTrainedTokenizerFast

from neobert_hf.common.atomic_writes import atomic_folder
from neobert_hf.common.settings import parse_config
from neobert_hf.common.text_sources import stream_text


BATCH = 1_000
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# As in bert-base-uncased: [PAD] at 0, [UNK] at 100, [MASK] at 103.
WORDPIECE_RESERVED = ["[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass
class TokenizerArguments:
    source: str = field(metadata={"help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)"})
    output_dir: str = field(metadata={"help": "the folder of the tokenizer; must not exist"})
    column: str = field(default="text", metadata={"help": "column that holds the text"})
    split: str = field(default="train", metadata={"help": "split of the dataset; local files are all `train`"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    kind: Literal["wordpiece", "bpe"] = field(default="wordpiece", metadata={"help": "lower-cased, or byte-level"})
    vocab_size: int | None = field(
        default=None, metadata={"help": "most entries; 30,522 for wordpiece and 32,000 for bpe if unset"}
    )
    max_length: int = field(default=4096, metadata={"help": "tokens at which the tokenizer truncates when asked to"})
    max_documents: int | None = field(default=None, metadata={"help": "learn from so many documents; all if unset"})

    def __post_init__(self):
        if self.vocab_size is None:
            self.vocab_size = 30_522 if self.kind == "wordpiece" else 32_000
        # Below: the reserved entries and one letter; the special tokens and every byte.
        fixed = len(WORDPIECE_RESERVED) + 1 if self.kind == "wordpiece" else len(SPECIAL_TOKENS) + 256
        for name, minimum in {"vocab_size": fixed, "max_length": 8, "max_documents": 1}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} is {value}; it must be {minimum} or more for kind {self.kind!r}.")


def read_batches(stream: IterableDataset, column: str, max_documents: int | None) -> Iterator[list[str]]:
    documents = islice(stream, max_documents)
    with tqdm(unit=" documents", total=max_documents, desc="reading", dynamic_ncols=True) as bar:
        while batch := [document[column] or "" for document in islice(documents, BATCH)]:
            yield batch
            bar.update(len(batch))


def train_wordpiece(batches: Iterator[list[str]], vocab_size: int, max_length: int) -> BertTokenizer:
    """Raises ValueError if the text has more different characters than `vocab_size` allows."""
    untrained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    untrained.normalizer = normalizers.BertNormalizer()
    untrained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer gives its special tokens the first ids, in their order. The rarest of more than 1,000 characters
    # become [UNK], as in the tokenizers library's own BERT recipe.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=WORDPIECE_RESERVED, limit_alphabet=min(1_000, vocab_size)
    )
    untrained.train_from_iterator(batches, trainer)
    vocab = untrained.get_vocab()
    if len(vocab) > vocab_size:
        raise ValueError(
            f"The characters of the text, alone and within words, already make {len(vocab):,} entries, more than "
            f"vocab_size, {vocab_size:,}: raise vocab_size to {len(vocab):,} or more."
        )
    # Around the vocabulary only the five special tokens are special: [unused0] in a text is no special token.
    vocab = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    return BertTokenizer(vocab=vocab, **_wrapper_options(max_length))


def train_bpe(batches: Iterator[list[str]], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The whole alphabet of bytes, whether the text has them all or not: nothing is unknown.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(batches, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS, **_wrapper_options(max_length))


def _wrapper_options(max_length: int) -> dict:
    # NeoBERT has no token types.
    return {"model_max_length": max_length, "model_input_names": ["input_ids", "attention_mask"]}


def main() -> None:
    (settings,) = parse_config(TokenizerArguments)
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already: choose another output_dir, or delete it.")
    stream = stream_text(settings.source, settings.column, settings.split, settings.subset)
    batches = read_batches(stream, settings.column, settings.max_documents)
    train = {"wordpiece": train_wordpiece, "bpe": train_bpe}[settings.kind]
    tokenizer = train(batches, settings.vocab_size, settings.max_length)
    with atomic_folder(output) as partial:
        tokenizer.save_pretrained(partial)
    few = (
        ""
        if len(tokenizer) == settings.vocab_size
        else f" ({settings.vocab_size:,} were allowed; the text gave no more)"
    )
    print(f"{output}: {len(tokenizer):,} entries{few}")


if __name__ == "__main__":
    main()

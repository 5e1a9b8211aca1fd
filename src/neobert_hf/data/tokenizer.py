"""Tokenizers for pretraining: trained on your own text (WordPiece or byte-level BPE), or made of a decoder's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import BertTokenizer, PreTrainedTokenizerFast

from neobert_hf.common.files import atomic_folder, folder_lock
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import check_inputs
from neobert_hf.common.settings import check_numbers
from neobert_hf.common.tokenizers import NAMED_TOKENS, check_tokenizer
from neobert_hf.data.rows import is_empty
from neobert_hf.data.shards import check_max_length
from neobert_hf.data.sources import name_of, stream_text


SPECIAL_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
# NeoBERT has no token types.
INPUTS = ["input_ids", "attention_mask"]
# As in bert-base-uncased: [PAD] at 0, [UNK] at 100, [MASK] at 103.
WORDPIECE_RESERVED = ["[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass
class TokenizerArguments:
    """The text, and the kind and size of the tokenizer."""

    source: str = field(
        metadata={
            "help": "a Hub dataset, or a local file, pattern or folder (Parquet, JSONL, text)",
            "path": "or Hub id",
        }
    )
    output_dir: str = field(metadata={"help": "folder to write the tokenizer to; must not exist", "path": True})
    column: str = field(default="text", metadata={"help": "column that holds the text"})
    split: str = field(default="train", metadata={"help": "split of the dataset; local files are all `train`"})
    subset: str | None = field(default=None, metadata={"help": "configuration of a Hub dataset that has several"})
    kind: Literal["wordpiece", "bpe"] = field(default="wordpiece", metadata={"help": "lower-cased, or byte-level"})
    vocab_size: int | None = field(
        default=None, metadata={"help": "maximum number of entries; 30,522 for wordpiece and 32,000 for bpe if unset"}
    )
    max_length: int = field(default=4096, metadata={"help": "tokens at which the tokenizer truncates when asked to"})
    max_documents: int | None = field(default=None, metadata={"help": "learn from this many documents; all if unset"})

    def __post_init__(self):
        check_max_length(self.max_length)
        check_numbers(self, {"vocab_size": "1 or more", "max_documents": "1 or more"})
        if self.vocab_size is None:
            self.vocab_size = 30_522 if self.kind == "wordpiece" else 32_000


@recipe
def train_tokenizer(settings: TokenizerArguments) -> Result:
    """Train a tokenizer on your own text: files, a table, or a Hub dataset.

    `wordpiece` makes a tokenizer like bert-base-uncased (NeoBERT's tokenizer): lower case, 30,522 entries, special
    tokens and unused entries at the same ids. `bpe` makes a byte-level, cased tokenizer with 32,000 entries, for the
    paper's ablation M3; it has an entry for every byte, so no text gives [UNK].

    The same text gives the same `wordpiece` entries each time, but not all at the same ids, since `tokenizers` breaks
    ties by chance. So all models and data of one project must use the same tokenizer folder.

    Returns:
        `output`: the folder, which `AutoTokenizer.from_pretrained` loads.

    Raises:
        ValueError: if the folder exists, or the text has no words.
    """
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already: choose another `output_dir`, or delete it.")
    check_inputs(output, ["*"], {}, {"source": settings.source})
    with folder_lock(output):
        # 1. The vocabulary, from all of the text or its first `max_documents` documents
        texts = stream_text(settings.source, settings.column, settings.split, settings.subset)
        texts = refuse_empty(islice(texts, settings.max_documents), settings)
        texts = tqdm(texts, "reading", settings.max_documents, unit=" documents", dynamic_ncols=True)
        train = {"wordpiece": train_wordpiece, "bpe": train_bpe}[settings.kind]
        tokenizer = train(iter(texts), settings.vocab_size, settings.max_length)
        check_tokenizer(tokenizer, None, f"the column {settings.column!r} of {name_of(settings.source)!r}")

        # 2. The folder
        with atomic_folder(output) as partial:
            tokenizer.save_pretrained(partial)
    note = ""
    if len(tokenizer) < settings.vocab_size:
        note = f" ({settings.vocab_size:,} were allowed; the text gave no more)"
    elif len(tokenizer) > settings.vocab_size:
        note = f" ({settings.vocab_size:,} were asked for; special tokens and single characters are never left out)"
    print(f"{output}: {len(tokenizer):,} entries{note}", flush=True)
    return Result(output=output)


def refuse_empty(texts: Iterator[str], settings: TokenizerArguments) -> Iterator[str]:
    """The texts as they are, and behind the last of them a ValueError, if nothing was visible in any."""
    empty = True
    for text in texts:
        empty = empty and is_empty(text)
        yield text
    if empty:
        raise ValueError(
            f"The documents of {name_of(settings.source)!r} have no text in {settings.column!r}: is it the column with "
            "the text?"
        )


def train_wordpiece(texts: Iterator[str], vocab_size: int, max_length: int) -> BertTokenizer:
    """Train a lower-cased WordPiece vocabulary, with special and unused entries at the ids of bert-base-uncased.

    The 1,000 commonest characters are entries, alone and within words, even if these are more than `vocab_size`.
    """
    untrained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    untrained.normalizer = normalizers.BertNormalizer()
    untrained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer gives its special tokens the first ids, in their order. The rarest of more than 1,000 characters
    # become [UNK], as in the tokenizers library's own BERT recipe.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=WORDPIECE_RESERVED, limit_alphabet=min(1_000, vocab_size)
    )
    untrained.train_from_iterator(texts, trainer)
    # In the tokenizer, only the five special tokens are special: [unused0] in a text is ordinary text.
    vocab = dict(sorted(untrained.get_vocab().items(), key=lambda entry: entry[1]))
    return BertTokenizer(vocab=vocab, model_max_length=max_length, model_input_names=INPUTS)


def train_bpe(texts: Iterator[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level, cased BPE vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # All bytes, even those that the text lacks, so that nothing is ever unknown.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, model_input_names=INPUTS, **SPECIAL_TOKENS
    )


def with_special_tokens(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer of a decoder, such as LLaMA's, with what an encoder needs: [CLS], [SEP], [PAD] and [MASK].

    Tokens that it has are kept. As in the released code (src/neobert/tokenizer), a text then begins with the token for
    the beginning of texts, if there is one, and ends with that for their end: `<s>` and `</s>` of LLaMA 2.
    """
    wanted = {"cls_token": tokenizer.bos_token or "[CLS]", "sep_token": tokenizer.eos_token or "[SEP]"}
    wanted |= {"pad_token": "[PAD]", "mask_token": "[MASK]"}
    tokenizer.add_special_tokens({name: token for name, token in wanted.items() if getattr(tokenizer, name) is None})
    cls, sep = tokenizer.cls_token, tokenizer.sep_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B {sep}",
        special_tokens=[(cls, tokenizer.cls_token_id), (sep, tokenizer.sep_token_id)],
    )
    # Loaded as a LlamaTokenizer, it would get back the post-processor of that class.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        **{name: getattr(tokenizer, name) for name in NAMED_TOKENS if getattr(tokenizer, name) is not None},
    )

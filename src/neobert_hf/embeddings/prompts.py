"""Prompts: how an instruction becomes one, and under which names a model keeps its own.

An instruction is a sentence that tells an embedding model what the task is. A prompt is the exact text that is put
before an input text: the instruction followed by a separator. Sentence Transformers keeps the prompts of a model in
`config_sentence_transformers.json`, by name. A model that was trained here has these:

| Name | |
| --- | --- |
| `query` | what `encode_query`, search and MTEB put before a query: the instruction of one of the datasets |
| `document` | what they put before a document: the same dataset's `document_instruction`, nothing if it has none |
| the name of a dataset | its instruction, if there are several datasets: `encode_query(texts, prompt_name="FEVER")` |
| that name with `-document` | the same for documents |

The paper does not say what the separator is, and the released code handles it in two ways. Its wrapper for MTEB
(scripts/evaluation/wrappers.py) puts `sep_token + " " + bos_token` between instruction and text, for queries and
documents of retrieval and reranking, and puts nothing before other texts. Its script for MTEB (run_mteb.py) does not
use that wrapper and never uses an instruction. It is not known which of these produced the paper's numbers. Here it is
a space in training, and in MTEB a space or special tokens: those that the prompts of the model end with, unless another
one is chosen.
"""

from collections.abc import Iterable
from typing import Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel
from transformers import PreTrainedTokenizerBase


# The separators between an instruction and a text; see `separator_text`.
Separator = Literal["space", "special_tokens"]

# Names under which models keep the prompt of each kind of text. Sentence Transformers gives every model an empty
# `document`, even if the model's own prompt for documents is called `passage`.
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def separator_text(separator: Separator, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the separator between an instruction and a text.

    Args:
        separator: `space`, or `special_tokens`: the end of one text and the beginning of the next, which is
            `[SEP] [CLS]` for BERT's tokenizers, including the published model's, and `</s> <s>` for RoBERTa's. The
            released wrapper uses `bos_token`; BERT's tokenizers have none, so their `cls_token` is used instead.
        tokenizer: the tokenizer of the model.

    Raises:
        ValueError: if the tokenizer lacks these tokens, or treats them as ordinary text.
    """
    if separator == "space":
        return " "
    if separator != "special_tokens":
        raise ValueError(f"`separator` is {separator!r}; it must be space or special_tokens.")
    end, beginning = tokenizer.sep_token or tokenizer.eos_token, tokenizer.bos_token or tokenizer.cls_token
    ids = tokenizer(f"a{end} {beginning}a", add_special_tokens=False)["input_ids"]
    if not end or not beginning or not set(tokenizer.convert_tokens_to_ids([end, beginning])) <= set(ids):
        raise ValueError(
            f"`separator` is special_tokens, but the tokenizer has no special tokens for the end of a text ({end}) and "
            f"its beginning ({beginning}), or reads them as words. Set it to space."
        )
    return f"{end} {beginning}"


def separator_of(prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Separator | None:
    """The separator that the prompts of a model end with; None if all are empty."""
    prompts = [prompt for prompt in prompts if prompt]
    try:
        special = separator_text("special_tokens", tokenizer)
    except ValueError:
        special = None
    if special is not None and any(prompt.rstrip().endswith(special) for prompt in prompts):
        return "special_tokens"
    return "space" if prompts else None


def as_prompt(instruction: str, separator: str = " ") -> str:
    """The prompt for an instruction: the instruction and the separator; empty for an empty instruction.

    White space around the instruction is removed, such as the line break that a YAML block of text ends with.

    Args:
        separator: as returned by `separator_text`.
    """
    instruction = instruction.strip()
    return f"{instruction}{separator}" if instruction else ""


def prompt_of(model: BaseModel, kind: Literal["query", "document"]) -> str:
    """What a model puts before a text of this kind; nothing if it was saved without a prompt for it."""
    return next((model.prompts[name] for name in PROMPT_NAMES[kind] if model.prompts.get(name)), "")


def note_on_prompt(model: SentenceTransformer, who: str, prompt: str, own: str) -> str:
    """A line for the user if texts get a prompt that the model was not saved with; otherwise empty.

    Args:
        who: the beginning of the line: `queries get`.
        own: the prompt that the model itself would use.
    """
    if prompt == own or (prompt and prompt in model.prompts.values()):
        return ""
    known = f"the model's own is {own!r}" if any(model.prompts.values()) else "the model was saved without prompts"
    return f"note: {who} the prompt {prompt!r}; {known}."

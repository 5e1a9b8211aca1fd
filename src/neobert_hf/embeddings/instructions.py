"""Instructions and prompts: how an instruction and a text are joined, and how model cards describe prompts.

An instruction is a sentence that tells an embedding model what the task is. A prompt is the exact text that is put
before an input text: the instruction followed by a separator.

The paper does not say what the separator is, and the released code handles it in two ways. Its wrapper for MTEB
(scripts/evaluation/wrappers.py) puts `sep_token + " " + bos_token` between instruction and text, for queries and
documents of retrieval and reranking, and puts nothing before other texts. Its script for MTEB (run_mteb.py) does not
use that wrapper and never uses an instruction. It is not known which of these produced the paper's numbers. Here the
separator can be chosen, a space or special tokens, in training, evaluation and search. A model must be used with
prompts like those it was trained with. Therefore its prompts are saved with their separator, and code that uses
instructions of its own takes the separator from the saved prompts.
"""

import json
from collections.abc import Iterable
from typing import Literal

from transformers import PreTrainedTokenizerBase


# The separators between an instruction and a text; see `separator_text`.
Separator = Literal["space", "special_tokens"]

# How to use a model with prompts, in words and as an example, by its Sentence Transformers class or its kind.
PROMPT_USE = {
    "CrossEncoder": (
        "`predict` and `rank` put the prompt `query` before the query of each pair.",
        'print(model.predict([("a query", "a document"), ("a query", "another document")]))',
    ),
    "contextual": (
        "`encode_query` uses the prompt `query`, `encode_document` the prompt `document`, and `encode` no prompt.",
        'queries = model.encode_query(["a query"], dataset_embeddings=context)\n'
        'documents = model.encode_document(["a document", "another document"], dataset_embeddings=context)\n'
        "print(model.similarity(queries, documents))",
    ),
    "others": (
        "`encode_query` uses the prompt `query`, `encode_document` the prompt `document`, and `encode` no prompt.",
        'queries = model.encode_query(["a query"])\n'
        'documents = model.encode_document(["a document", "another document"])\n'
        "print(model.similarity(queries, documents))",
    ),
}


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
    if not end or not beginning:
        raise ValueError(
            f"`separator` is special_tokens, but the tokenizer has {end!r} for the end of a text and {beginning!r} for "
            "its beginning. Set it to space."
        )
    ids = tokenizer(f"a{end} {beginning}a", add_special_tokens=False)["input_ids"]
    if not set(tokenizer.convert_tokens_to_ids([end, beginning])) <= set(ids):
        raise ValueError(
            f"`separator` is special_tokens, but the tokenizer treats {end} {beginning} as words. Set it to space."
        )
    return f"{end} {beginning}"


def separator_of(prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Separator | None:
    """The separator that the prompts of a model end with; None if all are empty."""
    prompts = [prompt for prompt in prompts if prompt]
    try:
        special = separator_text("special_tokens", tokenizer)
    except ValueError:
        special = None
    if special is not None and any(prompt.endswith(special) for prompt in prompts):
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


def add_prompt(prompt: str, texts: list[str]) -> list[str]:
    """Texts with the prompt before them, for functions that have no argument for a prompt."""
    return [prompt + text for text in texts]


def describe_prompts(prompts: dict[str, str], kind: str) -> str:
    """The Markdown part of a model card about the prompts saved with a model; empty if there are none.

    Args:
        prompts: by name, as in `config_sentence_transformers.json`.
        kind: the model's Sentence Transformers class, or `contextual` for a contextual model.
    """
    prompts = {name: prompt for name, prompt in prompts.items() if prompt}
    if not prompts:
        return ""
    use, example = PROMPT_USE.get(kind, PROMPT_USE["others"])
    both = any(name == "document" or name.endswith("-document") for name in prompts)
    texts = "before queries and before documents" if both else "before each query"
    lines = [f"The model was trained with a prompt {texts}. {use} `prompt_name` selects another:", ""]
    # As JSON strings, to show the space at the end of a prompt, which matters.
    lines += [f"- `{name}`: `{json.dumps(prompt, ensure_ascii=False)}`" for name, prompt in prompts.items()]
    return "\n".join([*lines, "", "```python", example, "```"])

"""Instructions and prompts: how an instruction and a text are joined, and how prompts are shown.

An instruction is a sentence that tells an embedding model what is asked of it. A prompt is what is put before a text
as it is: the instruction with what separates the two.

The paper does not say what separates them, and the code that was released does it in two ways: its wrapper for MTEB
(scripts/evaluation/wrappers.py) puts `sep_token + " " + bos_token` between them, before queries and documents of
retrieval and reranking, and nothing before other texts; its script for MTEB (run_mteb.py) does not use that wrapper and
puts no instruction before anything. With which of these the paper's numbers were measured is not known. Here both
separators can be chosen, in training, evaluation and search. A model must be asked the way that it was trained: its
prompts are saved with their separator, and what asks with others of its own takes the separator from them.
"""

import json
from collections.abc import Iterable
from typing import Literal

from transformers import PreTrainedTokenizerBase


# What may stand between an instruction and a text; see `separator_text`.
Separator = Literal["space", "special_tokens"]

# How a model with prompts is used, in words and as an example, by its class of Sentence Transformers, or its kind.
PROMPT_USE = {
    "CrossEncoder": (
        "`predict` and `rank` put `query` before the query of each pair.",
        'print(model.predict([("a query", "a document"), ("a query", "another document")]))',
    ),
    "contextual": (
        "`encode_query` puts `query` before a text, `encode_document` puts `document`, and `encode` nothing.",
        'queries = model.encode_query(["a query"], dataset_embeddings=context)\n'
        'documents = model.encode_document(["a document", "another document"], dataset_embeddings=context)\n'
        "print(model.similarity(queries, documents))",
    ),
    "others": (
        "`encode_query` puts `query` before a text, `encode_document` puts `document`, and `encode` nothing.",
        'queries = model.encode_query(["a query"])\n'
        'documents = model.encode_document(["a document", "another document"])\n'
        "print(model.similarity(queries, documents))",
    ),
}


def separator_text(separator: Separator, tokenizer: PreTrainedTokenizerBase) -> str:
    """What stands between an instruction and a text, as text.

    Args:
        separator: `space`, or `special_tokens`: the end of one text and the beginning of the next, which is
            `[SEP] [CLS]` for BERT's tokenizers, the published model's among them, and `</s> <s>` for RoBERTa's. The
            released wrapper asks for a `bos_token`; BERT's tokenizers have none, and their `cls_token` stands for it.
        tokenizer: of the model.

    Raises:
        ValueError: if the tokenizer lacks these tokens, or reads them as ordinary text.
    """
    if separator == "space":
        return " "
    if separator != "special_tokens":
        raise ValueError(f"`separator` is {separator!r}; it must be space or special_tokens.")
    end, beginning = tokenizer.sep_token or tokenizer.eos_token, tokenizer.bos_token or tokenizer.cls_token
    if not end or not beginning:
        raise ValueError(
            f"`separator` is special_tokens; the tokenizer has {end!r} for the end of a text and {beginning!r} for "
            "its beginning. Set it to space."
        )
    ids = tokenizer(f"a{end} {beginning}a", add_special_tokens=False)["input_ids"]
    if not set(tokenizer.convert_tokens_to_ids([end, beginning])) <= set(ids):
        raise ValueError(
            f"`separator` is special_tokens; the tokenizer reads {end} {beginning} as words. Set it to space."
        )
    return f"{end} {beginning}"


def separator_of(prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Separator | None:
    """With which separator the prompts of a model end; None if all are empty."""
    prompts = [prompt for prompt in prompts if prompt]
    try:
        special = separator_text("special_tokens", tokenizer)
    except ValueError:
        special = None
    if special is not None and any(prompt.endswith(special) for prompt in prompts):
        return "special_tokens"
    return "space" if prompts else None


def as_prompt(instruction: str, separator: str = " ") -> str:
    """What is put before a text: the instruction and what separates the two, or nothing.

    A line break at the end, as YAML leaves after a block of text, is not part of the instruction.

    Args:
        separator: as `separator_text` gives it.
    """
    instruction = instruction.strip()
    return f"{instruction}{separator}" if instruction else ""


def add_prompt(prompt: str, texts: list[str]) -> list[str]:
    """Texts with their prompt, for what takes no prompt beside them."""
    return [prompt + text for text in texts]


def describe_prompts(prompts: dict[str, str], kind: str) -> str:
    """The part of a model card on the prompts that a model is saved with, in Markdown; empty if there are none.

    Args:
        prompts: by name, as `config_sentence_transformers.json` holds them.
        kind: the model's class of Sentence Transformers; `contextual` of a contextual one.
    """
    prompts = {name: prompt for name, prompt in prompts.items() if prompt}
    if not prompts:
        return ""
    use, example = PROMPT_USE.get(kind, PROMPT_USE["others"])
    both = any(name == "document" or name.endswith("-document") for name in prompts)
    texts = "before queries and before documents" if both else "before each query"
    lines = [f"The model was trained with a prompt {texts}. {use} Another is chosen by `prompt_name`:", ""]
    # As JSON, since the space at the end of a prompt counts.
    lines += [f"- `{name}`: `{json.dumps(prompt, ensure_ascii=False)}`" for name, prompt in prompts.items()]
    return "\n".join([*lines, "", "```python", example, "```"])

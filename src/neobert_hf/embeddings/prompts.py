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

The separator is a space. In MTEB it may also be special tokens; see `choose_separator` in `evaluation/mteb/recipe.py`.
"""

from typing import Literal

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel


# Names under which models keep the prompt of each kind of text. Sentence Transformers gives every model an empty
# `document`, even if the model's own prompt for documents is called `passage`.
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def as_prompt(instruction: str, separator: str = " ") -> str:
    """The prompt for an instruction: the instruction and the separator; empty for an empty instruction.

    White space around the instruction is removed, such as the line break that a YAML block of text ends with.
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

"""Instructions and prompts: how an instruction and a text are joined, and how prompts are shown.

An instruction is a sentence that tells an embedding model what is asked of it. A prompt is what is put before a text
as it is: the instruction with what separates the two.
"""

import json


# How a model with prompts is used, in words and as an example, by its class of Sentence Transformers.
PROMPT_USE = {
    "CrossEncoder": (
        "`predict` and `rank` put `query` before the query of each pair.",
        'print(model.predict([("a query", "a document"), ("a query", "another document")]))',
    ),
    "others": (
        "`encode_query` puts `query` before a text, `encode_document` puts `document`, and `encode` nothing.",
        'queries = model.encode_query(["a query"])\n'
        'documents = model.encode_document(["a document", "another document"])\n'
        "print(model.similarity(queries, documents))",
    ),
}


def as_prompt(instruction: str) -> str:
    """What is put before a text: the instruction and one space, or nothing.

    The paper does not say what stands between the two. A model must be asked the way that it was trained, so there is
    one answer for the whole package. A line break at the end, as YAML leaves after a block of text, is not part of it.
    """
    instruction = instruction.strip()
    return f"{instruction} " if instruction else ""


def add_prompt(prompt: str, texts: list[str]) -> list[str]:
    """Texts with their prompt, for what takes no prompt beside them."""
    return [prompt + text for text in texts]


def describe_prompts(prompts: dict[str, str], sentence_class: str) -> str:
    """The part of a model card on the prompts that a model is saved with, in Markdown; empty if there are none.

    Args:
        prompts: by name, as `config_sentence_transformers.json` holds them.
        sentence_class: the model's class of Sentence Transformers.
    """
    prompts = {name: prompt for name, prompt in prompts.items() if prompt}
    if not prompts:
        return ""
    use, example = PROMPT_USE["CrossEncoder" if sentence_class == "CrossEncoder" else "others"]
    lines = [f"The model was trained with a prompt before each query. {use} Another is chosen by `prompt_name`:", ""]
    # As JSON, since the space at the end of a prompt counts.
    lines += [f"- `{name}`: `{json.dumps(prompt, ensure_ascii=False)}`" for name, prompt in prompts.items()]
    return "\n".join([*lines, "", "```python", example, "```"])

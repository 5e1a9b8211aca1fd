"""How an instruction and a text are joined, in fine-tuning, evaluation and search alike."""


def as_prompt(instruction: str) -> str:
    """What is put before a text: the instruction and one space, or nothing.

    The paper does not say what stands between the two. A model must be asked the way that it was trained, so there is
    one answer for the whole package.
    """
    return f"{instruction} " if instruction else ""

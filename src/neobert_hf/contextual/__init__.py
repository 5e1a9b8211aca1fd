"""Contextual document embeddings (CDE): a model, clusters of similar rows, and its training."""


def __getattr__(name: str):
    # Imported when it is asked for: inference needs less than training.
    if name != "train_contextual":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from neobert_hf.contextual.recipe import train_contextual

    return train_contextual

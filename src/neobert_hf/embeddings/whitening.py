"""Whitening: a linear layer after the pooling that makes all directions of the embeddings equally long.

The pooled hidden states of a masked language model are nearly parallel: they differ along few directions, and those say
little about what a text is about. Contrastive training has to spread them out before it can learn anything else, which
takes most of a short training. Whitening spreads them out before the first step.

References:
    https://arxiv.org/abs/2103.15316 and https://arxiv.org/abs/2104.01767, which whiten without training.
"""

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from sklearn.covariance import ledoit_wolf
from torch import nn

from neobert_hf.embeddings.models import saved_modules
from neobert_hf.embeddings.recipe import Run, TrainingData


def add_whitening(model: SentenceTransformer, run: Run) -> None:
    """Append the linear layers that the model was saved with or, if it has none and `whiten` asks for it, a new one.

    On resume they are loaded from the checkpoint, even if it holds only adapters (LoRA) beside them.
    """
    layers = trained_layers(str(run.checkpoint or run.settings.model))
    if not layers and run.settings.whiten:
        layers = [whitening_layer(pooled_states(model, run.data, run.settings.whiten))]
    for layer in layers:
        model.append(layer.to(model.device))


def trained_layers(path: str) -> list[Dense]:
    """The linear layers after the pooling of a Sentence Transformers model (folder or Hub id); others have none."""
    # The linear layers of late-interaction models take single tokens.
    return [layer for layer in saved_modules(path, Dense) if layer.module_input_name == "sentence_embedding"]


def pooled_states(model: SentenceTransformer, data: TrainingData, count: int) -> torch.Tensor:
    """Embeddings of evenly spaced queries and documents, about as many from each dataset, with their prompts.

    Args:
        count: texts in all; fewer if the datasets are small.

    Returns:
        (texts, width), float32.
    """
    states, share = [], -(-count // (2 * len(data.train)))
    for name, rows in data.train.items():
        description, sample = data.descriptions[name], rows.select(range(0, len(rows), -(-len(rows) // share)))
        for column, prompt in (("query", description.prompt), ("positive", description.document_prompt)):
            states.append(model.encode(sample[column][:], prompt=prompt, convert_to_tensor=True).float().cpu())
    return torch.cat(states)


def whitening_layer(states: torch.Tensor) -> Dense:
    """A linear layer after which these embeddings have mean 0, no correlations, and all directions the same variance.

    Their covariance is estimated by https://doi.org/10.1016/S0047-259X(03)00096-4 (Ledoit and Wolf): the fewer the
    texts, the more equal the variances of the directions are assumed to be, so that directions of almost no variance
    are not amplified into noise. The outputs are sorted: the embeddings differed most along the first ones.

    Args:
        states: (texts, width).

    Raises:
        ValueError: if there are too few texts, or all are the same.
    """
    mean = states.double().mean(0)
    covariance, _ = ledoit_wolf(states.double().numpy())
    variances, directions = torch.linalg.eigh(torch.from_numpy(covariance))
    if not variances.min() > 0:
        raise ValueError(
            f"The embeddings of {len(states):,} texts, for `whiten`, do not differ in every direction: raise `whiten`, "
            "give more pairs, or set `whiten` to 0."
        )
    weight = (directions / variances.sqrt()).T.flip(0)
    width = states.shape[1]
    start = {"init_weight": weight.float(), "init_bias": (-weight @ mean).float()}
    return Dense(width, width, activation_function=nn.Identity(), **start)

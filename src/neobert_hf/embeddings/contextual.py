"""Contextual document embeddings as a Sentence Transformers model: building one, and the context that it reads.

The model is one module, whose output is the embedding itself. Without a context it embeds with its first stage, with
one with its second:

    context = embed_context(model, corpus, seed=0)
    queries = model.encode_query(texts, dataset_embeddings=context)

A context belongs to what was embedded with it. Embeddings of two contexts cannot be compared.
"""

import hashlib
import random
from collections.abc import Iterable
from inspect import signature

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.modules import Transformer
from torch.nn import functional as F
from transformers import AutoConfig

from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTContextualModel
from neobert_hf.common.token_limits import tokens_read
from neobert_hf.embeddings.inference import check_encoder, check_finite, prompt_of


# Which output of the model is the embedding, in the words of Sentence Transformers.
MODALITY_CONFIG = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
# Keys of an encoder's config that say which class it is of, and not how it is built.
NOT_INHERITED = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


def build_contextual_encoder(path: str, max_length: int, **context: float) -> SentenceTransformer:
    """A contextual model, in float32, whose stages both start as the encoder in `path`; or the one that is there.

    Args:
        path: folder or Hub id of a NeoBERT encoder, of a dense model on one, or of a contextual model.
        max_length: tokens; longer texts are cut.
        context: settings of `NeoBERTContextualConfig`: `context_size`, `context_dropout`, `soft_prompts`,
            `text_position`.

    Raises:
        ValueError: if the model is no NeoBERT with RoPE, or a contextual one with other settings.
    """
    config = AutoConfig.from_pretrained(path)
    if isinstance(config, NeoBERTContextualConfig):
        if other := {name: getattr(config, name) for name in context if getattr(config, name) != context[name]}:
            raise ValueError(f"{path} is a contextual model with {other}; the settings say {context}. Set the same.")
        model = SentenceTransformer(path, model_kwargs={"dtype": torch.float32})
        check_encoder(model[0], path)
    elif isinstance(config, NeoBERTConfig):
        model = _from_encoder(path, config, **context)
    else:
        raise ValueError(f"{path} is a model of type {config.model_type!r}; both stages of CDE must be a NeoBERT here.")
    model.max_seq_length = tokens_read(model[0].model, max_length, model.max_seq_length)
    return model


def _from_encoder(path: str, config: NeoBERTConfig, **context: float) -> SentenceTransformer:
    inherited = {key: value for key, value in config.to_diff_dict().items() if key not in NOT_INHERITED}
    model = NeoBERTContextualModel(NeoBERTContextualConfig(**inherited | context))
    transformer = Transformer(
        path,
        model_kwargs={"dtype": torch.float32},
        modality_config=MODALITY_CONFIG,
        module_output_name="sentence_embedding",
        # Every text needs a row, before which its context lies. The encoder strips the padding by itself.
        unpad_inputs=False,
    )
    check_encoder(transformer, path)
    encoder = transformer.model.state_dict()
    model.first_stage.load_state_dict(encoder)
    model.second_stage.load_state_dict(encoder)
    transformer.model = model
    # Sentence Transformers makes its module of a folder only, and keeps what the model in it takes.
    transformer._declared_forward_params = set(signature(model.forward).parameters)
    sentences = SentenceTransformer(modules=[transformer], similarity_fn_name="cosine")
    # So that `encode` passes a context on; kept in modules.json.
    sentences.module_kwargs = {name: ["dataset_embeddings"] for name, _ in sentences.named_children()}
    return sentences


def is_contextual(model: BaseModel | list[Transformer]) -> bool:
    """Whether a model, or a list of its modules, embeds with a context."""
    return isinstance(getattr(model[0], "model", None), NeoBERTContextualModel)


def refuse_contextual(model: BaseModel | list[Transformer], path: str) -> None:
    """For recipes and helpers that know no context: they would read the first stage, which is for contexts only.

    Raises:
        ValueError: if the model is a contextual one.
    """
    if is_contextual(model):
        raise ValueError(f"{path} is a contextual model, which needs a context: give a model that embeds without one.")


def embed_context(
    model: SentenceTransformer, texts: Iterable[str], seed: int, prompt: str | None = None, **options
) -> torch.Tensor:
    """The context of a corpus: embeddings of the first stage, at full width, float32 and not normalised.

    Args:
        texts: the corpus, or its training split. As many as a context holds are drawn from the different ones.
        seed: of the draw.
        prompt: what is put before each of them; the model's own for documents if None.
        options: further arguments of `encode`, such as `batch_size`.

    Returns:
        (context_size, hidden_size) on the CPU. Keep it with whatever is embedded with it.

    Raises:
        ValueError: if the model is no contextual one, or there is no text.
        FloatingPointError: if an embedding is not finite.
    """
    if not is_contextual(model):
        raise ValueError("The model has no context: `embed_context` needs a contextual embedding model.")
    drawn = draw_context(texts, model[0].model.config.context_size, seed)
    prompt = prompt_of(model, "document") if prompt is None else prompt
    fixed = {"normalize_embeddings": False, "precision": "float32", "convert_to_tensor": True}
    with model.truncate_embeddings(None):
        context = model.encode(drawn, prompt=prompt, **options | fixed).float().cpu()
    check_finite(context.numpy(), drawn)
    return context.clone()


def draw_context(texts: Iterable[str], size: int, seed: int) -> list[str]:
    """So many of the different texts, drawn without replacement; of fewer texts each, as often as is needed.

    Raises:
        ValueError: if there is no text.
    """
    different = [text for text in dict.fromkeys(texts) if text.strip()]
    if not different:
        raise ValueError("A context needs documents; there is no text that is not empty.")
    generator = random.Random(seed)
    drawn = []
    while len(drawn) < size:
        drawn += generator.sample(different, min(size - len(drawn), len(different)))
    return drawn


def context_fingerprint(context: torch.Tensor) -> str:
    """A hash that tells a context from others, and from the same vectors in another order."""
    content = context.detach().cpu().float().contiguous()
    digest = hashlib.sha256(f"{tuple(content.shape)}".encode())
    digest.update(content.numpy().tobytes())
    return digest.hexdigest()[:16]


def mean_cosine(context: torch.Tensor) -> float:
    """Of all pairs of different rows. Near 1 the first stage has collapsed: any context is then as good as another."""
    unit = F.normalize(context.detach().double(), dim=-1)
    rows = len(unit)
    # The squared length of the sum has every pair twice, and each row with itself once.
    return ((unit.sum(0).square().sum() - rows) / (rows * (rows - 1))).item() if rows > 1 else 1.0

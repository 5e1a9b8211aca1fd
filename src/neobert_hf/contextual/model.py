"""Contextual document embeddings as a Sentence Transformers model: building one, and the context that it reads.

The model is one module, whose output is the embedding itself. Without a context it embeds with its first stage, and
with a context it embeds with its second stage:

    context = embed_context(model, corpus, seed=0)
    queries = model.encode_query(texts, dataset_embeddings=context)

Keep a context together with what was embedded with it. Embeddings made with two contexts cannot be compared.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from transformers import AutoConfig

from neobert_hf import NeoBERTConfig, NeoBERTContextualConfig, NeoBERTContextualModel, NeoBERTModel
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.embeddings.models import check_encoder, check_finite, cut_texts_at, is_contextual
from neobert_hf.embeddings.prompts import prompt_of


# Keys of an encoder's config that name its class or version and do not describe its architecture.
NOT_INHERITED = ("model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


def build_contextual_encoder(path: str, max_length: int, **context: float) -> SentenceTransformer:
    """The contextual model in `path`, in float32, or a new one whose two stages both start as the encoder in `path`.

    Args:
        path: folder or Hub id of a NeoBERT encoder, of a dense model on one, or of a contextual model.
        max_length: tokens; longer texts are cut.
        context: settings of `NeoBERTContextualConfig`: `context_size`, `context_dropout`, `soft_prompts`,
            `text_position`.

    Raises:
        ValueError: if the model is not a NeoBERT with RoPE, reads fewer tokens than the context has documents, or is a
            contextual model with other settings.
    """
    config = AutoConfig.from_pretrained(path)
    if isinstance(config, NeoBERTContextualConfig):
        if other := {name: getattr(config, name) for name in context if getattr(config, name) != context[name]}:
            raise ValueError(
                f"{path} is a contextual model with {other}, but the settings are {context}. Set the model's values."
            )
        model = SentenceTransformer(path, model_kwargs={"dtype": torch.float32})
        check_encoder(model[0], path)
    elif isinstance(config, NeoBERTConfig):
        if context["context_size"] > config.max_length:
            raise ValueError(
                f"`context_size` is {context['context_size']:,}, but {path} reads {config.max_length:,} tokens, and a "
                "document of a context takes the place of one: set it lower."
            )
        model = _from_encoder(path, config, **context)
    else:
        raise ValueError(f"{path} is a model of type {config.model_type!r}; both stages of CDE must be a NeoBERT here.")
    cut_texts_at(model, max_length)
    return model


def _from_encoder(path: str, config: NeoBERTConfig, **context: float) -> SentenceTransformer:
    inherited = {key: value for key, value in config.to_diff_dict().items() if key not in NOT_INHERITED}
    model = NeoBERTContextualModel(NeoBERTContextualConfig(**inherited | context))
    encoder = NeoBERTModel.from_pretrained(path, dtype=torch.float32).state_dict()
    model.first_stage.load_state_dict(encoder)
    model.second_stage.load_state_dict(encoder)
    with TemporaryDirectory() as folder:
        # Its own `save_pretrained` writes in the first process of a distributed run only.
        model.config.save_pretrained(folder)
        save_file(model.state_dict(), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        load_tokenizer(path, config.vocab_size).save_pretrained(folder)
        transformer = Transformer(
            folder,
            # Which output of the model is the embedding.
            modality_config={"text": {"method": "forward", "method_output_name": "pooler_output"}},
            module_output_name="sentence_embedding",
            # The context is put before each text, so each text needs its own row. The model strips the padding itself.
            unpad_inputs=False,
        )
    sentences = SentenceTransformer(modules=[transformer], similarity_fn_name="cosine")
    # Let `encode` pass a context on to the module. This is saved in modules.json.
    sentences.module_kwargs = {name: ["dataset_embeddings"] for name, _ in sentences.named_children()}
    return sentences


def embed_context(
    model: SentenceTransformer, texts: Iterable[str], seed: int, prompt: str | None = None, batch_size: int = 32
) -> torch.Tensor:
    """The context of a corpus: embeddings of the first stage, at full width, float32 and not normalised.

    Args:
        texts: the corpus, or its training split. As many distinct texts as a context holds are drawn.
        seed: of the draw.
        prompt: is put before each text; the model's own prompt for documents if None.
        batch_size: texts computed at a time.

    Returns:
        (context_size, hidden_size) on the CPU. Keep it with whatever is embedded with it.

    Raises:
        ValueError: if the model is not contextual, or there is no text.
        FloatingPointError: if an embedding is not finite.
    """
    if not is_contextual(model):
        raise ValueError("The model takes no context: `embed_context` needs a contextual embedding model.")
    drawn = draw_context(texts, model[0].model.config.context_size, seed)
    prompt = prompt_of(model, "document") if prompt is None else prompt
    # Also of a model that cuts its embeddings.
    with model.truncate_embeddings(None):
        context = model.encode(drawn, prompt=prompt, batch_size=batch_size, convert_to_tensor=True).float().cpu()
    check_finite(context.numpy(), drawn)
    return context.clone()


def draw_context(texts: Iterable[str], size: int, seed: int) -> list[str]:
    """Draw `size` distinct texts without replacement; if there are fewer, each is drawn as often as needed.

    Raises:
        ValueError: if there is no text.
    """
    different = [text for text in dict.fromkeys(texts) if text.strip()]
    if not different:
        raise ValueError("A context needs at least one text that is not empty; none was given.")
    generator = random.Random(seed)
    drawn = []
    while len(drawn) < size:
        drawn += generator.sample(different, min(size - len(drawn), len(different)))
    return drawn

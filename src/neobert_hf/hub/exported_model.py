"""What is exported: a checkpoint with its task, and which models of Sentence Transformers a file can stand for.

Every field of every module is either computed by the files, or written beside them for the programs that read them, or
refused; a test has the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from transformers import PreTrainedTokenizerBase

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    NeoBERTPreTrainedModel,
)
from neobert_hf.hub.model_folder import (
    find_class,
    load_model,
    load_sentence_model,
    read_config,
    read_json,
    read_tokenizer,
    sentence_class,
)


# Task names of `pipeline(...)` in Transformers and transformers.js, with the model class and its outputs.
TASKS = {
    "feature-extraction": (NeoBERTModel, ["last_hidden_state"]),
    "fill-mask": (NeoBERTForMaskedLM, ["logits"]),
    "text-classification": (NeoBERTForSequenceClassification, ["logits"]),
    "token-classification": (NeoBERTForTokenClassification, ["logits"]),
    "question-answering": (NeoBERTForQuestionAnswering, ["start_logits", "end_logits"]),
}


@dataclass
class Source:
    """What is exported.

    Args:
        model: of the task's class, in float32.
        task: a key of `TASKS`.
        tokenizer: the model's.
        sentences: the Sentence Transformers model around the encoder, with mean pooling if the checkpoint is an encoder
            alone; None for other tasks.
    """

    model: NeoBERTPreTrainedModel
    task: str
    tokenizer: PreTrainedTokenizerBase
    sentences: SentenceTransformer | None


def read_source(folder: Path, task: str | None = None) -> Source:
    """Load a checkpoint.

    Args:
        task: that of the checkpoint's class if None.

    Raises:
        ValueError: if the task is unknown, the checkpoint lacks its head, or no graph can compute the model.
    """
    if "Router" in (names := module_names(folder)):
        refuse(folder, "a Router, which has a model for each kind of text: export the folder of one of its models")
    config = read_config(folder)
    kind = config.model_type if config.model_type == "neobert_contextual" else sentence_class(folder)
    if kind in ("neobert_contextual", "SparseEncoder", "MultiVectorEncoder"):
        raise ValueError(f"{folder} is a {kind}, whose vectors no exported file computes: use Sentence Transformers.")
    if task is None:
        task = next((name for name, (cls, _) in TASKS.items() if cls is find_class(config)), None)
    if task is None:
        raise ValueError(f"{folder} holds a {config.architectures[0]}: give one of {', '.join(TASKS)} as `--task`.")
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"{folder} has RoPE of type {rope_type!r}, which depends on the longest text of a batch and cannot be part "
            "of a graph: use 'yarn' or 'linear'."
        )
    tokenizer = read_tokenizer(folder, config)
    if task == "feature-extraction":
        sentences = load_sentence_model(folder, torch.float32)
        for reason in reasons_against(sentences):
            refuse(folder, reason)
        # Its tokenizer is that of the folder, with the length and the case of letters that the model asks for.
        return Source(sentences[0].model.eval(), task, sentences.tokenizer, sentences)
    if kind == "CrossEncoder" and (names != ["Transformer"] or any(read_prompts(folder).values())):
        refuse(folder, "prompts, or modules behind its encoder")
    model = load_model(TASKS[task][0], folder, dtype=torch.float32, attn_implementation="sdpa")
    return Source(model, task, tokenizer, None)


def refuse(what: Path | str, reason: str) -> None:
    raise ValueError(f"{what} has {reason}; nothing that reads an exported file does this. Use Sentence Transformers.")


def module_names(folder: Path) -> list[str]:
    """The classes of the modules of a model of Sentence Transformers; none of another model."""
    file = folder / "modules.json"
    return [module["type"].split(".")[-1] for module in read_json(file)] if file.is_file() else []


def read_prompts(folder: Path) -> dict[str, str]:
    file = folder / "config_sentence_transformers.json"
    return read_json(file).get("prompts") or {} if file.is_file() else {}


def reasons_against(sentences: SentenceTransformer) -> Iterator[str]:
    """What no program that reads an exported file does, as it follows in "The model has ..."."""
    names = [type(module).__name__ for module in sentences]
    if names[:2] != ["Transformer", "Pooling"] or not set(names[2:]) <= {"Dense", "Normalize"}:
        yield f"the modules {', '.join(names)} in place of an encoder, a pooling, and layers or a normalisation"
        return
    encoder, pooling, *others = sentences
    yield from reasons_against_encoder(encoder)
    if not pooling.include_prompt:
        yield "`include_prompt` false in its pooling, which leaves out the tokens of the prompt"
    for module in others:
        if isinstance(module, (Dense, Normalize)):
            places = {module.module_input_name, module.module_output_name}
            if places != {"sentence_embedding"}:
                yield f"a module {type(module).__name__} from and to {' and '.join(sorted(places))}"


def reasons_against_encoder(encoder: Transformer) -> Iterator[str]:
    read = encoder.modality_config.get("text", {})
    if encoder.transformer_task != "feature-extraction" or encoder.module_output_name != "token_embeddings":
        yield f"an encoder for {encoder.transformer_task}, which gives {encoder.module_output_name}"
    if (read.get("method"), read.get("method_output_name")) != ("forward", "last_hidden_state"):
        yield f"an encoder of which {read.get('method')} and {read.get('method_output_name')} are read"
    for name in ("processing_kwargs", "query_length", "document_length", "query_expansion"):
        if value := getattr(encoder, name):
            yield f"`{name}` {value} in its encoder"


def pooling_of(sentences: SentenceTransformer) -> str | tuple[str, ...]:
    """The mode of the pooling; several modes are concatenated."""
    return next(module.pooling_mode for module in sentences if isinstance(module, Pooling))


def needs_lengths(sentences: SentenceTransformer) -> bool:
    """Whether the model compares vectors in a way that depends on their lengths, which are not 1."""
    scaled = any(isinstance(module, Normalize) for module in sentences)
    return sentences.similarity_fn_name != "cosine" and not scaled

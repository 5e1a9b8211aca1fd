"""`neobert-hf export --gguf`: an embedding model as a file for llama.cpp's server and for Ollama, which is built on it.

    neobert-hf export runs/embeddings/model exported --gguf

writes `model-F32.gguf`, `model-F16.gguf` and `model-Q8_0.gguf`. Each holds the encoder, the tokenizer, the pooling and
the prompts. llama.cpp computes the architecture under the name `neo-bert`, with one difference: in its fused projection
all queries come first, then all keys, then all values, where NeoBERT's rows are ordered by head. llama.cpp's own
converter leaves them so, and the embeddings are then wrong without an error. Here they are reordered.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, PoolingType, TokenType
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import PreTrainedTokenizerBase

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.hub.exported_model import Source, needs_lengths, pooling_of
from neobert_hf.modeling_neobert import swiglu_width


# By precision: the type of the matrices, whose name is also part of the file's name, and llama.cpp's name of the whole.
TYPES = {
    "float32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "int8": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
POOLINGS = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}
# llama.cpp's tokenizer marks the beginning of a word, where WordPiece marks with ## that it goes on.
WORD_BEGINS = "\u2581"


def write_gguf(source: Source, folder: Path, precisions: list[str] | None = None) -> dict[str, float]:
    """Write one file for each precision into an empty folder. Nothing is measured: the result is empty.

    Args:
        source: an encoder, or an embedding model of Sentence Transformers.
        precisions: `float32`, `float16`, `int8` (llama.cpp's Q8_0: each 32 weights share a scale); all if None.

    Raises:
        ValueError: if llama.cpp cannot compute this model, or would split texts into other tokens.
    """
    check_model(source)
    check_wordpiece(source.tokenizer)
    pooling, length = pooling_of(source.sentences), source.sentences.max_seq_length
    prompts = {name: prompt for name, prompt in source.sentences.prompts.items() if prompt}
    for precision in precisions or TYPES:
        kind, file_type = TYPES[precision]
        file = folder / f"model-{kind.name}.gguf"
        writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.NEO_BERT])
        writer.add_file_type(file_type)
        add_settings(writer, source.model.config, length)
        writer.add_pooling_type(POOLINGS[pooling])
        add_tokenizer(writer, source.tokenizer)
        for name, prompt in prompts.items():
            writer.add_string(f"prompts.{name}", prompt)
        for name, weight in tensors(source.model, len(source.tokenizer)):
            stored = stored_as(weight, kind)
            writer.add_tensor(name, gguf.quants.quantize(weight, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        print(f"{file.name}: {file.stat().st_size:,} bytes, {pooling} pooling, {length} tokens")
    for name, prompt in prompts.items():
        print(f"llama.cpp does not know the prompt {name!r}: write {prompt!r} before each such text.")
    if needs_lengths(source.sentences):
        compared = source.sentences.similarity_fn_name
        print(f"The model compares vectors by {compared!r}, which llama.cpp scales to length 1: `--embd-normalize -1`.")
    return {}


def check_model(source: Source) -> None:
    """Refuse what llama.cpp's `neo-bert` does not compute."""
    if source.sentences is None:
        raise ValueError(
            f"The model is a {type(source.model).__name__}, and llama.cpp computes the encoder of this architecture, "
            "not its head: give `--task feature-extraction` for the encoder alone."
        )
    config, pooling = source.model.config, pooling_of(source.sentences)
    rope = config.rope_parameters["rope_type"]
    layers = any(isinstance(module, Dense) for module in source.sentences)
    dimensions = source.sentences.truncate_dim
    reasons = {
        f"`rope_parameters` of type {rope!r}; it has the default only": rope != "default",
        "absolute positions (`rope` is false); it has RoPE only": not config.rope,
        "LayerNorm (`rms_norm` is false); it has RMSNorm only": not config.rms_norm,
        f"the activation {config.hidden_act!r}; it has SwiGLU only": config.hidden_act != "swiglu",
        f"the pooling {pooling!r}; it has {', '.join(POOLINGS)}": pooling not in POOLINGS,
        "a module Dense behind the pooling": layers,
        f"the first {dimensions} dimensions alone (`truncate_dim`)": dimensions is not None,
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(f"llama.cpp cannot compute {reason}. Export the model to ONNX, without `--gguf`.")


def check_wordpiece(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer other than BERT's lower-casing WordPiece, the one that llama.cpp has."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizer, pre_tokenizer = parts["normalizer"] or {}, parts["pre_tokenizer"] or {}
    ids = tokenizer("a")["input_ids"]
    same = (
        (parts["model"]["type"], parts["model"].get("continuing_subword_prefix")) == ("WordPiece", "##"),
        normalizer.get("type") == "BertNormalizer",
        normalizer.get("lowercase") is True and normalizer.get("strip_accents") is not False,
        pre_tokenizer.get("type") == "BertPreTokenizer",
        (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id),
    )
    if not all(same):
        raise ValueError(
            f"The tokenizer is a {parts['model']['type']} with {normalizer}; llama.cpp splits texts for this "
            "architecture as bert-base-uncased does: WordPiece, lower-cased, without accents. Export the model to "
            "ONNX, without `--gguf`."
        )


def add_settings(writer: GGUFWriter, config: NeoBERTConfig, max_length: int) -> None:
    writer.add_context_length(max_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(swiglu_width(config))
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_causal_attention(False)


def add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """The vocabulary as llama.cpp's `bert` tokenizer reads it, and the ids of the special tokens."""
    tokens, types = [], []
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if index in tokenizer.all_special_ids:
            types.append(TokenType.CONTROL)
        elif index in tokenizer.added_tokens_decoder:
            types.append(TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL)
            token = token.removeprefix("##") if token.startswith("##") else WORD_BEGINS + token
        tokens.append(token)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_type_count(1)
    writer.add_bos_token_id(tokenizer.cls_token_id)
    writer.add_sep_token_id(tokenizer.sep_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_mask_token_id(tokenizer.mask_token_id)


def tensors(model: NeoBERTModel, entries: int) -> Iterator[tuple[str, np.ndarray]]:
    """The weights under llama.cpp's names, with the rows of `qkv` in its order.

    Args:
        entries: of the tokenizer; rows of the embedding matrix that no token uses are left out.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.NEO_BERT, model.config.num_hidden_layers)
    for name, weight in model.named_parameters():
        weight = weight.detach()
        if name == "encoder.weight":
            weight = weight[:entries]
        elif name.endswith("qkv.weight"):
            # From rows (heads, query key value, dim_head) to rows (query key value, heads, dim_head).
            heads = model.config.num_attention_heads
            weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()
        yield names.get_name(name, try_suffixes=(".weight",)), weight.numpy()


def stored_as(weight: np.ndarray, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Norms are in float32 in every file, and a matrix whose rows are no multiple of 32 cannot be in Q8_0."""
    if weight.ndim == 1:
        return GGMLQuantizationType.F32
    if kind == GGMLQuantizationType.Q8_0 and weight.shape[-1] % 32:
        return GGMLQuantizationType.F16
    return kind

"""ONNX files in the folder layout that transformers.js reads, each checked before it is kept.

Optimum does not install with Transformers 5.23, so this uses `torch.onnx` directly. Sentence Transformers'
`backend="onnx"` needs Optimum too: run the files with onnxruntime (`examples/onnx_inference.py`) or transformers.js.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxruntime.quantization import quantize_dynamic
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from torch import nn

from neobert_hf import NeoBERTPreTrainedModel
from neobert_hf.common.files import write_json
from neobert_hf.cpu_neobert import row_scales
from neobert_hf.hub.exported_model import TASKS, Source, pooling_of, refuse
from neobert_hf.hub.model_folder import read_json


# The file names that transformers.js uses for its dtypes fp32, q8 and fp16. Float16 is written last, since it changes
# the weights in place.
FILES = {"float32": "model.onnx", "int8": "model_quantized.onnx", "float16": "model_fp16.onnx"}
# How far a file may be from PyTorch in float32: the norm of the difference, as a share of the norm of the outputs. An
# error of 0.15 is a cosine of 0.99.
LARGEST_ERROR = {"float32": 1e-5, "int8": 0.15, "float16": 0.01}
OPSET = 18
# A linear layer for each token and then one of these is the pooling and then the layer.
POOLINGS = ("mean", "cls", "lasttoken")

# Real text: special tokens and punctuation have the largest activations of a trained model.
TEXTS = [
    "NeoBERT is the most efficient model of its kind!",
    "Short.",
    "The capital of France is Paris, and 1,300 kilometres to the south-east (by road) lies Rome; who has walked it?",
    "An encoder reads a whole sentence at once. " * 12,
]


def write_folder(source: Source, folder: Path, precisions: list[str] | None = None) -> dict[str, float]:
    """Write all that onnxruntime, transformers.js and Text Embeddings Inference need into an empty folder.

    Args:
        precisions: all if None.

    Returns:
        How far each file is from PyTorch; see `LARGEST_ERROR`.
    """
    layers = linear_layers(source.sentences) if source.sentences else []
    module = ExportedModule(source.model, layers, TASKS[source.task][1]).eval()
    if source.sentences:
        write_sentence_files(source.sentences, layers, folder)
    # Saved now, since the checks of the files set its truncation and padding, which would be stored.
    source.tokenizer.save_pretrained(folder)
    config = source.model.config
    config.architectures = [type(source.model).__name__]
    del config.auto_map  # It names files of code, which the folder does not hold.
    # Text Embeddings Inference asks for the second name of `max_length`.
    write_json(folder / "config.json", config.to_diff_dict() | {"max_position_embeddings": config.max_length})
    return write_onnx(module, check_batches(source), folder / "onnx", precisions)


# Embedding models


def linear_layers(sentences: SentenceTransformer) -> list[Dense]:
    """The linear layers after the pooling, which the files compute before it.

    Raises:
        ValueError: if that changes the embedding, or programs that read the files do not know the pooling.
    """
    if (pooling := pooling_of(sentences)) not in POOLINGS:
        refuse("The model", f"the pooling {pooling!r} in place of {', '.join(POOLINGS)}")
    layers, movable = [], True
    for module in sentences:
        if isinstance(module, Normalize):
            # This scales every vector differently, so the layers after it cannot be moved before the pooling.
            movable = False
        elif isinstance(module, Dense):
            if not movable or not is_square_and_linear(module):
                refuse("The model", "a module Dense that is not square and linear, or lies behind a normalisation")
            layers.append(module)
    return layers


def is_square_and_linear(layer: Dense) -> bool:
    linear = isinstance(layer.activation_function, nn.Identity) and not layer.use_residual
    return linear and layer.in_features == layer.out_features


def write_sentence_files(sentences: SentenceTransformer, layers: list[Dense], folder: Path) -> None:
    """Write what Sentence Transformers says of its modules, without the layers that the ONNX files compute.

    Text Embeddings Inference asks for `max_seq_length` and, in versions that do not know `pooling_mode`, for one key
    per mode; see `router/src/lib.rs` in https://github.com/huggingface/text-embeddings-inference.
    """
    for layer in layers:
        del sentences[list(sentences).index(layer)]
    sentences.save(str(folder), create_model_card=False)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.py")):
        file.unlink()
    file = folder / "sentence_bert_config.json"
    write_json(file, read_json(file) | {"max_seq_length": sentences.max_seq_length})
    file, mode = folder / "1_Pooling" / "config.json", pooling_of(sentences)
    keys = {
        "pooling_mode_cls_token": mode == "cls",
        "pooling_mode_mean_tokens": mode == "mean",
        "pooling_mode_lasttoken": mode == "lasttoken",
    }
    write_json(file, read_json(file) | keys)


# The ONNX files


class ExportedModule(nn.Module):
    """A model with the interface of the files: ids and mask in, float32 out, whatever dtype the weights have.

    Args:
        layers: linear layers for the hidden states, so that their mean is the embedding; padding stays 0.
        outputs: the names of the model's outputs.
    """

    def __init__(self, model: NeoBERTPreTrainedModel, layers: list[Dense], outputs: list[str]):
        super().__init__()
        self.model, self.outputs = model, outputs
        self.layers = nn.Sequential(*(layer.linear for layer in layers))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        outputs = [found[name] for name in self.outputs]
        if self.layers:
            states = self.layers(outputs[0])
            outputs = [states * attention_mask[..., None].to(states.dtype)]
        return tuple(output.float() for output in outputs)


def write_onnx(
    module: ExportedModule, batches: list[dict[str, torch.Tensor]], folder: Path, precisions: list[str] | None = None
) -> dict[str, float]:
    """Write and check the ONNX files. Afterwards the module is in float16 if that was one of the precisions.

    Args:
        module: in float32.
        batches: from `check_batches`.
        precisions: all if None.

    Returns:
        As `write_folder`.

    Raises:
        ValueError: if a file does not compute the same as PyTorch.
    """
    folder.mkdir()
    errors = {}
    with torch.no_grad():
        expected = [[output.numpy() for output in module(**batch)] for batch in batches]
    for precision, name in FILES.items():
        if precision not in (precisions or FILES):
            continue
        file = folder / name
        if precision == "int8":
            save_quantized(module, batches[0], file)
        else:
            onnx_ir.save(trace(module.half() if precision == "float16" else module, batches[0]), file)
        error = errors[name] = measure_error(file, batches, expected)
        if not error <= LARGEST_ERROR[precision]:  # NaN is too large.
            raise ValueError(
                f"{name} ({precision}) differs from PyTorch by {error:.1e} of the outputs' norm; at most "
                f"{LARGEST_ERROR[precision]} is allowed. Nothing was written. The other precisions may work: leave out "
                f"{precision} with `--precisions`."
            )
        print(f"{name}: differs from PyTorch by {error:.1e} of the outputs' norm", flush=True)
    return errors


@contextmanager
def without_notes() -> Iterator[None]:
    """Hold back what torch and ONNX Runtime say of packages and steps that no user of an export needs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.disable(disabled)


@without_notes()
def trace(module: ExportedModule, batch: dict[str, torch.Tensor]) -> onnx_ir.Model:
    """The ONNX graph, for any number of rows and columns, traced with one batch.

    A float16 model is traced in float16, not converted afterwards. So wherever the model itself computes in float32
    (rotary table, and norms, whose squares exceed float16's range), the graph does so as well.
    """
    auto = torch.export.Dim.AUTO
    program = torch.onnx.export(
        module,
        kwargs=batch,
        input_names=list(batch),
        output_names=module.outputs,
        # The mask has the shape of the ids; naming its axes as well would cause a warning.
        dynamic_shapes={
            "input_ids": {0: "batch_size", 1: "sequence_length"},
            "attention_mask": {0: auto, 1: auto},
        },
        opset_version=OPSET,
        verbose=False,
    )
    # Removes where in the source files each node comes from, which would be half of a small ONNX file.
    ClearMetadataAndDocStringPass()(program.model)
    return program.model


class Int8Embedding(nn.Module):
    """Embeddings in uint8 around 128, with a scale for each. The quantizer of onnxruntime has one for all, with
    which the states of a small model were off by 0.16 of their norm in place of 0.14."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.register_buffer("scales", row_scales(weight.detach(), 127))
        self.register_buffer("numbers", ((weight.detach() / self.scales).round() + 128).to(torch.uint8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (self.numbers[input_ids].to(self.scales.dtype) - 128) * self.scales[input_ids]


@without_notes()
def save_quantized(module: ExportedModule, batch: dict[str, torch.Tensor], file: Path) -> None:
    """Weights in 7 bits of int8, with one scale per column; activations in uint8, with a new scale for each batch. The
    layers behind the encoder stay in float32: they are small, and every number passes through them.

    x86 CPUs without VNNI add two of their products in 16 bits, which can hold 2 * 255 * 64 but not 2 * 255 * 127. With
    7 bits, the file gives the same results on all CPUs. For `benchmarks/models/small`, its cosine with PyTorch is
    0.9976; with 8 bits it is 0.9927 on an AMD EPYC that has AVX2 only.
    """
    encoder = module.model.base_model
    embeddings, encoder.encoder = encoder.encoder, Int8Embedding(encoder.encoder.weight)
    graph = trace(module, batch)
    encoder.encoder = embeddings
    products = [node.name for node in graph.graph if node.op_type == "MatMul"]
    behind = products[len(products) - len(module.layers) :]
    for value in graph.graph.initializers.values():
        # The quantizer transposes the weights of layers with bias, and then refuses the old shapes.
        value.shape = value.type = None
    source = file.with_name("float32.onnx")
    onnx_ir.save(graph, source)
    options = {"op_types_to_quantize": ["MatMul"], "nodes_to_exclude": behind}
    quantize_dynamic(source, file, per_channel=True, reduce_range=True, **options)
    source.unlink()


# The check


def check_batches(source: Source) -> list[dict[str, torch.Tensor]]:
    """Three batches: padded on the right, padded on the left, and a single row.

    Returns:
        `input_ids` and `attention_mask`, each (rows, tokens), int64.
    """
    options = {"truncation": True, "max_length": source.model.config.max_length, "padding": True}
    options |= {"return_tensors": "pt", "return_token_type_ids": False}
    right = source.tokenizer(TEXTS, padding_side="right", **options)
    left = source.tokenizer(TEXTS, padding_side="left", **options)
    return [dict(right), dict(left), dict(source.tokenizer(TEXTS[:1], **options))]


def measure_error(file: Path, batches: list[dict[str, torch.Tensor]], expected: list[list[np.ndarray]]) -> float:
    """The largest error of a file in onnxruntime, padding included, as a share of the norm of PyTorch's outputs.

    Args:
        expected: for each batch, PyTorch's outputs in float32.
    """
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    errors = []
    for batch, arrays in zip(batches, expected):
        found = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        errors += [np.linalg.norm(got - wanted) / np.linalg.norm(wanted) for wanted, got in zip(arrays, found)]
    return float(np.max(errors))  # NaN if one is NaN.

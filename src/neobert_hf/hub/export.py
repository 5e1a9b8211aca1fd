"""`neobert-hf export`: ONNX files in the folder layout that transformers.js reads, each checked before it is kept.

    neobert-hf export runs/embeddings/model exported

writes `onnx/model.onnx` (float32), `onnx/model_fp16.onnx`, `onnx/model_quantized.onnx` (int8) and, beside `onnx/`, the
config, the tokenizer and, for an embedding model, the files that say how tokens are pooled. Linear layers after the
pooling are part of the ONNX files: these output hidden states that have gone through the linear layers, and whose mean
is the embedding. The server Text Embeddings Inference also takes the folder. `--space` writes a web page around these
files (`space.py`), `--gguf` files for llama.cpp instead (`gguf.py`).

Optimum does not install with Transformers 5.23, so this uses `torch.onnx` directly. Sentence Transformers'
`backend="onnx"` needs Optimum too: run the files with onnxruntime (`examples/onnx_inference.py`) or transformers.js.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxruntime.quantization import quantize_dynamic
from torch import nn
from transformers import PreTrainedTokenizerBase

from neobert_hf.common.files import atomic_folder, folder_lock, write_json
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.model_folder import (
    MODULES,
    SENTENCE_CONFIG,
    TRANSFORMER_CONFIG,
    SentenceModule,
    find_class,
    load_model,
    local_folder,
    read_config,
    read_json,
    read_modules,
    read_tokenizer,
    text_length,
)
from neobert_hf.modeling_neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
    NeoBERTPreTrainedModel,
)


# Task names of `pipeline(...)` in Transformers and transformers.js, with the model class and its outputs.
TASKS = {
    "feature-extraction": (NeoBERTModel, ["last_hidden_state"]),
    "fill-mask": (NeoBERTForMaskedLM, ["logits"]),
    "text-classification": (NeoBERTForSequenceClassification, ["logits"]),
    "token-classification": (NeoBERTForTokenClassification, ["logits"]),
    "question-answering": (NeoBERTForQuestionAnswering, ["start_logits", "end_logits"]),
}
# Models for these tasks refuse a row without a token, since it has no answer.
ONE_ANSWER_A_ROW = ("text-classification", "question-answering")

# The file names that transformers.js uses for its dtypes fp32, q8 and fp16. Float16 is written last, since it changes
# the weights in place.
FILES = {"float32": "model.onnx", "int8": "model_quantized.onnx", "float16": "model_fp16.onnx"}
LARGEST_DIFFERENCE = 1e-5
SMALLEST_COSINE = {"float16": 0.9999, "int8": 0.99}
OPSET = 18

# The poolings before which a linear layer has the same effect as after them.
LINEAR_POOLINGS = (["mean"], ["cls"])
# Values of `pooling_mode`, with the keys that older versions of Sentence Transformers wrote instead, one for each mode.
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}

# Real text: special tokens and punctuation have the largest activations of a trained model.
TEXTS = [
    "NeoBERT is the most efficient model of its kind!",
    "Short.",
    "The capital of France is Paris, and 1,300 kilometres to the south-east (by road) lies Rome; who has walked it?",
    "An encoder reads a whole sentence at once. " * 12,
]


@dataclass
class ExportSettings:
    """What is exported, and where to. For a Sentence Transformers model, the encoder is exported."""

    path: str = field(metadata={"help": "checkpoint: a local folder or a Hub id", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder to write; must not exist yet", "path": True})
    task: str | None = field(
        default=None, metadata={"choices": list(TASKS), "help": "the task of the checkpoint's class if unset"}
    )
    precisions: list[str] | None = field(
        default=None, metadata={"choices": list(FILES), "help": "one or more; all if unset"}
    )
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit on the Hub"})
    gguf: bool = field(default=False, metadata={"help": "write files for llama.cpp and Ollama instead of ONNX files"})
    space: bool = field(
        default=False, metadata={"help": "write a web page around the model, in float16 if `precisions` is unset"}
    )


@dataclass
class ExportedFile:
    """One ONNX file that passed its check.

    Args:
        name: inside `onnx/`.
        precision: `float32`, `int8` or `float16`.
        deviation: the measured deviation from PyTorch in float32, in words.
    """

    name: str
    precision: str
    deviation: str


def main(args: list[str] | None = None) -> None:
    positional = ("path", "output_dir")
    (settings,) = parse_config(ExportSettings, args=args, positional=positional, prog="neobert-hf export")
    with folder_lock(settings.output_dir):
        export(settings)
    same = "" if settings.gguf else ": every file is as close to PyTorch as its precision must be"
    print(f"{settings.output_dir} is complete{same}.")


def export(settings: ExportSettings) -> list:
    """Write a folder as the settings say, whole or not at all, and return what was written: an `ExportedFile` or a path
    for each file.

    Raises:
        ValueError: if the checkpoint cannot be exported as asked, or a file does not compute the same as PyTorch.
    """
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already. Choose another folder, or delete this one if it is an old export.")
    if settings.gguf and settings.space:
        raise ValueError("The page of `--space` runs ONNX files: give `--gguf` or `--space`, each with its own folder.")
    write = export_onnx
    if settings.gguf:
        from neobert_hf.hub.gguf import export_gguf as write
    elif settings.space:
        from neobert_hf.hub.space import export_page as write
    with atomic_folder(output) as partial:
        return write(local_folder(settings.path, settings.revision), partial, settings.task, settings.precisions)


def export_onnx(
    source: Path, folder: Path, task: str | None = None, precisions: list[str] | None = None
) -> list[ExportedFile]:
    """Write the files for onnxruntime and transformers.js into an empty folder.

    Args:
        task: that of the checkpoint's class if None.
        precisions: all if None.
    """
    # 1. Read
    layers = linear_layers(source)
    check_modules(source, layers)
    model, task = load_for_task(source, task)
    tokenizer = read_tokenizer(source, model.config)

    # 2. Config, tokenizer, and the files that say how tokens are pooled
    write_config(model, folder)
    # Saved now, since the checks of the files set its truncation and padding, which would be stored.
    tokenizer.save_pretrained(folder)
    copy_sentence_files(source, layers, folder)
    write_server_settings(folder)

    # 3. ONNX files
    if layers:
        model = LinearEncoder(model, [load_linear(layer) for layer in layers]).eval()
    return write_onnx(model, task, tokenizer, folder / "onnx", precisions)


def load_for_task(folder: Path, task: str | None = None) -> tuple[NeoBERTPreTrainedModel, str]:
    """The model of a checkpoint in float32, and its task.

    Raises:
        ValueError: if the task is unknown, the checkpoint lacks its head, or no graph can compute the model.
    """
    config = read_config(folder)
    if task is None:
        task = next((name for name, (cls, _) in TASKS.items() if cls is find_class(config)), None)
    if task not in TASKS:
        raise ValueError(
            f"{folder} is a checkpoint of {config.architectures}, and the task is {task!r}; give one of "
            f"{', '.join(TASKS)} as `--task`."
        )
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"{folder} has RoPE of type {rope_type!r}, which depends on the longest text of a batch and cannot be part "
            "of a graph: use 'yarn' or 'linear'."
        )
    return load_model(TASKS[task][0], folder, dtype=torch.float32, attn_implementation="sdpa"), task


# Embedding models


def pooling_modes(pooling: SentenceModule) -> list[str]:
    """The modes in a `1_Pooling/config.json` of any version of Sentence Transformers; several are concatenated."""
    settings = read_json(pooling.folder / "config.json")
    modes = settings.get("pooling_mode") or [mode for mode, key in POOLING_KEYS.items() if settings.get(key)] or "mean"
    return [modes] if isinstance(modes, str) else modes


def linear_layers(folder: Path) -> list[SentenceModule]:
    """The linear layers of an embedding model that can be moved before the pooling without changing the result."""
    layers, linear = [], False
    for module in read_modules(folder):
        if module.name == "Pooling":
            linear = pooling_modes(module) in LINEAR_POOLINGS
        elif module.name == "Dense" and linear:
            config = read_json(module.folder / "config.json")
            identity = config.get("activation_function") == "torch.nn.modules.linear.Identity"
            if identity and not config.get("use_residual") and config["in_features"] == config["out_features"]:
                layers.append(module)
        elif module.name == "Normalize":
            # This scales every vector differently, so the layers after it cannot be moved before the pooling.
            linear = False
    return layers


def check_modules(folder: Path, layers: Collection[SentenceModule] = ()) -> None:
    """Refuse modules after the pooling that users of the exported files would lack.

    Args:
        layers: the modules that the files compute themselves.
    """
    for module in read_modules(folder):
        if module.name not in ("Transformer", "Pooling", "Normalize") and module not in layers:
            raise ValueError(
                f"{folder} has a module {module.name}, which its embeddings would lack: ONNX files support a pooling "
                "and a normalisation, and those of `neobert-hf export` also square linear layers between them. Use "
                "Sentence Transformers for this model."
            )


def load_linear(layer: SentenceModule) -> nn.Linear:
    # Imported here, since only embedding models need it.
    from sentence_transformers.sentence_transformer.modules import Dense

    return Dense.load(str(layer.folder)).linear


class LinearEncoder(nn.Module):
    """An encoder and linear layers on its hidden states, so that their mean is the embedding; padding stays 0."""

    def __init__(self, model: NeoBERTModel, layers: list[nn.Linear]):
        super().__init__()
        self.model, self.config = model, model.config
        self.layers = nn.Sequential(*layers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.layers(self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        return {"last_hidden_state": states * attention_mask[..., None].to(states.dtype)}


# The files beside the ONNX files


def write_config(model: NeoBERTPreTrainedModel, folder: Path) -> None:
    config = model.config
    config.architectures = [type(model).__name__]
    del config.auto_map  # It names files of code, which the folder does not hold.
    config.to_json_file(folder / "config.json")


def copy_sentence_files(source: Path, layers: list[SentenceModule], folder: Path) -> None:
    """Copy what users of an embedding model need. Layers that the ONNX files compute are left out of `modules.json`."""
    modules = read_modules(source)
    if not modules:
        return
    for name in (SENTENCE_CONFIG, TRANSFORMER_CONFIG):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    entries = [entry for entry, module in zip(read_json(source / MODULES), modules) if module not in layers]
    write_json(folder / MODULES, entries)
    for module in modules:
        if module.name == "Pooling":
            copied = folder / module.folder.relative_to(source) / "config.json"
            copied.parent.mkdir()
            shutil.copyfile(module.folder / "config.json", copied)


def write_server_settings(folder: Path) -> None:
    """Repeat settings of a written folder under the keys that Text Embeddings Inference reads.

    It refuses a config without `max_position_embeddings`. Versions that do not know `pooling_mode` also refuse a
    pooling config without one key per mode, and settings of Sentence Transformers without `max_seq_length`. See
    `router/src/lib.rs` in https://github.com/huggingface/text-embeddings-inference. For Sentence Transformers nothing
    changes.
    """
    config = read_config(folder)
    length = text_length(folder, config, read_tokenizer(folder, config))
    file = folder / "config.json"
    write_json(file, read_json(file) | {"max_position_embeddings": config.max_length})
    for module in read_modules(folder):
        if module.name == "Transformer":
            file = folder / TRANSFORMER_CONFIG
            write_json(file, (read_json(file) if file.is_file() else {}) | {"max_seq_length": length})
        elif module.name == "Pooling":
            file, modes = module.folder / "config.json", pooling_modes(module)
            keys = {key: mode in modes for mode, key in POOLING_KEYS.items()}
            write_json(file, read_json(file) | keys | {"pooling_mode": modes[0] if len(modes) == 1 else modes})


# The ONNX files


class ExportedModule(nn.Module):
    """A model with the interface of the files: ids and mask in, float32 out, whatever dtype the weights have."""

    def __init__(self, model: nn.Module, outputs: list[str]):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(outputs[name].float() for name in self.outputs)


def write_onnx(
    model: nn.Module, task: str, tokenizer: PreTrainedTokenizerBase, folder: Path, precisions: list[str] | None = None
) -> list[ExportedFile]:
    """Write and check only the ONNX files. Afterwards the model is in float16 if that was one of the precisions.

    Args:
        model: in float32.
        precisions: all if None.

    Returns:
        The files, in the order of `FILES`.

    Raises:
        ValueError: if a file does not compute the same as PyTorch.
    """
    folder.mkdir(parents=True)
    module = ExportedModule(model, TASKS[task][1]).eval()
    batches = check_batches(tokenizer, model.config, task)
    with torch.no_grad():
        expected = [[output.numpy() for output in module(**batch)] for batch in batches]
    graph = None
    files = []
    for precision in sorted(precisions or FILES, key=list(FILES).index):
        file = folder / FILES[precision]
        if precision == "float16":
            onnx_ir.save(trace(module.half(), batches[0]), file)
        else:
            graph = graph or trace(module, batches[0])
            onnx_ir.save(graph, file) if precision == "float32" else save_quantized(graph, file)
        deviation = check(file, precision, batches, expected)
        files.append(ExportedFile(file.name, precision, deviation))
        print(f"{file.name}: {deviation}", flush=True)
    return files


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
        dynamo=True,
        verbose=False,
    )
    # Removes where in the source files each node comes from, which would be half of a small ONNX file.
    ClearMetadataAndDocStringPass()(program.model)
    return program.model


def save_quantized(graph: onnx_ir.Model, file: Path) -> None:
    """Weights in 7 bits of int8, with one scale per column; activations in uint8, with a new scale for each batch.

    x86 CPUs without VNNI add two of their products in 16 bits, which can hold 2 * 255 * 64 but not 2 * 255 * 127. With
    7 bits, the file gives the same results on all CPUs. For `benchmarks/models/small`, its cosine with PyTorch is
    0.9976; with 8 bits it is 0.9927 on an AMD EPYC that has AVX2 only.
    """
    for value in graph.graph.initializers.values():
        # The quantizer transposes the weights of layers with bias, and then refuses the old shapes.
        value.shape = value.type = None
    source = file.with_name("float32.onnx")
    onnx_ir.save(graph, source)
    quantize_dynamic(source, file, per_channel=True, reduce_range=True, op_types_to_quantize=["MatMul", "Gather"])
    source.unlink()


# The check


def check_batches(tokenizer: PreTrainedTokenizerBase, config, task: str) -> list[dict[str, torch.Tensor]]:
    """Three batches: ragged, a single row, and padded on the left, with a row of only padding if the task allows it.

    Returns:
        `input_ids` and `attention_mask`, each (rows, tokens), int64.
    """
    options = {"truncation": True, "max_length": config.max_length, "return_tensors": "pt"}
    options["return_token_type_ids"] = False
    ragged = tokenizer(TEXTS, padding=True, **options)
    single = tokenizer(TEXTS[:1], **options)
    left = tokenizer(TEXTS, padding=True, padding_side="left", **options)
    if task not in ONE_ANSWER_A_ROW:
        left["attention_mask"][1] = 0
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in (ragged, single, left)]


def check(file: Path, precision: str, batches: list[dict[str, torch.Tensor]], expected: list[list[np.ndarray]]) -> str:
    """Run a file in onnxruntime on every batch and return how much it deviates from PyTorch in float32, in words.

    Args:
        expected: for each batch, PyTorch's outputs in float32.

    Raises:
        ValueError: if it deviates too much, or an output is not finite.
    """
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    # For each output of each batch: PyTorch's array, that of the file, and the mask, (rows, tokens).
    compared = []
    for batch, arrays in zip(batches, expected):
        got = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        compared += [(*pair, batch["attention_mask"].bool().numpy()) for pair in zip(arrays, got)]
    # If an output is not finite, the value is NaN (NumPy's maximum and minimum keep one), and fails every comparison.
    if precision == "float32":
        value = np.max([difference(wanted, got) for wanted, got, _ in compared])
        passed, deviation = value <= LARGEST_DIFFERENCE, f"largest difference from PyTorch {value:.1e}"
        limit = f"at most {LARGEST_DIFFERENCE:.0e} is allowed (relative to the largest value, if that is over 1)"
    else:
        value = np.min([cosine(*arrays) for arrays in compared])
        passed, deviation = value >= SMALLEST_COSINE[precision], f"cosine with PyTorch {value:.6f}"
        limit = f"at least {SMALLEST_COSINE[precision]} is needed"
    if not passed:
        raise ValueError(
            f"{file.name} ({precision}): {deviation}; {limit}. Nothing was written. The other precisions may work: "
            f"leave out {precision} with `--precisions`."
        )
    return deviation


def difference(expected: np.ndarray, got: np.ndarray) -> float:
    """The largest difference, padding included, relative to the largest value if that is over 1.

    Float32 does not resolve 1e-5 at hidden states of 130.
    """
    return float(np.abs(expected - got).max() / max(1.0, np.abs(expected).max()))


def cosine(expected: np.ndarray, got: np.ndarray, mask: np.ndarray) -> float:
    """The smallest cosine of any row, over its real tokens; if rows have only a few scores, that of the whole batch."""
    if expected.shape[:2] != mask.shape:
        rows = [(expected, got)]
    else:
        rows = [(row[real], other[real]) for row, other, real in zip(expected, got, mask) if real.any()]
    return float(np.min([(a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in rows]))

"""`neobert-hf export`: ONNX files in the folder layout that transformers.js reads, each checked before it is kept.

    neobert-hf export runs/embeddings/model exported

writes `onnx/model.onnx` (float32), `onnx/model_fp16.onnx`, `onnx/model_quantized.onnx` (int8) and, beside `onnx/`, the
config, the tokenizer and, for an embedding model, the files that say how tokens are pooled. Linear layers after the
pooling are part of the ONNX files: these output hidden states that have gone through the linear layers, and whose mean
is the embedding. The server Text Embeddings Inference also takes the folder.

Optimum does not install with Transformers 5.23, so this uses `torch.onnx` directly. Sentence Transformers'
`backend="onnx"` needs Optimum too: run the files with onnxruntime (`examples/onnx_inference.py`) or transformers.js.
"""

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

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.settings import parse_config
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.hub.doctor import check_tokenizer
from neobert_hf.hub.model_folder import (
    MODULES,
    SENTENCE_FILES,
    TRANSFORMER_CONFIG,
    ModelFolder,
    SentenceModule,
    copy_files,
    local_folder,
    new_folder,
    read_json,
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
    "feature-extraction": (NeoBERTModel, ("last_hidden_state",)),
    "fill-mask": (NeoBERTForMaskedLM, ("logits",)),
    "text-classification": (NeoBERTForSequenceClassification, ("logits",)),
    "token-classification": (NeoBERTForTokenClassification, ("logits",)),
    "question-answering": (NeoBERTForQuestionAnswering, ("start_logits", "end_logits")),
}

# Models for these tasks refuse a row without a token, since it has no answer.
ONE_ANSWER_A_ROW = ("text-classification", "question-answering")

# The file names that transformers.js uses for its dtypes fp32, fp16 and q8.
FILES = {"float32": "model.onnx", "float16": "model_fp16.onnx", "int8": "model_quantized.onnx"}
LARGEST_DIFFERENCE = 1e-5
SMALLEST_COSINE = {"float16": 0.9999, "int8": 0.99}

OPSET = 18
# One protobuf holds less than 2 GiB, and the graph needs some of that.
MOST_BYTES_IN_ONE_FILE = 2**31 - 2**26

# The Sentence Transformers modules that every user of the files can replicate with `1_Pooling/config.json`.
POOLING_MODULES = {"Transformer", "Pooling", "Normalize"}
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


class ExportError(ValueError):
    """An exported file does not compute what the PyTorch model does."""


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


@dataclass
class ExportedFile:
    """One ONNX file that passed its check.

    Args:
        name: inside `onnx/`.
        precision: `float32`, `float16` or `int8`.
        deviation: the measured deviation from PyTorch in float32, in words.
        external_data: whether the weights are in `<name>_data` beside it.
    """

    name: str
    precision: str
    deviation: str
    external_data: bool


@dataclass
class Reference:
    """PyTorch's outputs in float32 for a few batches. Every file must compute the same.

    Args:
        outputs: the names of the outputs.
        batches: `input_ids` and `attention_mask`, each (rows, tokens), int64.
        expected: for each batch, one float32 array per output.
    """

    outputs: tuple[str, ...]
    batches: list[dict[str, torch.Tensor]]
    expected: list[list[np.ndarray]]


class LinearEncoder(nn.Module):
    """An encoder and linear layers on its hidden states, so that their mean is the embedding; padding stays 0."""

    def __init__(self, model: NeoBERTModel, layers: list[nn.Linear]):
        super().__init__()
        self.model, self.config = model, model.config
        self.layers = nn.Sequential(*layers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.layers(self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        return {"last_hidden_state": states * attention_mask[..., None].to(states.dtype)}


class ExportedModule(nn.Module):
    """A model with the interface of the files: ids and mask in, float32 out, whatever dtype the weights have."""

    def __init__(self, model: NeoBERTPreTrainedModel, outputs: tuple[str, ...]):
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return tuple(outputs[name].float() for name in self.outputs)


def main(args: list[str] | None = None) -> None:
    positional = ("path", "output_dir")
    (settings,) = parse_config(ExportSettings, args=args, positional=positional, prog="neobert-hf export")
    with folder_lock(Path(settings.output_dir)):
        export(settings)
    print(f"{settings.output_dir} is complete: every file computes the same as PyTorch.")


def export(settings: ExportSettings) -> list[ExportedFile]:
    """Write a folder for onnxruntime and transformers.js, whole or not at all.

    Returns:
        The files, in the order of `precisions`.

    Raises:
        ValueError: if the checkpoint cannot be exported as asked, before work starts.
        ExportError: if a file does not compute the same as PyTorch.
    """
    # 1. Checks
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already. Delete it, or choose another folder.")
    precisions = known_precisions(settings.precisions)
    source = ModelFolder(local_folder(settings.path, settings.revision))
    layers = find_linear_layers(source)
    pooling_files = find_pooling_files(source, {layer.path for layer in layers})
    tokenizer = _sound_tokenizer(source)

    # 2. Model
    model, task = load_for_task(source, settings.task)
    exported = LinearEncoder(model, [load_linear(source, layer) for layer in layers]).eval() if layers else model

    # 3. ONNX files
    with new_folder(output) as partial:
        # Saved now, since the checks of the files set its truncation and padding, which would be stored.
        tokenizer.save_pretrained(partial)
        files = write_onnx(exported, task, tokenizer, partial / "onnx", precisions)

        # 4. Config and further files
        _write_config(model, files, partial)
        copy_files(pooling_files, source.path, partial)
        complete_settings(partial, model.config, tokenizer)
        if layers:
            entries = zip(read_json(source.path / MODULES), source.sentence_modules)
            write_json(partial / MODULES, [entry for entry, module in entries if module not in layers])
    return files


def known_precisions(precisions: list[str] | None) -> list[str]:
    """The requested precisions; all if none is given.

    Raises:
        ValueError: if one is unknown.
    """
    if unknown := sorted(set(precisions or ()) - set(FILES)):
        raise ValueError(f"There is no precision {', '.join(unknown)}; choose from {', '.join(FILES)}.")
    return precisions or list(FILES)


def find_linear_layers(folder: ModelFolder) -> list[SentenceModule]:
    """The linear layers of an embedding model that can be moved before the pooling without changing the result."""
    layers, linear = [], False
    for module in folder.sentence_modules:
        if module.name == "Pooling":
            linear = pooling_modes(read_json(folder.path / module.path / "config.json")) in LINEAR_POOLINGS
        elif module.name == "Dense" and linear:
            config = read_json(folder.path / module.path / "config.json")
            identity = config.get("activation_function") == "torch.nn.modules.linear.Identity"
            if identity and not config.get("use_residual") and config["in_features"] == config["out_features"]:
                layers.append(module)
        elif module.name == "Normalize":
            # This scales every vector differently, so the layers after it cannot be moved before the pooling.
            linear = False
    return layers


def load_linear(folder: ModelFolder, layer: SentenceModule) -> nn.Linear:
    # Imported here, since only models of Sentence Transformers need it.
    from sentence_transformers.sentence_transformer.modules import Dense

    return Dense.load(str(folder.path), layer.path).linear


def find_pooling_files(folder: ModelFolder, inside: Collection[str] = ()) -> list[str]:
    """The files that tell users of an embedding model how to pool its tokens; empty for other models.

    Args:
        inside: folders of the modules that the exported files compute themselves.

    Raises:
        ValueError: if there are modules after the pooling that the exported files would lack.
    """
    names = list(SENTENCE_FILES)
    for module in folder.sentence_modules:
        if module.name not in POOLING_MODULES and module.path not in inside:
            raise ValueError(
                f"{folder.path} has a module {module.type}, which its embeddings would lack: ONNX files support "
                f"{', '.join(sorted(POOLING_MODULES))}, and those of `neobert-hf export` also square linear layers "
                "after the pooling. Use Sentence Transformers for this model."
            )
        if module.name == "Pooling":
            names.append(f"{module.path}/config.json")
    # `sentence_class` reads, and thereby checks, a file that will be copied.
    return names if folder.sentence_class else []


def _sound_tokenizer(folder: ModelFolder) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, after a check that tokenizer, config and tensors fit together."""
    folder.check_weights()
    if folder.tokenizer is None:
        raise ValueError(f"{folder.path} has no tokenizer. Save the tokenizer that it was trained with into it.")
    check_tokenizer(folder)
    return folder.tokenizer


def load_for_task(folder: ModelFolder, task: str | None = None) -> tuple[NeoBERTPreTrainedModel, str]:
    """The model of a checkpoint in float32, and its task.

    Raises:
        ValueError: if the task is unknown or the checkpoint lacks its head.
    """
    config = folder.config
    if task is None:
        task = next((name for name, (cls, _) in TASKS.items() if cls is folder.model_class), None)
    if task not in TASKS:
        raise ValueError(
            f"{folder.path} is a checkpoint of {config.architectures}, and the task is {task!r}; pass one of "
            f"{', '.join(TASKS)} as `--task`."
        )
    folder.check_rope()
    model = TASKS[task][0].from_pretrained(folder.path, dtype=torch.float32, attn_implementation="sdpa")
    stored = {name.removeprefix("model.") for name in folder.tensors}
    missing = {name for name, _ in model.named_parameters() if name.removeprefix("model.") not in stored}
    if missing:
        raise ValueError(
            f"{folder.path} is a checkpoint of {config.architectures} and has no weights for the task {task!r}: it "
            f"lacks {', '.join(sorted(missing))}. Train that head first, or leave `--task` out."
        )
    return model.eval(), task


def write_onnx(
    model: NeoBERTPreTrainedModel,
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    precisions: list[str],
) -> list[ExportedFile]:
    """Write and check only the ONNX files. Afterwards the model is in float16 if that was one of the precisions.

    Raises:
        ExportError: if a file does not compute the same as PyTorch; the file stays in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reference = compute_reference(model, TASKS[task][1], check_batches(tokenizer, model.config, task))
    files = {}
    graph = None
    # Float16 comes last, since it changes the weights in place: a copy would take another gigabyte.
    for precision in sorted(precisions, key=["float32", "int8", "float16"].index):
        file = folder / FILES[precision]
        if precision == "float16":
            save_graph(trace(model.half(), reference), file)
        else:
            graph = graph or trace(model, reference)
            save_graph(graph, file) if precision == "float32" else save_quantized(graph, file)
        deviation = check(file, precision, reference)
        files[precision] = ExportedFile(file.name, precision, deviation, data_file(file).exists())
        print(f"{file.name}: {deviation}", flush=True)
    return [files[precision] for precision in precisions]


def trace(model: NeoBERTPreTrainedModel, reference: Reference) -> onnx_ir.Model:
    """The ONNX graph, for any number of rows and columns, traced with the first of the batches.

    A float16 model is traced in float16, not converted afterwards. So wherever the model itself computes in float32
    (rotary table, and norms, whose squares exceed float16's range), the graph does so as well.
    """
    auto = torch.export.Dim.AUTO
    program = torch.onnx.export(
        ExportedModule(model, reference.outputs).eval(),
        kwargs=reference.batches[0],
        input_names=list(reference.batches[0]),
        output_names=list(reference.outputs),
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


def save_graph(graph: onnx_ir.Model, file: Path) -> None:
    size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    # By default torch.onnx writes `model.onnx.data`, which transformers.js does not look for.
    onnx_ir.save(graph, file, external_data=data_file(file).name if size > MOST_BYTES_IN_ONE_FILE else None)


def data_file(file: Path) -> Path:
    return file.with_name(file.name + "_data")


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
    save_graph(graph, source)
    quantize_dynamic(source, file, per_channel=True, reduce_range=True, op_types_to_quantize=["MatMul", "Gather"])
    source.unlink()
    data_file(source).unlink(missing_ok=True)


def check_batches(
    tokenizer: PreTrainedTokenizerBase, config: NeoBERTConfig, task: str
) -> list[dict[str, torch.Tensor]]:
    """Three batches: ragged, a single row, and padded on the left, with a row of only padding if the task allows it."""
    options = {"truncation": True, "max_length": config.max_length, "return_tensors": "pt"}
    options["return_token_type_ids"] = False
    ragged = tokenizer(TEXTS, padding=True, **options)
    single = tokenizer(TEXTS[:1], **options)
    left = tokenizer(TEXTS, padding=True, padding_side="left", **options)
    if task not in ONE_ANSWER_A_ROW:
        left["attention_mask"][1] = 0
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in (ragged, single, left)]


@torch.no_grad()
def compute_reference(
    model: NeoBERTPreTrainedModel, outputs: tuple[str, ...], batches: list[dict[str, torch.Tensor]]
) -> Reference:
    """The outputs that every file must reproduce; ExportError if they are not finite."""
    module = ExportedModule(model, outputs)
    expected = [[output.numpy() for output in module(**batch)] for batch in batches]
    if not all(np.isfinite(output).all() for results in expected for output in results):
        raise ExportError(
            "The PyTorch model's own outputs are not finite: its weights are damaged. Nothing was written."
        )
    return Reference(outputs, batches, expected)


def check(file: Path, precision: str, reference: Reference) -> str:
    """Run a file in onnxruntime on every batch and return how much it deviates from PyTorch in float32, in words.

    Raises:
        ExportError: if it deviates too much, or an output is not finite.
    """
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    # For each output: the expected array, the array of the file, and the mask of the batch, (rows, tokens).
    compared = []
    for batch, expected in zip(reference.batches, reference.expected):
        got = session.run(list(reference.outputs), {name: tensor.numpy() for name, tensor in batch.items()})
        mask = batch["attention_mask"].bool().numpy()
        compared += [(*arrays, mask) for arrays in zip(expected, got)]
    if precision == "float32":
        value = max(difference(expected, got) for expected, got, _ in compared)
        passed = value <= LARGEST_DIFFERENCE
        deviation = f"largest difference from PyTorch {value:.1e}"
        limit = f"at most {LARGEST_DIFFERENCE:.0e} is allowed (relative to the largest value, if that is over 1)"
    else:
        # Unlike Python's `min`, NumPy's returns NaN if there is one; the cosine of an all-zero output is NaN.
        value = np.min([cosine(*arrays) for arrays in compared])
        passed = value >= SMALLEST_COSINE[precision]
        deviation = f"cosine with PyTorch {value:.6f}"
        limit = f"at least {SMALLEST_COSINE[precision]} is needed"
    finite = all(np.isfinite(got).all() for _, got, _ in compared)
    if not (passed and finite):
        raise ExportError(
            f"{file.name} ({precision}): {deviation if finite else 'its outputs are not finite'}; {limit}. "
            f"Nothing was written. The other precisions may work: leave out {precision} with `--precisions`."
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


def _write_config(model: NeoBERTPreTrainedModel, files: list[ExportedFile], folder: Path) -> None:
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = "float32"
    if hasattr(config, "auto_map"):
        del config.auto_map  # It names code files, which the folder does not hold.
    config.update(external_data_config(files))
    config.to_json_file(folder / "config.json")


def complete_settings(folder: Path, config: NeoBERTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Repeat settings of a written folder under the keys that Text Embeddings Inference reads.

    It refuses a config without `max_position_embeddings`. Versions that do not know `pooling_mode` also refuse a
    pooling config without one key per mode, and settings of Sentence Transformers without `max_seq_length`. See
    `router/src/lib.rs` in https://github.com/huggingface/text-embeddings-inference. For Sentence Transformers nothing
    changes.
    """
    file = folder / "config.json"
    write_json(file, read_json(file) | {"max_position_embeddings": config.max_length})
    for module in ModelFolder(folder).sentence_modules:
        if module.name == "Transformer":
            file = folder / module.path / TRANSFORMER_CONFIG
            settings = read_json(file) if file.is_file() else {}
            write_json(file, settings | {"max_seq_length": text_length(settings, config, tokenizer)})
        elif module.name == "Pooling":
            file = folder / module.path / "config.json"
            settings = read_json(file)
            modes = pooling_modes(settings)
            keys = {key: mode in modes for mode, key in POOLING_KEYS.items()}
            write_json(file, settings | keys | {"pooling_mode": modes[0] if len(modes) == 1 else modes})


def pooling_modes(settings: dict) -> list[str]:
    """The pooling modes in a `1_Pooling/config.json` of any version of Sentence Transformers; several are concatenated.

    Raises:
        ValueError: if one is unknown.
    """
    modes = settings.get("pooling_mode") or [mode for mode, key in POOLING_KEYS.items() if settings.get(key)] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not all(mode in POOLING_KEYS for mode in modes):
        raise ValueError(f"The pooling is {modes}; the known modes are {', '.join(POOLING_KEYS)}.")
    return modes


def external_data_config(files: list[ExportedFile]) -> dict:
    """The entry that transformers.js needs in `config.json` if the weights of a file lie beside it."""
    external = {file.name: True for file in files if file.external_data}
    return {"transformers.js_config": {"use_external_data_format": external}} if external else {}

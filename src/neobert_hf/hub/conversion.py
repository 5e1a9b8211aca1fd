"""Convert checkpoints of the original project (github.com/chandar-lab/NeoBERT) to this package's layout, and back.

The original training writes `state_dict.pt` or DeepSpeed folders, each with a script `zero_to_fp32.py` that makes one
file of it; the published model is `model.safetensors` with a `config.json`. Names, shapes and values of the tensors are
the same in all these files, so nothing is computed: tensors are read, checked one by one and written.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from neobert_hf import NeoBERTConfig, NeoBERTForSequenceClassification, NeoBERTPreTrainedModel
from neobert_hf.common.files import atomic_folder, folder_lock, write_json
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.hub.model_folder import (
    ORIGINAL_NAMES,
    find_class,
    has_tokenizer,
    load_model,
    local_folder,
    read_config,
    read_tensors,
    read_tokenizer,
    sentence_class,
)


# `original` is the layout of the published model, and `state_dict` is `state_dict.pt`.
Layout = Literal["neobert_hf", "original", "state_dict"]
STATE_DICT = "state_dict.pt"

# The names of the classes in the original's code.
ORIGINAL_CLASSES = {cls: name for name, cls in ORIGINAL_NAMES.items()} | {
    NeoBERTForSequenceClassification: "NeoBERTForSequenceClassification"
}
# Config keys that the original code does not know, with the value that it always has; None if any value is fine.
ONLY_HERE = {
    "classifier_pooling": "cls",
    "dtype": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sparse_prediction": None,
    "tie_word_embeddings": False,
    "unpad": None,
}
ORIGINAL_AUTO_MAP = {
    "AutoConfig": "model.NeoBERTConfig",
    "AutoModel": "model.NeoBERT",
    "AutoModelForMaskedLM": "model.NeoBERTLMHead",
    "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
}


@dataclass
class ConvertSettings:
    """What is converted, and to what."""

    model: str = field(
        metadata={"help": "state_dict.pt, safetensors, a folder that has one of these, or Hub id", "path": "or Hub id"}
    )
    output: str = field(metadata={"help": "new folder", "path": True})
    to: Layout = field(default="neobert_hf", metadata={"help": "layout of the output"})
    config: str | None = field(
        default=None,
        metadata={"help": "config.json, or a folder that has one; the source's own if unset", "path": True},
    )


@recipe(positional=("model", "output"))
def convert(settings: ConvertSettings) -> Result:
    """Convert checkpoints of the original project to this package's layout, and back. The tensors stay bit-identical.

    The tokenizer is written, too, if there is one. Tensors that are missing, left over or of another shape are errors
    that name them, and so is what the other layout cannot express.

    Returns:
        The new folder, as `model`.
    """
    output = Path(settings.output)
    if output.exists():
        raise ValueError(f"{output} exists. Choose a new folder, or delete it.")

    with folder_lock(output):
        # 1. Read
        source = local_folder(settings.model)
        folder = source if source.is_dir() else source.parent
        config = read_config(Path(settings.config) if settings.config else folder)
        model = build_model(source, config)
        tokenizer = read_tokenizer(folder, config) if has_tokenizer(folder) else None
        if sentence_class(folder):
            print("note: only the encoder is converted, without the other modules of Sentence Transformers.")

        # 2. Write
        with atomic_folder(output) as partial:
            if settings.to == "neobert_hf":
                model.save_pretrained(partial)
            else:
                write_original(model, partial, settings.to)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{output}: {type(model).__name__}, {len(model.state_dict())} tensors, {dtype}")
    return Result(output)


def build_model(source: Path, config: NeoBERTConfig) -> NeoBERTPreTrainedModel:
    """The model of a checkpoint in any layout, of the class that the config names, in the dtype of its tensors.

    Args:
        source: a folder or a file.

    Raises:
        ValueError: naming the tensors that do not fit.
    """
    file = source / STATE_DICT if (source / STATE_DICT).is_file() else source
    if file.is_dir():
        tensors = read_tensors(file)
    elif file.suffix == ".safetensors":
        tensors = load_file(file)
    else:
        # No code that the file names is run.
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    # The original's `model.state_dict()` has the prefixes of DDP and `torch.compile`. The rotary table, which some
    # versions of its code store, follows from the config.
    tensors = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("freqs_cis")}
    if len(dtypes := {tensor.dtype for tensor in tensors.values()}) != 1:
        raise ValueError(f"{file} has tensors of the dtypes {', '.join(map(str, dtypes))}; it must have one.")
    model = load_model(find_class(config), None, config=config, state_dict=tensors, dtype=dtypes.pop())
    # Loading leaves out the heads of other classes, which would be lost here.
    if unused := sorted(tensors.keys() - model.state_dict().keys()):
        raise ValueError(f"{file} has tensors that a {type(model).__name__} has not: {', '.join(unused)}.")
    return model


def write_original(model: NeoBERTPreTrainedModel, folder: Path, layout: Layout) -> None:
    """Write weights and config for the original's code, with only the keys and names that it knows.

    Raises:
        ValueError: if the original code has no class for the model, or would compute it differently.
    """
    cls, config = type(model), model.config
    if cls not in ORIGINAL_CLASSES:
        known = ", ".join(original.__name__ for original in ORIGINAL_CLASSES)
        raise ValueError(f"The original code has no {cls.__name__}, only {known}.")
    for key, value in ONLY_HERE.items():
        if value is not None and (found := getattr(config, key)) != value:
            raise ValueError(f"The original code cannot express `{key}` {found!r}; it always has {value!r}.")
    values = {key: value for key, value in config.to_diff_dict().items() if key not in ONLY_HERE}
    values |= {"architectures": [ORIGINAL_CLASSES[cls]], "auto_map": ORIGINAL_AUTO_MAP}
    write_json(folder / "config.json", values | {"torch_dtype": str(model.dtype).removeprefix("torch.")})
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if layout == "state_dict":
        torch.save(tensors, folder / STATE_DICT)
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

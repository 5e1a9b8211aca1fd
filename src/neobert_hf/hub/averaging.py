"""The average of the weights of models with one architecture and tokenizer, as one model.

Checkpoints of one training, or models that were trained from the same start with other seeds or data, often average to
a better one (Wortsman et al., 2022, arXiv 2203.05482).
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from neobert_hf.common.files import atomic_folder, folder_lock
from neobert_hf.common.fingerprints import TRAINING_FILES, tokenizer_fingerprint
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import check_same_identity
from neobert_hf.common.settings import check_numbers
from neobert_hf.common.tokenizers import load_tokenizer
from neobert_hf.embeddings.space import TEACHER_FILE


# Files that are copied from the first model. A card would tell of its training and scores alone.
COPIED = ("*.json", "vocab.txt", "merges.txt", "*.model", "*.py")
# What configurations may differ in (a checkpoint predicts labelled tokens alone), and files that the fingerprint of the
# tokenizer stands for.
INCIDENTAL = {"_name_or_path", "auto_map", "transformers_version", "use_cache", "sparse_prediction", "__version__"}
OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "added_tokens.json")


@dataclass
class AverageSettings:
    """Which models are averaged, and how much each counts."""

    models: list[str] = field(
        metadata={"help": "folders of runs, checkpoints or models, also of Sentence Transformers", "path": True}
    )
    output: str = field(metadata={"help": "new folder for the model", "path": True})
    weights: list[float] = field(default_factory=list, metadata={"help": "of each model; equal if not given"})

    def __post_init__(self):
        check_numbers(self, {"weights": "0 or more"})
        weights = self.weights or [1.0] * len(self.models)
        if len(self.models) < 2 or len(weights) != len(self.models) or not sum(weights):
            raise ValueError(
                f"`models` names {len(self.models)}, and `weights` is {weights}: give two models or more, and for each "
                "one weight."
            )
        self.weights = [weight / sum(weights) for weight in weights]


@recipe
def average(settings: AverageSettings) -> Result:
    """Average the weights of runs, checkpoints or models that have one architecture and tokenizer.

    Of a run its `model` is taken. Configurations and tokenizers are compared, and differences are named. The sums are
    in float64, and the result has the dtype of the weights.

    Returns:
        The new folder, as `model`.
    """
    folders = [Path(path, "model") if Path(path, "model").is_dir() else Path(path) for path in settings.models]
    output = Path(settings.output)
    if output.exists():
        raise ValueError(f"{output} exists already: choose another `output`, or delete it.")

    # 1. The models fit each other
    for folder in folders:
        check_model_exists(str(folder), "models")
        check_same_identity(folder, described(folder), described(folders[0]), f"These are those of {folders[0]}.")

    # 2. A copy of the first, with the mean of all weights
    with folder_lock(output), atomic_folder(output) as partial:
        for file in files_of(folders[0], COPIED):
            (partial / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(folders[0] / file, partial / file)
        for file in files_of(folders[0], ("*.safetensors",)):
            mean = mean_of([folder / file for folder in folders], settings.weights)
            (partial / file).parent.mkdir(exist_ok=True)
            save_file(mean, partial / file, metadata={"format": "pt"})
    print(f"{output}: the mean of {len(folders)} models", flush=True)
    return Result(model=output)


def files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The model's own files, also those of its modules, as paths in its folder."""
    modules = folder / "modules.json"
    parts = [part["path"] for part in json.loads(modules.read_text(encoding="utf-8"))] if modules.exists() else []
    found = {file for part in {"", *parts} for pattern in patterns for file in (folder / part).glob(pattern)}
    return sorted(file.relative_to(folder) for file in found if file.name not in TRAINING_FILES)


def described(folder: Path) -> dict[str, Any]:
    """What models must have in common: all configurations, and what the tokenizer makes of a text."""
    found = {"tokenizer": tokenizer_fingerprint(load_tokenizer(folder))}
    for file in files_of(folder, ("*.json",)):
        # A student that was trained on pairs no longer names its teacher.
        if file.name not in (*OF_TOKENIZER, TEACHER_FILE):
            content = json.loads((folder / file).read_text(encoding="utf-8"))
            kept = content.keys() - INCIDENTAL if isinstance(content, dict) else ()
            found[str(file)] = {name: content[name] for name in kept} or content
            # Of Sentence Transformers: an empty prompt does nothing, and each dataset of a training leaves its own.
            if "prompts" in kept:
                found[str(file)]["prompts"] = {name: text for name, text in content["prompts"].items() if text}
    return found


def mean_of(files: list[Path], weights: list[float]) -> dict[str, torch.Tensor]:
    """The weighted mean of each tensor; those that are no floating point numbers are the first file's."""
    first, total = load_file(files[0]), {}
    for file, weight in zip(files, weights):
        tensors = load_file(file) if file.is_file() else {}
        for name in first.keys() | tensors.keys():
            if name not in tensors or name not in first or tensors[name].shape != first[name].shape:
                raise ValueError(f"{name} is missing in {file} or {files[0]}, or has another shape there.")
            total[name] = total.get(name, 0) + weight * tensors[name].double()
    return {name: total[name].to(one.dtype) if one.is_floating_point() else one for name, one in first.items()}

"""`neobert-hf doctor`: report whether a model's folder is healthy, with one line for each check.

No code of the folder is run, and no pickle is read.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers.dynamic_module_utils import get_relative_import_files

from neobert_hf import NeoBERTForMaskedLM, contextual_neobert, modeling_neobert
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, TEXT, compare_outputs
from neobert_hf.hub.model_folder import (
    find_class,
    has_tokenizer,
    load_model,
    load_sentence_model,
    local_folder,
    read_config,
    read_json,
    read_tensors,
    read_tokenizer,
    sentence_class,
)


OK, FAIL, SKIP = "ok", "FAIL", "skip"


class Skip(Exception):
    """There is nothing to check."""


@dataclass
class DoctorSettings:
    """What is checked."""

    model: str = field(metadata={"help": "folder or Hub id", "path": "or Hub id"})


@dataclass
class Finding:
    """The result of one check: `status` is ok, FAIL or skip."""

    check: str
    status: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<5} {self.check:<22} {self.text}"


@recipe(positional=("model",))
def doctor(settings: DoctorSettings) -> Result:
    """Check whether a model's folder is healthy, and print a line for each check.

    Returns:
        The findings, as `output`.

    Raises:
        ValueError: if a check failed, so that the command ends with status 1.
    """
    findings = diagnose(local_folder(settings.model))
    print(*findings, sep="\n", flush=True)
    if failed := [finding.check for finding in findings if finding.status == FAIL]:
        raise ValueError(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}.")
    print("Healthy.", flush=True)
    return Result(output=findings)


def diagnose(folder: Path) -> list[Finding]:
    """A finding for each of `CHECKS`. What loads the model is skipped if it cannot be loaded."""
    findings = []
    for name, check in CHECKS.items():
        failed = [finding.check for finding in findings if finding.status == FAIL]
        if failed and name in ("sentence_transformers", "outputs") or "config" in failed:
            findings.append(Finding(name, SKIP, f"needs {' and '.join(failed)}"))
            continue
        try:
            findings.append(Finding(name, OK, check(folder)))
        except Skip as reason:
            findings.append(Finding(name, SKIP, str(reason)))
        except Exception as error:  # Whatever a library raises on a damaged file is a finding.
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            findings.append(Finding(name, FAIL, " ".join(text.split())))
    return findings


def check_config(folder: Path) -> str:
    config = read_config(folder)
    positions = "learned positions"
    if config.rope:
        positions = f"RoPE {config.rope_parameters['rope_type']}, theta {config.rope_parameters['rope_theta']:,g}"
    count = config.num_hidden_layers
    size = f"{count} {'layer' if count == 1 else 'layers'} x {config.hidden_size}"
    if config.model_type == "neobert_contextual":
        size = f"two stages of {size}, {config.context_size:,} documents in a context"
    return f"{size}, {find_class(config).__name__}, {config.max_length:,} tokens, {positions}"


def check_tensors(folder: Path) -> str:
    config, tensors = read_config(folder), read_tensors(folder)
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        if config.dtype is not None and torch.promote_types(dtype, config.dtype) != config.dtype:
            raise ValueError(f"dtype {dtype}, but config.json says {config.dtype}: loading would round the weights")
    model = load_model(find_class(config), folder)
    values = sum(tensor.numel() for tensor in tensors.values())
    dtype = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
    return f"{len(tensors)} tensors of a {type(model).__name__}, {values:,} {dtype} values, finite"


def check_tokenizer(folder: Path) -> str:
    if not has_tokenizer(folder):
        raise Skip("no tokenizer in the folder")
    config = read_config(folder)
    tokenizer = read_tokenizer(folder, config)
    needed = ["pad_token", "cls_token", "sep_token"]
    if find_class(config) is NeoBERTForMaskedLM:
        needed.append("mask_token")
    if absent := [name for name in needed if getattr(tokenizer, name) is None]:
        raise ValueError(f"the tokenizer has no {', '.join(absent)}")
    return f"{len(tokenizer):,} entries for {config.vocab_size:,} rows, padding {config.pad_token_id}"


def check_code(folder: Path) -> str:
    """Check what loading with `trust_remote_code` would run: the installed code, and none that is elsewhere."""
    config = read_config(folder)
    auto_map = read_json(folder / "config.json").get("auto_map") or {}
    module = contextual_neobert if config.model_type == "neobert_contextual" else modeling_neobert
    files = [Path(module.__file__), *map(Path, get_relative_import_files(module.__file__))]
    # Other Python files, such as the script that made the model, are never loaded.
    if not auto_map and not any((folder / file.name).is_file() for file in files):
        raise Skip("no code in the folder: loading needs the installed package")
    for key, name in auto_map.items():
        if name != config.auto_classes.get(key):
            raise ValueError(f"`auto_map` of config.json names {name}, which is not part of this package")
    for file in files:
        copy = folder / file.name
        if not copy.is_file():
            raise ValueError(f"{file.name} is missing")
        if copy.read_bytes() != file.read_bytes():
            raise ValueError(f"{file.name} differs from the file of the installed neobert_hf")
    return f"{len(files)} files, as in the installed neobert_hf"


def check_sentence_transformers(folder: Path) -> str:
    """Check that Sentence Transformers can load all modules and run them on a text."""
    name = sentence_class(folder)
    if name is None:
        raise Skip("no modules.json")
    if not has_tokenizer(folder):
        raise ValueError("no tokenizer: Sentence Transformers would make one that turns every word into [UNK]")
    if find_spec("sentence_transformers") is None:
        raise Skip("sentence_transformers is not installed: pip install 'neobert_hf[embed]'")
    model = load_sentence_model(folder, torch.float32)
    output = torch.as_tensor(model.predict([(TEXT, TEXT)]) if name == "CrossEncoder" else model.encode(TEXT))
    if not (output.to_dense() if output.is_sparse else output).isfinite().all():
        raise ValueError("the output for a text is not finite")
    return f"{' > '.join(type(module).__name__ for module in model)}, {output.shape[-1]:,} dimensions"


def check_outputs(folder: Path) -> str:
    if not (folder / GOLDEN_FILE).is_file():
        raise Skip(f"no {GOLDEN_FILE}: nothing to compare with")
    config = read_config(folder)
    model = load_model(find_class(config), folder, dtype=torch.float32, attn_implementation="sdpa")
    largest = compare_outputs(model, read_tokenizer(folder, config), read_json(folder / GOLDEN_FILE))
    return f"as recorded, to {largest:.0e} of the largest value"


# A check returns its line, or raises Skip or an error.
CHECKS = {
    "config": check_config,
    "tensors": check_tensors,
    "tokenizer": check_tokenizer,
    "code": check_code,
    "sentence_transformers": check_sentence_transformers,
    "outputs": check_outputs,
}

"""Whether a checkpoint is healthy: one line a check. No code of the checkpoint is run, and no pickle is read."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import neobert_hf
from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTPreTrainedModel
from neobert_hf.checkpoints.golden_outputs import GOLDEN, check_golden, read_golden
from neobert_hf.checkpoints.tensors import (
    CLASSES,
    ORIGINAL_CLASSES,
    class_of_tensors,
    is_rotary_table,
    local_folder,
    read_config,
    read_safetensors,
    rope_problems,
    stored_table_problems,
    tensor_problems,
)


OK, FAIL, SKIP = "ok", "FAIL", "skip"

REMOTE_CODE = ("configuration_neobert.py", "modeling_neobert.py", "packing_neobert.py")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
# Embeddings are often padded to a multiple of 64 or 128 rows; a tokenizer with still fewer entries is another one's.
MOST_UNUSED_ROWS = 127


class Skip(Exception):
    """There is nothing to check."""


@dataclass
class Finding:
    """What one check found: `status` is ok, FAIL or skip."""

    check: str
    status: str
    text: str


@dataclass
class Checkpoint:
    """A folder whose parts are read when a check first asks for them."""

    folder: Path

    @cached_property
    def config(self) -> NeoBERTConfig:
        return read_config(self.folder)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return read_safetensors(self.folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        if has_tokenizer(self.folder):
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        return None

    @property
    def cls(self) -> type[NeoBERTPreTrainedModel]:
        if not self.config.architectures:
            return class_of_tensors(self.tensors)
        return (CLASSES | ORIGINAL_CLASSES)[self.config.architectures[0]]


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose config and tensors are sound.

    Raises:
        ValueError: naming what is not.
    """
    checkpoint = Checkpoint(folder)
    check_config(checkpoint)
    if problems := tensor_problems(checkpoint.tensors, checkpoint.cls, checkpoint.config):
        raise ValueError(
            f"{folder} is no sound {checkpoint.cls.__name__} with this config:\n  " + "\n  ".join(problems)
        )
    return checkpoint


def diagnose(folder: Path) -> list[Finding]:
    """Check a folder from `save_pretrained`, `neobert-hf convert`, `neobert-hf publish` or Sentence Transformers.

    Args:
        folder: a local one; `local_folder` downloads a Hub repository.

    Returns:
        A finding for each of `CHECKS`, in order.
    """
    checkpoint, findings, failed = Checkpoint(folder), [], set()
    for name, (check, needs) in CHECKS.items():
        if missing := failed & set(needs):
            findings.append(Finding(name, SKIP, f"needs {' and '.join(sorted(missing))}"))
            failed.add(name)
            continue
        try:
            findings.append(Finding(name, OK, check(checkpoint)))
        except Skip as reason:
            findings.append(Finding(name, SKIP, str(reason)))
        except Exception as error:  # Tokenizers raise plain `Exception`, and a doctor must not fall ill.
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            findings.append(Finding(name, FAIL, text))
            failed.add(name)
    return findings


def check_config(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    names = config.architectures or []
    known = CLASSES | ORIGINAL_CLASSES
    if len(names) > 1 or set(names) - set(known):
        raise ValueError(f"`architectures` is {names}; it must be one of {', '.join(sorted(known))}")
    return f"{config.num_hidden_layers} layers x {config.hidden_size}, {names[0] if names else 'no `architectures`'}"


def check_tensors(checkpoint: Checkpoint) -> str:
    tensors, cls, config = checkpoint.tensors, checkpoint.cls, checkpoint.config
    weights = {name: tensor for name, tensor in tensors.items() if not is_rotary_table(name)}
    problems = tensor_problems(weights, cls, config) + stored_table_problems(tensors, config)
    if len(weights) < len(tensors):
        problems.append("a stored rotary table, which loading refuses; `neobert-hf convert` leaves it out")
    dtypes = {tensor.dtype for tensor in weights.values()}
    if not problems and config.dtype is not None and {config.dtype} != dtypes:
        problems.append(f"dtype {dtypes.pop()}; config.json says {config.dtype}, to which loading would round")
    if problems:
        raise ValueError("; ".join(problems))
    values, dtype = sum(tensor.numel() for tensor in weights.values()), str(dtypes.pop()).removeprefix("torch.")
    return f"{len(weights)} of a {cls.__name__}, {values:,} {dtype} values, finite"


def check_rope(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    if not config.rope:
        raise Skip("learned positions")
    if problems := rope_problems(config):
        raise ValueError("; ".join(problems))
    rope = config.rope_parameters
    return f"{rope['rope_type']}, theta {rope['rope_theta']:,g}, {config.max_length:,} positions"


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer(checkpoint: Checkpoint) -> str:
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if tokenizer is None:
        raise Skip("none in the folder")
    largest, rows = max(tokenizer.get_vocab().values()), config.vocab_size
    if largest >= rows:
        raise ValueError(f"the tokenizer has ids up to {largest:,}; the embeddings have {rows:,} rows")
    if rows - 1 - largest > MOST_UNUSED_ROWS:
        raise ValueError(f"the tokenizer has ids up to {largest:,} only; the embeddings have {rows:,} rows")
    if tokenizer.pad_token_id != config.pad_token_id:
        raise ValueError(f"the tokenizer pads with {tokenizer.pad_token_id}, config.json says {config.pad_token_id}")
    needed = ["pad_token", "cls_token", "sep_token"] + ["mask_token"] * issubclass(checkpoint.cls, NeoBERTForMaskedLM)
    if absent := [name for name in needed if getattr(tokenizer, name) is None]:
        raise ValueError(f"the tokenizer has no {', '.join(absent)}")
    for name in ("cls_token_id", "sep_token_id", "mask_token_id", "bos_token_id", "eos_token_id"):
        stored = getattr(config, name, None)
        if stored is not None and stored != getattr(tokenizer, name):
            raise ValueError(f"`{name}` is {getattr(tokenizer, name)} in the tokenizer and {stored} in config.json")
    return f"{len(tokenizer):,} entries for {rows:,} rows, padding {config.pad_token_id}"


def check_code(checkpoint: Checkpoint) -> str:
    folder, installed = checkpoint.folder, Path(neobert_hf.__file__).parent
    references = code_references(folder)
    files = sorted(path.name for path in folder.glob("*.py"))
    if not files and not references:
        raise Skip("none: loading needs the installed package")
    if foreign := [name for name in files if name not in REMOTE_CODE]:
        raise ValueError(f"{', '.join(foreign)}: not of this package")
    for file, key, reference in references:
        # Of the installed module: the file in the folder is compared, never run.
        module, _, cls = reference.rpartition(".")
        if f"{module}.py" not in REMOTE_CODE or not hasattr(import_module(f"neobert_hf.{module}"), cls):
            raise ValueError(f"`{key}` of {file} names {reference}, which is not of this package")
    for name in REMOTE_CODE:
        if name not in files:
            raise ValueError(f"{name} is missing; loading with `trust_remote_code` needs {', '.join(REMOTE_CODE)}")
        if (folder / name).read_bytes() != (installed / name).read_bytes():
            raise ValueError(f"{name} differs from that of the installed neobert_hf")
    return f"{len(files)} files, as in the installed neobert_hf"


def code_references(folder: Path) -> list[tuple[str, str, str]]:
    """What loading with trust would run: file, key and the class that it names there."""
    references = []
    for file in ("config.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        values = json.loads((folder / file).read_text(encoding="utf-8"))
        # Of a tokenizer, `auto_map` has been a list of its slow and its fast class.
        auto_map = values.get("auto_map") or {}
        entries = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
        names = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry]) if name]
        references += [(file, "auto_map", name) for name in names]
        pipelines = (values.get("custom_pipelines") or {}).values()
        references += [(file, "custom_pipelines", pipeline["impl"]) for pipeline in pipelines]
    return references


def check_sentence_transformers(checkpoint: Checkpoint) -> str:
    folder, config = checkpoint.folder, checkpoint.config
    if not (folder / "modules.json").is_file():
        raise Skip("no modules.json")
    modules, width = json.loads((folder / "modules.json").read_text(encoding="utf-8")), config.hidden_size
    for module in modules:
        if not module["type"].startswith("sentence_transformers."):
            raise ValueError(f"modules.json names {module['type']}; only sentence_transformers.* loads without trust")
        kind, path = module["type"].split(".")[-1], folder / module["path"]
        if kind in ("Pooling", "Dense", "SpladePooling"):
            settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
            given = config.vocab_size if kind == "SpladePooling" else width
            width = _width_after(module["path"], kind, settings, given)
        if kind == "Dense" or path != folder and (path / "model.safetensors").is_file():
            tensors = read_safetensors(path)
            if infinite := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
                raise ValueError(f"{module['path']} holds values that are not finite: {', '.join(infinite)}")
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            if kind == "Dense" and shapes != (expected := _dense_shapes(settings)):
                raise ValueError(f"{module['path']} holds {shapes}; its config asks for {expected}")
    return f"{' > '.join(module['type'].split('.')[-1] for module in modules)}, {width:,} dimensions"


def _width_after(path: str, kind: str, settings: dict, given: int) -> int:
    """How wide the output of a module is, which must take what it is given."""
    # The second key is that of Sentence Transformers before 6; SpladePooling may leave its own open.
    taken = settings.get("in_features", settings.get("embedding_dimension", settings.get("word_embedding_dimension")))
    if taken != given and not (kind == "SpladePooling" and taken is None):
        raise ValueError(f"{path} takes {taken} dimensions and is given {given}")
    if kind == "Dense":
        return settings["out_features"]
    # Older versions of Sentence Transformers wrote a key for each mode.
    older = [name for name, used in settings.items() if name.startswith("pooling_mode_") and used]
    modes = settings.get("pooling_mode", older)
    return given * max(len(modes), 1) if isinstance(modes, list) else given


def _dense_shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    taken, given = settings["in_features"], settings["out_features"]
    shapes = {"linear.weight": (given, taken)}
    if settings.get("bias", True):
        shapes["linear.bias"] = (given,)
    if settings.get("use_residual") and taken != given:
        shapes["residual.weight"] = (given, taken)
    return shapes


def check_outputs(checkpoint: Checkpoint) -> str:
    file = checkpoint.folder / GOLDEN
    if not file.is_file():
        raise Skip(f"no {GOLDEN}: nothing to compare with")
    golden = read_golden(file)
    model = checkpoint.cls.from_pretrained(checkpoint.folder, dtype=torch.float32)
    largest = check_golden(model, golden, checkpoint.tokenizer)
    return f"as recorded, at most {largest:.0e} of the largest value apart ({golden['tolerance']:.0e} allowed)"


# Name: the check, and those without which it cannot run. A check returns its line, or raises Skip or ValueError.
CHECKS: dict[str, tuple[Callable[[Checkpoint], str], tuple[str, ...]]] = {
    "config": (check_config, ()),
    "tensors": (check_tensors, ("config",)),
    "rope": (check_rope, ("config",)),
    "tokenizer": (check_tokenizer, ("config",)),
    "code": (check_code, ("config",)),
    "sentence_transformers": (check_sentence_transformers, ("config",)),
    "outputs": (check_outputs, ("config", "tensors", "tokenizer")),
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", help="folder or Hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def run(arguments: Namespace) -> int:
    findings = diagnose(local_folder(arguments.path, arguments.revision))
    for finding in findings:
        print(f"{finding.status:<5} {finding.check:<22} {finding.text}")
    failed = sum(finding.status == FAIL for finding in findings)
    print(f"{failed} of {len(findings)} checks failed." if failed else "Healthy.", flush=True)
    return int(failed > 0)

"""`neobert-hf doctor`: report whether a model's folder is healthy, with one line for each check.

No code of the folder is run, and no pickle is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from neobert_hf import NeoBERTForMaskedLM, contextual_neobert, modeling_neobert
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.golden_outputs import GOLDEN_FILE, TEXT, compare_outputs, made_context, read_outputs
from neobert_hf.hub.model_folder import (
    ENCODERS_AND_CONTEXTUAL,
    ModelFolder,
    local_folder,
    read_mapping,
)
from neobert_hf.hub.tensors import is_rotary_table, stored_table_problems, tensor_problems


OK, FAIL, SKIP = "ok", "FAIL", "skip"


def _served_files(module: ModuleType) -> dict[str, Path]:
    """The installed files that `save_pretrained` puts beside the weights: the module of the classes and its imports."""
    files = (module.__file__, *get_relative_import_files(module.__file__))
    return {Path(file).name: Path(file) for file in files}


SERVED_FILES = _served_files(modeling_neobert)
CONTEXTUAL_FILES = _served_files(contextual_neobert)
# Embeddings are often padded to a multiple of 64 or 128 rows. A tokenizer that leaves more rows unused does not fit.
MOST_UNUSED_ROWS = 127


class Skip(Exception):
    """There is nothing to check."""


@dataclass
class DoctorSettings:
    """What is checked."""

    path: str = field(metadata={"help": "folder or Hub id", "path": "or Hub id"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of a Hub repository"})


@dataclass
class Finding:
    """The result of one check: `status` is ok, FAIL or skip."""

    check: str
    status: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<5} {self.check:<22} {self.text}"


def main(args: list[str] | None = None) -> int:
    """Print all findings; the exit status is 1 if a check failed."""
    (settings,) = parse_config(DoctorSettings, args=args, positional=("path",), prog="neobert-hf doctor")
    findings = diagnose(local_folder(settings.path, settings.revision))
    print(*findings, sep="\n")
    failed = sum(finding.status == FAIL for finding in findings)
    print(f"{failed} of {len(findings)} checks failed." if failed else "Healthy.", flush=True)
    return int(failed > 0)


def diagnose(path: Path) -> list[Finding]:
    """Check a folder from `save_pretrained`, `neobert-hf convert`, `neobert-hf publish` or Sentence Transformers.

    Args:
        path: a local folder; `local_folder` downloads a Hub repository.

    Returns:
        A finding for each of `CHECKS`, in order.
    """
    folder = ModelFolder(path, ENCODERS_AND_CONTEXTUAL)
    findings = []
    failed = set()
    for name, (check, needs) in CHECKS.items():
        if missing := failed & set(needs):
            findings.append(Finding(name, SKIP, f"needs {' and '.join(sorted(missing))}"))
            failed.add(name)
            continue
        try:
            findings.append(Finding(name, OK, check(folder)))
        except Skip as reason:
            findings.append(Finding(name, SKIP, str(reason)))
        except Exception as error:  # Tokenizers raise plain `Exception`, and the doctor itself must not crash.
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            findings.append(Finding(name, FAIL, " ".join(text.split())))
            failed.add(name)
    return findings


def check_config(folder: ModelFolder) -> str:
    config = folder.config
    if config.architectures:
        _ = folder.model_class  # Raises if there is no such class.
    positions = "learned positions"
    if config.rope:
        positions = f"RoPE {config.rope_parameters['rope_type']}, theta {config.rope_parameters['rope_theta']:,g}"
    name = config.architectures[0] if config.architectures else "no `architectures`"
    size = f"{config.num_hidden_layers} layers x {config.hidden_size}"
    if folder.is_contextual:
        size = f"two stages of {size}, {config.context_size:,} documents in a context"
    return f"{size}, {name}, {config.max_length:,} tokens, {positions}"


def check_tensors(folder: ModelFolder) -> str:
    tensors, cls, config = folder.tensors, folder.model_class, folder.config
    weights = {name: tensor for name, tensor in tensors.items() if not is_rotary_table(name)}
    problems = tensor_problems(weights, cls, config) + stored_table_problems(tensors, config)
    if len(weights) < len(tensors):
        problems.append("a rotary table is stored, which loading refuses; `neobert-hf convert` removes it")
    dtypes = {tensor.dtype for tensor in weights.values()}
    if not problems and config.dtype is not None and {config.dtype} != dtypes:
        problems.append(f"dtype {dtypes.pop()}, but config.json says {config.dtype}: loading would round the weights")
    if problems:
        raise ValueError("; ".join(problems))
    cls.from_pretrained(folder.path)
    values, dtype = sum(tensor.numel() for tensor in weights.values()), str(dtypes.pop()).removeprefix("torch.")
    return f"{len(weights)} tensors of a {cls.__name__}, {values:,} {dtype} values, finite"


def check_tokenizer(folder: ModelFolder) -> str:
    tokenizer, config = folder.tokenizer, folder.config
    if tokenizer is None:
        raise Skip("no tokenizer in the folder")
    largest, rows = max(tokenizer.get_vocab().values()), config.vocab_size
    if not 0 <= rows - 1 - largest <= MOST_UNUSED_ROWS:
        raise ValueError(f"the tokenizer has ids up to {largest:,}, but the embeddings have {rows:,} rows")
    if tokenizer.pad_token_id != config.pad_token_id:
        raise ValueError(
            f"the tokenizer pads with {tokenizer.pad_token_id}, but config.json says {config.pad_token_id}"
        )
    needed = ["pad_token", "cls_token", "sep_token"]
    if issubclass(folder.model_class, NeoBERTForMaskedLM):
        needed.append("mask_token")
    if absent := [name for name in needed if getattr(tokenizer, name) is None]:
        raise ValueError(f"the tokenizer has no {', '.join(absent)}")
    for name in ("cls_token_id", "sep_token_id", "mask_token_id", "bos_token_id", "eos_token_id"):
        stored = getattr(config, name, None)
        if stored is not None and stored != getattr(tokenizer, name):
            raise ValueError(f"`{name}` is {getattr(tokenizer, name)} in the tokenizer and {stored} in config.json")
    return f"{len(tokenizer):,} entries for {rows:,} rows, padding {config.pad_token_id}"


def check_code(folder: ModelFolder) -> str:
    references = code_references(folder.path)
    files = sorted(file.name for file in folder.path.glob("*.py"))
    if not files and not references:
        raise Skip("no code in the folder: loading needs the installed package")
    served = CONTEXTUAL_FILES if folder.is_contextual else SERVED_FILES
    if foreign := [name for name in files if name not in served]:
        raise ValueError(f"{', '.join(foreign)}: not part of this package")
    for file, key, reference in references:
        # The class is looked up in the installed module: the file in the folder is compared, never run.
        module, _, cls = reference.rpartition(".")
        if f"{module}.py" not in served or not hasattr(import_module(f"neobert_hf.{module}"), cls):
            raise ValueError(f"`{key}` of {file} names {reference}, which is not part of this package")
    for name, installed in served.items():
        if name not in files:
            raise ValueError(f"{name} is missing; loading with `trust_remote_code` needs {', '.join(served)}")
        if (folder.path / name).read_bytes() != installed.read_bytes():
            raise ValueError(f"{name} differs from the file of the installed neobert_hf")
    return f"{len(files)} files, as in the installed neobert_hf"


def code_references(folder: Path) -> list[tuple[str, str, str]]:
    """The code that loading with `trust_remote_code` would run: file, key and the class that the key names."""
    references = []
    for file in ("config.json", "tokenizer_config.json"):
        if not (folder / file).is_file():
            continue
        values = read_mapping(folder / file)
        # In some tokenizers, `auto_map` is a list of the slow and the fast class.
        auto_map = values.get("auto_map") or {}
        entries = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
        names = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry]) if name]
        references += [(file, "auto_map", str(name)) for name in names]
        pipelines = values.get("custom_pipelines") or {}
        entries = pipelines.values() if isinstance(pipelines, dict) else [pipelines]
        references += [(file, "custom_pipelines", str(dict(entry)["impl"])) for entry in entries]
    return references


def check_sentence_transformers(folder: ModelFolder) -> str:
    """Check that Sentence Transformers can load all modules and run them on a text."""
    modules = folder.sentence_modules
    if not modules:
        raise Skip("no modules.json")
    if folder.tokenizer is None:
        raise ValueError("no tokenizer: Sentence Transformers would make one that turns every word into [UNK]")
    for module in modules:
        files = folder.path / module.path
        if (files / "pytorch_model.bin").is_file() and not (files / "model.safetensors").is_file():
            raise ValueError(f"{files / 'pytorch_model.bin'} is a pickle, which is never read: save it as safetensors")
    if find_spec("sentence_transformers") is None:
        raise Skip("sentence_transformers is not installed: pip install 'neobert_hf[embed]'")
    import sentence_transformers

    model_class = getattr(sentence_transformers, folder.sentence_class)
    options = {"device": "cpu", "trust_remote_code": False, "local_files_only": True}
    model = model_class(str(folder.path), model_kwargs={"dtype": torch.float32}, **options)
    if infinite := [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]:
        raise ValueError(f"values that are not finite: {', '.join(infinite)}")
    text = (TEXT, TEXT) if folder.sentence_class == "CrossEncoder" else TEXT
    width = _run_modules(list(model), model.preprocess([text]))
    if folder.is_contextual:
        _check_context(model, folder.config)
    return f"{' > '.join(module.name for module in modules)}, {width:,} dimensions"


def _check_context(model: nn.Module, config: PreTrainedConfig) -> None:
    """Refuse a model whose `encode` returns something else with a context than the model itself."""
    if "dataset_embeddings" not in {name for names in (model.module_kwargs or {}).values() for name in names}:
        raise ValueError("with this modules.json, `encode` cannot pass on `dataset_embeddings`: save the model again")
    context = made_context(config)
    found = model.encode([TEXT], prompt="", dataset_embeddings=context, convert_to_tensor=True)
    features = model.preprocess([TEXT])
    with torch.no_grad():
        tokens = {name: features[name] for name in ("input_ids", "attention_mask")}
        expected = model[0].model.eval()(**tokens, dataset_embeddings=context).pooler_output
    if found.shape != expected.shape or not torch.allclose(found, expected, atol=1e-4 * expected.abs().max().item()):
        raise ValueError("with a context, `encode` does not return the output of the model's second stage")


@torch.no_grad()
def _run_modules(modules: list[nn.Module], features: dict) -> int:
    """The width of the output. Every module after the model itself must output as many dimensions as it declares."""
    width = 0
    for index, module in enumerate(modules):
        before = dict(features)
        features = module(features)
        written = [tensor for name, tensor in features.items() if tensor is not before.get(name)]
        widths = [tensor.shape[-1] for tensor in written if torch.is_floating_point(tensor)]
        promised = module.get_embedding_dimension() if index and hasattr(module, "get_embedding_dimension") else None
        if promised is not None and promised not in widths:
            raise ValueError(f"{type(module).__name__} should output {promised} dimensions, but outputs {widths}")
        width = (widths or [width])[-1]
    return width


def check_outputs(folder: ModelFolder) -> str:
    file = folder.path / GOLDEN_FILE
    if not file.is_file():
        raise Skip(f"no {GOLDEN_FILE}: nothing to compare with")
    golden = read_outputs(file)
    model = folder.model_class.from_pretrained(folder.path, dtype=torch.float32)
    largest = compare_outputs(model, golden, folder.tokenizer)
    return f"as recorded; they differ by at most {largest:.0e} of the largest value ({golden['tolerance']:.0e} allowed)"


# By name: the check, and the checks that must pass first. A check returns its line, or raises Skip or ValueError.
CHECKS: dict[str, tuple[Callable[[ModelFolder], str], tuple[str, ...]]] = {
    "config": (check_config, ()),
    "tensors": (check_tensors, ("config",)),
    "tokenizer": (check_tokenizer, ("config",)),
    "code": (check_code, ("config",)),
    "sentence_transformers": (check_sentence_transformers, ("config", "tensors", "tokenizer")),
    "outputs": (check_outputs, ("config", "tensors", "tokenizer")),
}

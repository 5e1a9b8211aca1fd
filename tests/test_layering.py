"""Who may import whom, and how long a function may be. Both keep each subpackage readable by itself."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.models import ROOT


PACKAGE = ROOT / "src" / "neobert_hf"
MODEL = {"configuration_neobert", "contextual_neobert", "cpu_neobert", "modeling_neobert"}
SUBPACKAGES = {
    "common": set(),
    "data": {"common"},
    "training": {"common"},
    "pretraining": {"common", "data", "training"},
    "tasks": {"common", "data", "training"},
    "embeddings": {"common", "data", "training"},
    "contextual": {"common", "data", "training", "embeddings"},
    "distillation": {"common", "data", "training", "embeddings"},
    "evaluation/glue": {"common", "data", "training", "tasks", "evaluation/results"},
    "evaluation/mteb": {"common", "data", "embeddings", "contextual", "evaluation/results"},
    "evaluation/pseudo_perplexity.py": {"common", "data", "evaluation/results"},
    "search": {"common", "data", "embeddings", "contextual", "distillation"},
    "hub": {"common", "embeddings"},
}


def imported_modules(file: Path) -> set[str]:
    """Modules of this package that a file imports, as paths below it; `import neobert_hf` itself is the model."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else [f"neobert_hf.{node.module}"]
        own = [name.removeprefix("neobert_hf.") for name in names if name.startswith("neobert_hf.")]
        found |= {name.replace(".", "/") for name in own}
    return found


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_a_subpackage_imports_only_what_it_may(subpackage):
    allowed = {subpackage} | SUBPACKAGES[subpackage]
    folder = PACKAGE / subpackage
    for file in [folder] if folder.is_file() else folder.rglob("*.py"):
        for module in imported_modules(file) - MODEL:
            assert any(module == name or module.startswith(f"{name}/") for name in allowed), f"{file} imports {module}"


def test_the_model_imports_its_siblings_only():
    for name in MODEL:
        file = PACKAGE / f"{name}.py"
        if file.exists():
            assert imported_modules(file) <= MODEL, file


def test_nobody_imports_the_examples():
    for file in (*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")):
        tree = ast.walk(ast.parse(file.read_text()))
        modules = [node.module for node in tree if isinstance(node, ast.ImportFrom)]
        assert not any((module or "").startswith("examples") for module in modules), file


def test_no_module_imports_itself_in_a_circle():
    names = {file.relative_to(PACKAGE).with_suffix("").as_posix() for file in PACKAGE.rglob("*.py")}
    imports = {name: imported_modules(PACKAGE / f"{name}.py") & names for name in names}
    assert tuple(TopologicalSorter(imports).static_order())


def test_functions_and_files_can_be_read_at_once():
    """100 lines a function and 700 a file, but for the model, which is one file, as in Transformers."""
    for file in (*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")):
        text = file.read_text()
        assert text.count("\n") <= (850 if file.name == "modeling_neobert.py" else 700), file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 100, f"{file}: {node.name}"

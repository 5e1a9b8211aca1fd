"""The notebooks run from the first cell to the last, with a smaller model and fewer texts."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.models import ROOT


NOTEBOOKS = ROOT / "examples" / "notebooks"


def run_notebook(name: str, **parameters) -> str:
    """Execute a notebook with other values in its parameters; the text that its cells printed."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cells = [number for number, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    values = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    notebook.cells.insert(cells[0] + 1, nbformat.v4.new_code_cell(values))
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize("name", ["raw_text_to_search", "fine_tune_evaluate_publish"])
def test_outputs_are_those_of_one_whole_run(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"] and "Traceback" not in printed
    assert "it/s" not in printed, "a progress bar fills the notebook"


@pytest.mark.slow
def test_both_notebooks_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    search = {"PRETRAINING_STEPS": 4, "FINE_TUNING_STEPS": 2, "MAX_DOCUMENTS": 600, "FOLDER": f"{tmp_path}/search"}
    printed = run_notebook("raw_text_to_search", **search)
    assert "Traceback" not in printed and printed.count("cosine  document") == 3
    model = f"{tmp_path}/search/pretraining/model"
    task = {"MODEL": model, "EPOCHS": 1, "ROWS": 64, "FOLDER": f"{tmp_path}/task"}
    printed = run_notebook("fine_tune_evaluate_publish", **task)
    # The last command says so, and it needs what all the others have made.
    assert "Not sent." in printed, printed[-2000:]

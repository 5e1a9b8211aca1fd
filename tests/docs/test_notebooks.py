"""The notebooks run from the first cell to the last, with a smaller model and fewer texts."""

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from safetensors.torch import load_file

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import ROOT, save_checkpoint
from tests.helpers.task_runs import text_rows


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
def test_both_notebooks_run(tmp_path):
    search = {"PRETRAINING_STEPS": 4, "FINE_TUNING_STEPS": 2, "MAX_DOCUMENTS": 600, "FOLDER": f"{tmp_path}/search"}
    printed = run_notebook("raw_text_to_search", **search)
    assert "Traceback" not in printed and printed.count("cosine  document") == 3
    model = f"{tmp_path}/search/pretraining/model"
    task = {"MODEL": model, "EPOCHS": 1, "ROWS": 64, "FOLDER": f"{tmp_path}/task"}
    printed = run_notebook("fine_tune_evaluate_publish", **task)
    # The last cell says so, and it needs what all the others have made.
    assert "Not sent." in printed, printed[-2000:]


CELL = """
from neobert_hf.tasks import classify
rows = {rows!r}
result = classify(model={model!r}, data=rows, output_dir={output!r}, max_length=32, max_steps=40, eval_steps=5,
                  per_device_train_batch_size=8, learning_rate=3e-3, use_cpu=True)
print("finished:", result.model)
"""


class Kernel:
    """A kernel of Jupyter as a notebook uses it."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code: str, interrupt_at: str | None = None) -> tuple[str, str]:
        """Run a cell, and press the stop button once it has printed something. Returns its status, and what it printed.

        A cell that raises has the name of the exception as its status.
        """
        printed = []

        def hook(message):
            nonlocal interrupt_at
            printed.append(message["content"].get("text", ""))
            if interrupt_at and interrupt_at in "".join(printed):
                interrupt_at = None
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(code, output_hook=hook, timeout=900)["content"]
        return reply.get("ename", reply["status"]), "".join([*printed, reply.get("evalue", "")])

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_cell_that_is_interrupted_keeps_its_kernel_and_goes_on(tmp_path):
    """With the stop button of a notebook; the weights are those of a cell that was never stopped."""
    model = str(save_checkpoint(tmp_path / "model", NeoBERTForMaskedLM))
    cells = {
        name: CELL.format(rows=text_rows(200), model=model, output=str(tmp_path / name)) for name in ("run", "whole")
    }
    kernel = Kernel()
    try:
        assert kernel.run("kept = 42")[0] == "ok"
        status, printed = kernel.run(cells["run"], interrupt_at="step 10 of 40")
        assert status in ("KeyboardInterrupt", "Stopped") and "finished" not in printed, printed
        assert "42" in kernel.run("print(kept)")[1]
        status, printed = kernel.run(cells["run"])
        assert status == "ok" and "run/checkpoint-" in printed and "finished" in printed
        assert "step 5 of 40" not in printed
        assert kernel.run(cells["whole"])[0] == "ok"
    finally:
        kernel.close()
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")]
    assert weights[0].keys() == weights[1].keys() and all(
        weights[0][name].equal(weights[1][name]) for name in weights[0]
    )

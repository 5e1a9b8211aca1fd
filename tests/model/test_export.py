"""Promise 6: graphs with dynamic shapes, by torch.export, TorchScript, ONNX and Transformers' own exporters."""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import ragged_batch, small_model


IDS, MASK = ragged_batch()
BATCHES = [(9, 4), (13, 7, 1, 10), (40,), (3, 3, 3)]


def check(model, graph, tolerance: float = 1e-5) -> None:
    """`graph` gives the first output of a batch; it is compared at real tokens."""
    for lengths in BATCHES:
        for side in ("right", "left"):
            ids, mask = ragged_batch(lengths, side)
            with torch.no_grad():
                expected = model(ids, attention_mask=mask)[0]
            real = mask.bool() if expected.ndim == 3 else slice(None)
            torch.testing.assert_close(graph(ids, mask)[real], expected[real], rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_export(strict):
    model = small_model(NeoBERTForMaskedLM)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=200)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict).module()
    check(model, lambda ids, mask: program(input_ids=ids, attention_mask=mask).logits)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"rope": False, "rms_norm": False, "hidden_act": "gelu"}])
def test_torchscript_and_onnx(changes, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    # TorchScript's exporter writes the length into the transposed keys of `sdpa` where no rotation went before.
    model = small_model(attn_implementation="eager" if changes else "sdpa", num_hidden_layers=1, **changes)
    model.config.return_dict = False
    traced = torch.jit.trace(model, (IDS, MASK), check_trace=False)
    check(model, lambda ids, mask: traced(ids, mask)[0])

    names, file = ["input_ids", "attention_mask"], str(tmp_path / "model.onnx")
    options = {"input_names": names, "output_names": ["states"], "opset_version": 20, "dynamo": False}
    options["dynamic_axes"] = {name: {0: "batch", 1: "length"} for name in (*names, "states")}
    torch.onnx.export(model, (), file, kwargs={"input_ids": IDS, "attention_mask": MASK}, **options)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(ids, mask):
        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        return torch.from_numpy(session.run(None, feed)[0])

    check(model, run, 1e-4)

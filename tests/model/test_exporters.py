"""Transformers' own exporters, which newer releases have."""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from tests.helpers.models import ragged_batch, small_model


exporters = pytest.importorskip("transformers.exporters", reason="needs a Transformers that has exporters")

EXPORTERS = {
    "dynamo": lambda: (exporters.DynamoExporter(), exporters.DynamoConfig(dynamic=True)),
    "onnx": lambda: (exporters.OnnxExporter(), exporters.OnnxConfig(dynamic=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("cls", [NeoBERTModel, NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
@pytest.mark.parametrize("kind", EXPORTERS)
def test_an_export_computes_the_same_on_other_shapes(kind, cls, tmp_path):
    exporter, config = EXPORTERS[kind]()
    model = small_model(cls, num_hidden_layers=1)
    ids, mask = ragged_batch((9, 4))
    exporter.export(model, {"input_ids": ids, "attention_mask": mask}, config).save_pretrained(tmp_path)
    exported = exporters.ExportedModel.from_pretrained(tmp_path)
    for lengths in ((9, 4), (13, 7, 1, 10), (40,)):
        ids, mask = ragged_batch(lengths)
        found = exported(input_ids=ids, attention_mask=mask)[0]
        with torch.no_grad():
            expected = model(ids, attention_mask=mask)[0]
        real = mask.bool() if expected.ndim == 3 else slice(None)
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-4)

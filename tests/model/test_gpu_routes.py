"""Routes of a GPU beside that of bfloat16 and attention without dropout, on one that is not there, against the host."""

import pytest
import torch

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    rotary_neobert,
)
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model
from tests.helpers.pretend_cuda import BFLOAT16_ATOL, model_on_device, on_device, pretend_cuda


IDS, MASK = ragged_batch()
PACKED_IDS, PACKED = packed_batch()
LABELS = torch.where(torch.arange(IDS.numel()).view(IDS.shape) % 3 == 0, IDS, -100)
BATCHES = {
    "full": {"input_ids": IDS},
    "padded": {"input_ids": IDS, "attention_mask": MASK},
    "padded, mask of floats": {"input_ids": IDS, "attention_mask": MASK.float()},
    "packed": {"input_ids": PACKED_IDS, **PACKED},
    "packed by positions": {"input_ids": PACKED_IDS, "position_ids": positions_of((13, 7, 1, 10))},
}
YARN, DYNAMIC = ({"rope_parameters": {"rope_type": name, "factor": 2.0}} for name in ("yarn", "dynamic"))
CHOICES = {name: value.view(2, 2, -1) for name, value in BATCHES["padded"].items()} | {"labels": torch.tensor([1, 0])}
# BERT's: learned positions, LayerNorm, GELU.
BERTS_PARTS = {"rope": False, "rms_norm": False, "hidden_act": "gelu"}
CLASSES = {"labels": torch.where(LABELS == -100, LABELS, LABELS % 3)}
# Of each: the class, its configuration, dtype, and what is passed beside a batch; None: the batch is `CHOICES`.
ROUTES = {
    "float32": (NeoBERTForMaskedLM, {}, torch.float32, {}),
    "float16": (NeoBERTForMaskedLM, {}, torch.float16, {}),
    "YaRN": (NeoBERTForMaskedLM, YARN, torch.bfloat16, {}),
    # Shorter than the longest sequence, so that its angles depend on that.
    "dynamic RoPE": (NeoBERTForMaskedLM, DYNAMIC | {"max_length": 8}, torch.bfloat16, {}),
    "parts of BERT": (NeoBERTForMaskedLM, BERTS_PARTS, torch.bfloat16, {}),
    "dropout": (NeoBERTForMaskedLM, {"dropout": 0.2}, torch.float32, {}),
    "number of labels": (NeoBERTForMaskedLM, {}, torch.float32, {"num_items_in_batch": torch.tensor(23)}),
    "token classification": (NeoBERTForTokenClassification, {"num_labels": 3}, torch.bfloat16, {}),
    "sequence classification": (NeoBERTForSequenceClassification, {"num_labels": 3}, torch.bfloat16, {}),
    "multiple choice": (NeoBERTForMultipleChoice, {}, torch.bfloat16, None),
}


@pytest.fixture
def device(monkeypatch):
    with torch.no_grad(), pretend_cuda(monkeypatch) as device:
        yield device


def batches_of(route: str) -> dict[str, dict]:
    cls, _, _, extra = ROUTES[route]
    if extra is None:
        return {"choices": CHOICES}
    if cls is NeoBERTForSequenceClassification:
        labels = {"labels": torch.arange(len(IDS)) % 3}
        return {name: batch | labels for name, batch in BATCHES.items() if len(batch["input_ids"]) > 1}
    labels = CLASSES if cls is NeoBERTForTokenClassification else {"labels": LABELS}
    return {name: batch | (labels | extra if len(batch["input_ids"]) > 1 else {}) for name, batch in BATCHES.items()}


@pytest.mark.parametrize("route", ROUTES)
def test_numbers_are_those_of_the_host_with_one_read(device, route):
    """Logits, losses, and nothing else that the host waits for; dropout draws the same numbers from the same seed."""
    cls, changes, dtype, _ = ROUTES[route]
    models = [small_model(cls, embedding_init_range=0.1, **changes).to(dtype) for _ in range(2)]
    host, there = models[0], model_on_device(models[1])
    for model in (host, there):
        model.train("dropout" in changes)
    for name, batch in batches_of(route).items():
        device.reads.clear()
        torch.manual_seed(0)
        outputs = there(**on_device(batch))
        assert device.reads.total() == 1, (name, device.reads)
        torch.manual_seed(0)
        expected = host(**batch)
        atol = 1e-5 if dtype == torch.float32 else BFLOAT16_ATOL
        assert outputs.logits.device.type == "cuda", name
        assert torch.allclose(outputs.logits.host, expected.logits, atol=atol), name
        if "labels" in batch:
            assert torch.allclose(outputs.loss.host, expected.loss, atol=atol), name


@pytest.mark.parametrize("mask", [None, MASK])
def test_embeddings_in_place_of_ids(device, mask):
    model = small_model()
    embeds, host = torch.randn(*IDS.shape, model.config.hidden_size), small_model()
    batch = {"inputs_embeds": embeds} | ({} if mask is None else {"attention_mask": mask})
    expected = host.eval()(**batch).last_hidden_state
    there = model_on_device(model.eval())
    device.reads.clear()
    states = there(**on_device(batch)).last_hidden_state
    assert device.reads.total() == (mask is not None) and torch.allclose(states.host, expected, atol=1e-5)


def test_what_is_wrong_with_rows_is_said_of_a_gpu_too(device):
    """Rows that are all padding, where one answer for each is asked for; labels that are no class."""
    there = model_on_device(small_model(NeoBERTForSequenceClassification, num_labels=3).to(torch.bfloat16))
    empty = MASK.clone()
    empty[0] = 0
    with pytest.raises(ValueError, match="row"):
        there(**on_device({"input_ids": IDS, "attention_mask": empty}))
    with pytest.raises(RuntimeError, match="`labels` must be 0 to 2"):
        there(**on_device({"input_ids": IDS, "attention_mask": MASK, "labels": torch.full((len(IDS),), 3)}))


def test_a_gpu_rotates_by_complex_numbers(device, monkeypatch):
    """3 kernels in place of 8."""
    rotated, rotate_as_complex = [], rotary_neobert.rotate_as_complex

    def noted(query_key, table):
        rotated.append(query_key.device.type)
        return rotate_as_complex(query_key, table)

    monkeypatch.setattr(rotary_neobert, "rotate_as_complex", noted)
    there = model_on_device(small_model().to(torch.bfloat16))
    there(**on_device(BATCHES["padded"]))
    assert rotated == ["cuda"] * 2


def test_wrong_labels_end_in_an_assertion_that_names_what_is_allowed(device):
    there = model_on_device(small_model(NeoBERTForMaskedLM, sparse_prediction=True).to(torch.bfloat16))
    for wrong in (100, -1):
        labels = LABELS.clone()
        labels[0, 0] = wrong
        with pytest.raises(RuntimeError, match="`labels` must be 0 to 99, or -100 for no label"):
            there(**on_device(BATCHES["padded"] | {"labels": labels}))
    classifier = small_model(NeoBERTForTokenClassification, num_labels=3).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="`labels` must be 0 to 2, or -100 for no label"):
        model_on_device(classifier)(**on_device(BATCHES["padded"] | {"labels": LABELS}))

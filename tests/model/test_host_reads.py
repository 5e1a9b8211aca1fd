"""A GPU is asked for values once in a forward pass: each read makes the host wait for everything before it."""

import pytest
import torch

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForQuestionAnswering, NeoBERTForSequenceClassification
from tests.helpers.models import packed_batch, positions_of, ragged_batch, small_model
from tests.helpers.pretend_cuda import BFLOAT16_ATOL, model_on_device, on_device, pretend_cuda


IDS, MASK = ragged_batch()
PACKED_IDS, PACKED = packed_batch()
LABELS = torch.where(torch.arange(IDS.numel()).view(IDS.shape) % 3 == 0, IDS, -100)
SEQUENCES = (torch.arange(31) >= 13).int() + (torch.arange(31) >= 20) + (torch.arange(31) >= 21)
OFFSETS = {name: PACKED[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k")}

BATCHES = {
    "full": {"input_ids": IDS},
    "full with a mask": {"input_ids": IDS, "attention_mask": torch.ones_like(MASK)},
    "padded": {"input_ids": IDS, "attention_mask": MASK},
    "padded on the left": dict(zip(("input_ids", "attention_mask"), ragged_batch(side="left"))),
    "packed": {"input_ids": PACKED_IDS, **PACKED},
    "packed, offsets alone": {"input_ids": PACKED_IDS, **OFFSETS},
    "packed by positions": {"input_ids": PACKED_IDS, "position_ids": positions_of((13, 7, 1, 10))},
    "everything": {"input_ids": PACKED_IDS, **PACKED, "position_ids": positions_of((13, 7, 1, 10))}
    | {"attention_mask": torch.ones_like(PACKED_IDS), "seq_idx": SEQUENCES[None]},
}


@pytest.fixture
def device(monkeypatch):
    with torch.no_grad(), pretend_cuda(monkeypatch) as device:
        yield device


def model_of_both(cls=NeoBERTForMaskedLM, **changes):
    """The same model on the CPU and on the device, in bfloat16, for which there is a kernel."""
    models = [small_model(cls, embedding_init_range=0.1, **changes).to(torch.bfloat16) for _ in range(2)]
    return models[0], model_on_device(models[1])


WAITS = {
    "item": lambda numbers, mask: numbers.sum().item(),
    "tolist": lambda numbers, mask: numbers.tolist(),
    "bool": lambda numbers, mask: bool(mask.any()),
    "cpu": lambda numbers, mask: numbers.cpu(),
    "nonzero": lambda numbers, mask: mask.nonzero(),
    "boolean index": lambda numbers, mask: numbers[mask],
    "boolean assignment": lambda numbers, mask: torch.ops.aten.index_put_(numbers, [mask], numbers.new_zeros(())),
    "masked_select": lambda numbers, mask: torch.masked_select(numbers, mask),
    "unique": lambda numbers, mask: torch.ops.aten._unique2(numbers),
}
NO_WAITS = {
    "index": lambda numbers, mask: numbers[mask.long()],
    "where": lambda numbers, mask: torch.where(mask, numbers, 0),
    "nonzero of a known number": lambda numbers, mask: torch.ops.aten.nonzero_static(mask, size=2),
    "another dtype": lambda numbers, mask: numbers.float(),
}


@pytest.mark.parametrize("what", [*WAITS, *NO_WAITS])
def test_what_a_host_waits_for_is_counted(device, what):
    numbers, mask = (tensor.to("cuda:0") for tensor in (torch.arange(4), torch.tensor([True, False, True, False])))
    device.reads.clear()
    (WAITS | NO_WAITS)[what](numbers, mask)
    assert device.reads.total() == (what in WAITS)


def test_one_read(device):
    """Before: 2 for full batches, 6 for padded and packed ones, 8 where positions say what is packed."""
    model, there = model_of_both()
    for name, batch in BATCHES.items():
        device.reads.clear()
        logits = there(**on_device(batch)).logits
        assert device.reads.total() == 1, (name, device.reads)
        assert logits.device.type == "cuda" and torch.allclose(
            logits.host, model(**batch).logits, atol=BFLOAT16_ATOL
        ), name


def test_labels_are_looked_for_once(device):
    model, there = model_of_both(sparse_prediction=True)
    batch = BATCHES["padded"] | {"labels": LABELS}
    outputs, expected = there(**on_device(batch)), model(**batch)
    assert device.reads.total() == 2 and device.reads["nonzero.default"] == 1
    assert torch.allclose(outputs.loss.host, expected.loss, atol=0.05)
    assert outputs.logits.shape == expected.logits.shape


def test_heads_read_nothing_more(device):
    """Nor do those that look for a second document in a row, by its positions."""
    _, there = model_of_both(NeoBERTForSequenceClassification, classifier_pooling="mean")
    positions = {"position_ids": torch.arange(IDS.shape[1])[None]}
    for batch in (BATCHES["padded"], BATCHES["packed"], BATCHES["full"] | positions, BATCHES["padded"] | positions):
        device.reads.clear()
        there(**on_device(batch))
        assert device.reads.total() == 1, (batch.keys(), device.reads)
    _, there = model_of_both(NeoBERTForQuestionAnswering)
    answers = dict.fromkeys(("start_positions", "end_positions"), torch.zeros(4, dtype=torch.long))
    device.reads.clear()
    there(**on_device(BATCHES["padded"] | positions | answers))
    assert device.reads.total() == 1, device.reads
    with pytest.raises(ValueError, match="restarts within a row"):
        there(**on_device(BATCHES["full"] | {"position_ids": positions["position_ids"] % 7} | answers))


def test_answers_are_checked_without_a_read(device):
    model, there = model_of_both(NeoBERTForQuestionAnswering)
    answers = {"start_positions": torch.tensor([1, 0, 0, 0]), "end_positions": torch.tensor([2, 0, 0, 0])}
    batch = BATCHES["padded"] | answers
    loss = there(**on_device(batch)).loss
    assert device.reads.total() == 1 and torch.allclose(loss.host, model(**batch).loss, atol=0.05)
    for wrong in ([0, 0, 0, 0], [2, 0, 1, 0]):  # before the start; in the padding of the third row
        with pytest.raises(RuntimeError, match="`end_positions` not before them, and neither in padding"):
            there(**on_device(batch | {"end_positions": torch.tensor(wrong)}))


@pytest.mark.parametrize("name", ["full", "padded", "packed"])
def test_hidden_states_on_the_device_are_those_of_the_host(device, name):
    model, there = model_of_both()
    outputs = there(**on_device(BATCHES[name]), output_hidden_states=True).hidden_states
    for left, right in zip(outputs, model(**BATCHES[name], output_hidden_states=True).hidden_states, strict=True):
        assert left.device.type == "cuda" and torch.allclose(left.host, right, atol=0.05)


@pytest.mark.parametrize("name", BATCHES)
def test_attention_weights_on_the_device_are_those_of_the_host(device, name):
    """`eager` computes them; the mask that it adds to the scores of padded rows costs Transformers a second read."""
    model, there = model_of_both()
    outputs = there(**on_device(BATCHES[name]), output_attentions=True)
    expected = model(**BATCHES[name], output_attentions=True)
    assert device.reads.total() == 1 + ("padded" in name), device.reads
    assert torch.allclose(outputs.logits.host, expected.logits, atol=BFLOAT16_ATOL)
    for left, right in zip(outputs.attentions, expected.attentions, strict=True):
        assert left.device.type == "cuda" and torch.allclose(left.host, right, atol=0.01)


def test_attention_written_out_on_the_device_is_that_of_torch(device):
    """What a GPU without FlashAttention, and float32, can be told to use."""
    model = small_model(NeoBERTForMaskedLM, embedding_init_range=0.1)
    there = model_on_device(small_model(NeoBERTForMaskedLM, embedding_init_range=0.1, attn_implementation="eager"))
    for name, batch in BATCHES.items():
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        logits = there(**on_device(batch)).logits.host
        assert torch.allclose(logits[real], model(**batch).logits[real], atol=1e-5), name


def test_a_prefix_on_the_device_is_read_as_on_the_host(device):
    model, there = (one.base_model for one in model_of_both())
    batch = BATCHES["padded"] | {"prefix_embeds": torch.randn(1, 3, 64).to(torch.bfloat16), "text_position": 1}
    outputs = there(**on_device(batch)).last_hidden_state
    assert torch.allclose(outputs.host, model(**batch).last_hidden_state, atol=0.05)


def test_the_read_can_be_switched_off(device):
    """Of batches that can be laid out without knowing a value; the others are read and checked as before."""
    model, there = model_of_both()
    there.base_model.check_values = False
    for name, reads in (("full", 0), ("packed", 0), ("packed, offsets alone", 1), ("padded", 1)):
        device.reads.clear()
        logits = there(**on_device(BATCHES[name])).logits
        assert device.reads.total() == reads, (name, device.reads)
        assert torch.allclose(logits.host, model(**BATCHES[name]).logits, atol=BFLOAT16_ATOL), name
    wrong = {"cu_seq_lens_q": torch.tensor([0, 9, 5, 31]), "max_length_q": 30}
    with pytest.raises(RuntimeError, match="cu_seq_lens_q must rise"):
        there(**on_device({"input_ids": PACKED_IDS, **wrong}))
    with pytest.raises(ValueError, match="`attention_mask` runs from 0 to 2"):
        there(**on_device({"input_ids": IDS, "attention_mask": 2 * MASK}))


def test_errors_on_the_device_are_those_of_the_host(device):
    _, there = model_of_both()
    for batch, message in (
        ({"input_ids": IDS + 2**33}, "`input_ids` runs from 85899345"),
        ({"input_ids": IDS, "attention_mask": (MASK - 1) * 10000}, "`attention_mask` runs from -10000 to 0"),
        ({"input_ids": PACKED_IDS, "cu_seq_lens_q": torch.tensor([0, 9, 5, 31])}, r"\[0, 9, 5, 31\]: it must rise"),
        ({"input_ids": PACKED_IDS, **PACKED, "max_length_q": 5, "max_length_k": 5}, "`max_length_q` is 5"),
        ({"input_ids": IDS[:1, :4], "position_ids": torch.tensor([[0, 3, 1, 2]])}, "goes from 3 to 1 in row 0"),
    ):
        with pytest.raises(ValueError, match=message):
            there(**on_device(batch))

"""Random configs, forward arguments and labels: refused by name, or the numbers of the reference.

The reference is tests/helpers/plain_neobert.py, one document at a time, and losses written out.
"""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from tests.helpers.models import small_model
from tests.helpers.plain_neobert import plain_hidden_states
from tests.helpers.properties import any_number, reproducible


TINY = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"intermediate_size": 24, "max_length": 32}
SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_length"]
NUMBERS = ["norm_eps", "dropout", "classifier_dropout", "embedding_init_range", "decoder_init_range", "pad_token_id"]
ROPE = "rope_theta factor attention_factor beta_fast beta_slow mscale mscale_all_dim original_max_position_embeddings"
OTHERS = {
    "rope": st.booleans(),
    "rms_norm": st.booleans(),
    "hidden_act": st.sampled_from(["swiglu", "gelu", "relu", 3]),
    "is_decoder": st.booleans(),
    "num_labels": any_number,
    "id2label": st.sampled_from([{0: "a", 1: "b"}, {1: "a"}, {"0": "a", "x": "b"}, {}, ["a"]]),
    "label2id": st.sampled_from([{"a": 0, "b": 1}, {"a": 1, "b": 0}, {"LABEL_0": 0}, {}]),
    "problem_type": st.sampled_from(["regression", "multi_label_classification", "other"]),
}
ROPE_TYPES = {kind: {"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic", "yarn")}
ROPE_TYPES |= {"default": {"rope_type": "default"}, "llama3": {"rope_type": "llama3"}}
ROPE_TYPES["longrope"] = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
rope_parameters = st.builds(
    lambda kind, numbers, lists: ROPE_TYPES[kind] | numbers | lists,
    st.sampled_from(sorted(ROPE_TYPES)),
    st.dictionaries(st.sampled_from(ROPE.split()), any_number, max_size=1),
    st.just({}) | st.fixed_dictionaries({"long_factor": st.lists(any_number, min_size=4, max_size=4) | any_number}),
)
VALUES = {name: any_number for name in SIZES + NUMBERS} | OTHERS | {"rope_parameters": rope_parameters}


@st.composite
def config_keys(draw):
    """One or two keys: of ten random ones some is always wrong."""
    names = draw(st.lists(st.sampled_from([*VALUES] + ["rope_parameters"] * 20), min_size=1, max_size=2, unique=True))
    return {name: draw(VALUES[name]) for name in names}


@reproducible(200)
@given(config_keys())
@torch.no_grad()
def test_configs(changes):
    try:
        config = NeoBERTConfig(**TINY | changes)
    except (ValueError, StrictDataclassError) as error:
        named = {*changes, *changes.get("rope_parameters", {}), "dim_head"}
        assert any(name in str(error) for name in named), error
        return
    torch.manual_seed(0)
    model = NeoBERTModel._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.arange(7) % config.vocab_size
    states = model(ids[None], attention_mask=torch.ones(1, 7, dtype=torch.long)).last_hidden_state[0]
    assert states.isfinite().all(), changes
    plain = config.rope_parameters["rope_type"] in ("default", "linear")
    if plain and max(config.decoder_init_range, config.embedding_init_range) <= 1 and config.norm_eps >= 1e-9:
        expected = plain_hidden_states(model.state_dict(), config, ids)
        assert (states - expected).abs().max() <= 1e-3 * max(1, expected.abs().max()), changes


@st.composite
def batches(draw):
    """Forward arguments of documents in one of four layouts, with up to two of them changed; and whether any is."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    layout = draw(st.sampled_from(["padded", "cu_seq_lens", "positions", "collator"]))
    total, rows = sum(lengths), len(lengths)
    if layout == "padded":
        mask = torch.zeros(rows, 6, dtype=torch.long)
        for row, length in enumerate(lengths):
            first = draw(st.integers(0, 6 - length))
            mask[row, first : first + length] = 1
        batch = {"input_ids": torch.arange(rows * 6).view(rows, 6) % 20, "attention_mask": mask}
    else:
        batch = {"input_ids": torch.arange(total)[None] % 20}
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        if layout != "cu_seq_lens":
            batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        if layout != "positions":
            batch |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone()}
            batch |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        if layout == "collator":
            batch["seq_idx"] = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))[None].int()
    changes = draw(st.integers(0, 2))
    for _ in range(changes):
        name = draw(st.sampled_from(sorted(batch)))
        if torch.is_tensor(batch[name]) and draw(st.booleans()):
            batch[name] = batch[name].clone()
            place = draw(st.integers(0, batch[name].numel() - 1))
            batch[name].view(-1)[place] = draw(st.sampled_from([-1, 0, 1, 2, 3, 25, 2**24 + 1]))
        elif name.startswith("max_length"):
            batch[name] = draw(st.integers(-1, 8) | st.just(math.nan))
        elif name != "input_ids":
            del batch[name]
    # Positions that are all 0 are taken for a mistake, unless offsets say that documents have one token.
    refused = layout == "positions" and max(lengths) == 1 and total > 1
    return batch, changes > 0 or refused


def reference(model, batch: dict) -> torch.Tensor:
    """Hidden states (rows, length, hidden_size) from what the arguments say, document by document; zero at padding."""
    ids, config = batch["input_ids"], model.config
    states = torch.zeros(*ids.shape, config.hidden_size)
    for row in range(len(ids)):
        columns = batch.get("attention_mask", torch.ones_like(ids))[row].nonzero()[:, 0]
        if not len(columns):
            continue
        positions = batch["position_ids"][row] if "position_ids" in batch else torch.arange(ids.shape[1]) - columns[0]
        starts = torch.zeros(len(columns), dtype=torch.bool)
        if "cu_seq_lens_q" in batch:
            starts[batch["cu_seq_lens_q"][1:-1].long()] = True
        elif "position_ids" in batch:
            starts[1:] = positions[columns].diff() <= 0
        if "seq_idx" in batch:
            starts[1:] |= batch["seq_idx"][row].diff() != 0
        for document in columns.tensor_split(starts.nonzero()[:, 0]):
            own = positions[document]
            own = own if "position_ids" in batch else own - own[0]
            states[row, document] = plain_hidden_states(model.state_dict(), config, ids[row, document], own)
    return states


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_forward_arguments(backend):
    torch.manual_seed(0)
    model = small_model(attn_implementation=backend, **TINY)

    @reproducible(100)
    @given(batches())
    @torch.no_grad()
    def check(drawn):
        batch, changed = drawn
        try:
            states = model(**batch).last_hidden_state
        except ValueError as error:
            assert changed and any(f"`{name}`" in str(error) for name in batch), error
            return
        assert (states - reference(model, batch)).abs().max() <= 1e-4, batch

    check()


IDS = torch.arange(12).view(4, 3) % 20
HEADS = {
    "masked_lm": (NeoBERTForMaskedLM, {}),
    "sparse_masked_lm": (NeoBERTForMaskedLM, {"sparse_prediction": True}),
    "tokens": (NeoBERTForTokenClassification, {"num_labels": 3}),
    "classes": (NeoBERTForSequenceClassification, {"num_labels": 3}),
    "several": (NeoBERTForSequenceClassification, {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "regression": (NeoBERTForSequenceClassification, {"num_labels": 1}),
    "choices": (NeoBERTForMultipleChoice, {}),
    "answers": (NeoBERTForQuestionAnswering, {}),
}


@st.composite
def labels_of(draw, head: str) -> dict:
    right, wrong = [0, 1, -100] if head == "choices" else [0, 1, 2, -100], [2, 3, 19, 20, -1]
    classes = st.sampled_from(draw(st.sampled_from([right, right, [-100], [*right, *wrong]])))
    if head == "answers":
        start, length = st.sampled_from([0, 1, 2, 3, 50]), st.sampled_from([0, 1, 2])
        if draw(st.booleans()):
            start, length = st.integers(-1, 4), st.integers(-1, 2)
        places = torch.tensor(
            [(first, first + draw(length)) for first in draw(st.lists(start, min_size=4, max_size=4))]
        )
        return dict(zip(("start_positions", "end_positions"), places.T))
    shape = {"masked_lm": (4, 3), "sparse_masked_lm": (4, 3), "tokens": (4, 3), "several": (4, 3), "choices": (2,)}
    shape = draw(st.sampled_from([shape.get(head, (4,))] * 9 + [(3,)]))
    values = classes
    if head in ("several", "regression"):
        right = [0.0, 1.0, 0.5]
        values = st.sampled_from(draw(st.sampled_from([right, [*right, 2.0, -100.0, math.nan, math.inf]])))
    flat = draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
    given = {"labels": torch.tensor(flat).view(shape)}
    count = draw(st.sampled_from([None, None, 5, 0, -2, math.nan, torch.tensor(7)]))
    return (
        given
        if count is None or head not in ("masked_lm", "sparse_masked_lm", "tokens")
        else given | {"num_items_in_batch": count}
    )


def loss_by_hand(head: str, outputs, labels: dict) -> torch.Tensor:
    if head == "answers":
        assert (labels["end_positions"] >= labels["start_positions"]).all()
        both = zip((outputs.start_logits, outputs.end_logits), labels.values())
        losses = [F.cross_entropy(logits[places < 3], places[places < 3]) for logits, places in both]
        return (losses[0] + losses[1]) / 2
    wanted = labels["labels"]
    if head == "several":
        chances = outputs.logits.sigmoid()
        return -(wanted * chances.log() + (1 - wanted) * (1 - chances).log()).mean()
    if head == "regression":
        return (outputs.logits[:, 0] - wanted).square().mean()
    logits = outputs.logits if head == "sparse_masked_lm" else outputs.logits[wanted != -100]
    losses = -logits.log_softmax(-1).gather(-1, wanted[wanted != -100][:, None])
    return losses.sum() / labels.get("num_items_in_batch", len(losses))


@pytest.mark.parametrize("head", HEADS)
def test_labels(head):
    cls, config = HEADS[head]
    model = small_model(cls, **TINY | config)
    ids = IDS.view(2, 2, 3) if head == "choices" else IDS

    @reproducible(40)
    @given(labels_of(head))
    @torch.no_grad()
    def check(labels):
        try:
            outputs = model(ids, **labels)
        except ValueError as error:
            assert any(f"`{name}`" in str(error) for name in labels), error
            return
        expected = loss_by_hand(head, outputs, labels)
        assert torch.allclose(outputs.loss, expected, rtol=1e-4, equal_nan=True), labels
        ignored = all((value == -100).all() for name, value in labels.items() if name == "labels")
        beyond = any((places >= 3).all() for places in labels.values()) if head == "answers" else False
        assert outputs.loss.isfinite() or (beyond if head == "answers" else ignored), labels

    check()

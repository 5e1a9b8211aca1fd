"""Heads and losses."""

import pytest
import torch
from torch.nn import functional as F

from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)
from tests.helpers.models import CPU_BACKENDS, packed_batch, ragged_batch, small_model


IDS, MASK = ragged_batch()


def mlm_labels(mask=MASK, share: float = 0.3) -> torch.Tensor:
    labels = torch.randint(0, 100, mask.shape)
    chosen = (torch.rand(mask.shape) < share) & mask.bool()
    chosen[0, 0] = True
    return labels.masked_fill(~chosen, -100)


def steps_backwards(output: torch.Tensor) -> set[str]:
    """The names of all steps of the backward pass."""
    steps, pending = set(), [output.grad_fn]
    while pending:
        step = pending.pop()
        if step is not None and step not in steps:
            steps.add(step)
            pending += [found for found, _ in step.next_functions]
    return {step.name() for step in steps}


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradients_of_chosen_tokens_are_not_summed(layout):
    """Labelled and real positions come once each: an index in brackets would sort them to add up what comes twice."""
    ids, arguments = (IDS, {"attention_mask": MASK}) if layout == "padded" else packed_batch()
    model = small_model(NeoBERTForMaskedLM, sparse_prediction=True)
    embeddings = model.get_input_embeddings()(ids)
    labels = mlm_labels(MASK if layout == "padded" else torch.ones_like(ids))
    kept = {"output_hidden_states": True}
    for options in ({}, kept):
        loss = model(inputs_embeds=embeddings, **arguments, labels=labels, **options).loss
        names = steps_backwards(loss)
        assert "IndexSelectBackward0" in names and not {"IndexBackward0", "UnsafeIndexBackward0"} & names


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(23)])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_sparse_prediction_is_the_dense_loss(layout, num_items):
    """Loss within float32 rounding, gradients within 1e-6 of their size; logits of the labelled positions only."""
    ids, kwargs = (IDS, {"attention_mask": MASK}) if layout == "padded" else packed_batch()
    labels = mlm_labels(MASK if layout == "padded" else torch.ones_like(ids))
    results = {}
    for sparse in (False, True):
        model = small_model(NeoBERTForMaskedLM, sparse_prediction=sparse, embedding_init_range=0.3)
        outputs = model(ids, labels=labels, num_items_in_batch=num_items, **kwargs)
        outputs.loss.backward()
        results[sparse] = outputs, {name: p.grad for name, p in model.named_parameters()}
        if sparse:
            assert model(ids, **kwargs).logits.shape == (*ids.shape, 100), "dense when there are no labels"
    (dense, dense_gradients), (sparse, sparse_gradients) = results[False], results[True]
    labelled = labels != -100
    assert sparse.logits.shape == (labelled.sum(), 100)
    assert torch.allclose(sparse.logits, dense.logits[labelled], atol=1e-5)
    assert torch.allclose(sparse.loss, dense.loss, rtol=1e-6, atol=0)
    count = labelled.sum() if num_items is None else num_items
    by_hand = F.cross_entropy(dense.logits[labelled], labels[labelled], reduction="sum") / count
    assert torch.allclose(dense.loss, by_hand, rtol=1e-6)
    for name, expected in dense_gradients.items():
        difference = (sparse_gradients[name] - expected).abs().max()
        assert difference <= 2e-6 * max(1, expected.abs().max()), name


def test_sparse_prediction_without_any_label():
    """A micro-batch may hold no masked token; with the global count it adds nothing and has zero gradients."""
    model = small_model(NeoBERTForMaskedLM, sparse_prediction=True)
    outputs = model(IDS, attention_mask=MASK, labels=torch.full_like(IDS, -100), num_items_in_batch=5)
    outputs.loss.backward()
    assert outputs.loss == 0 and outputs.logits.shape == (0, 100)
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_classification_does_not_depend_on_the_layout(pooling, backend):
    """The first real token is not column 0 when the padding is on the left, and a packed row holds several."""
    lengths = (13, 7, 1, 10)
    model = small_model(
        NeoBERTForSequenceClassification, backend, classifier_pooling=pooling, num_labels=3, embedding_init_range=0.3
    )
    packed_ids, packed = packed_batch(lengths)
    documents = packed_ids[0].split(lengths)
    alone = torch.cat([model(document[None]).logits for document in documents])
    assert (model(packed_ids, **packed).logits - alone).abs().max() <= 1e-5
    for side in ("left", "right"):
        ids, mask = torch.zeros(4, 15, dtype=torch.long), torch.zeros(4, 15, dtype=torch.long)
        for row, document in enumerate(documents):
            columns = slice(15 - len(document), 15) if side == "left" else slice(0, len(document))
            ids[row, columns], mask[row, columns] = document, 1
        assert (model(ids, attention_mask=mask).logits - alone).abs().max() <= 1e-5, side


@torch.no_grad()
def test_classification_by_hand():
    model = small_model(NeoBERTForSequenceClassification, num_labels=3)
    first = model.model(IDS, attention_mask=MASK).last_hidden_state[:, 0]
    expected = torch.tanh(first @ model.dense.weight.T + model.dense.bias) @ model.classifier.weight.T
    assert torch.allclose(model(IDS, attention_mask=MASK).logits, expected, atol=1e-6)
    model = small_model(NeoBERTForSequenceClassification, classifier_pooling="mean")
    states = model.model(IDS, attention_mask=MASK).last_hidden_state
    mean = torch.stack([states[row, :n].mean(0) for row, n in enumerate(MASK.sum(1))])
    expected = torch.tanh(mean @ model.dense.weight.T + model.dense.bias) @ model.classifier.weight.T
    assert torch.allclose(model(IDS, attention_mask=MASK).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    "num_labels, labels, loss",
    [
        (3, torch.tensor([0, 2, 1, 1]), F.cross_entropy),
        (1, torch.tensor([0.5, -1.0, 2.0, 0.0]), lambda logits, labels: F.mse_loss(logits.squeeze(), labels)),
        (3, torch.tensor([[0.0, 1, 1]] * 4), F.binary_cross_entropy_with_logits),
    ],
    ids=["classes", "regression", "multi_label"],
)
def test_classification_losses(num_labels, labels, loss):
    model = small_model(NeoBERTForSequenceClassification, num_labels=num_labels)
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    assert torch.allclose(outputs.loss, loss(outputs.logits, labels))
    # Not by the Trainer's count: a mean squared error ignores it, and accumulation would multiply the loss.
    assert model.accepts_loss_kwargs is False


@pytest.mark.parametrize(
    "labels, problem_type, message",
    [
        (torch.tensor([0, 2, 1, 1], dtype=torch.int16), None, "has dtype torch.int16, it must be torch.int64"),
        (torch.tensor([0, 2, 1, 1], dtype=torch.int32), None, "has dtype torch.int32, it must be torch.int64"),
        (torch.tensor([[0, 1, 1]] * 4), "multi_label_classification", "torch.int64; several classes .* labels.float()"),
    ],
)
def test_labels_of_other_dtypes_are_refused(labels, problem_type, message):
    """Transformers would take int16 for several classes a row, for good: it writes that into the config."""
    model = small_model(NeoBERTForSequenceClassification, num_labels=3, problem_type=problem_type)
    with pytest.raises(ValueError, match=message):
        model(IDS, attention_mask=MASK, labels=labels)
    assert model.config.problem_type == problem_type


def test_token_classification():
    model = small_model(NeoBERTForTokenClassification, num_labels=5)
    labels = torch.randint(0, 5, IDS.shape).masked_fill(MASK == 0, -100)
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    assert outputs.logits.shape == (4, 13, 5)
    real = MASK.bool()
    assert torch.allclose(outputs.loss, F.cross_entropy(outputs.logits[real], labels[real]))
    outputs = model(IDS, attention_mask=MASK, labels=labels, num_items_in_batch=2 * real.sum())
    assert torch.allclose(outputs.loss * 2, F.cross_entropy(outputs.logits[real], labels[real]))


def test_question_answering():
    model = small_model(NeoBERTForQuestionAnswering)
    start, end = torch.tensor([1, 0, 0, 4]), torch.tensor([3, 2, 0, 99])
    outputs = model(IDS, attention_mask=MASK, start_positions=start, end_positions=end)
    assert outputs.start_logits.shape == outputs.end_logits.shape == (4, 13)
    # The softmax is over the tokens of a row, without its padding.
    real = [logits.masked_fill(MASK == 0, -torch.inf) for logits in (outputs.start_logits, outputs.end_logits)]
    ends = F.cross_entropy(real[1][:3], end[:3])  # a position outside the sequence does not count
    assert torch.allclose(outputs.loss, (F.cross_entropy(real[0], start) + ends) / 2)
    alone = model(IDS[:1, :5], start_positions=start[:1], end_positions=end[:1]).loss
    padded = model(IDS[:1], attention_mask=torch.arange(13)[None] < 5, start_positions=start[:1], end_positions=end[:1])
    assert torch.allclose(padded.loss, alone, atol=1e-5)
    with pytest.raises(ValueError, match="Pass exactly one of `input_ids` and `inputs_embeds`"):
        model(start_positions=start, end_positions=end)
    row = int((MASK[:, -1] == 0).nonzero()[0])
    with pytest.raises(ValueError, match=f"answer in row {row} goes from 1 to 12, where `attention_mask` hides"):
        model(IDS, attention_mask=MASK, start_positions=torch.ones(4).long(), end_positions=torch.full((4,), 12))


@torch.no_grad()
def test_multiple_choice():
    model = small_model(NeoBERTForMultipleChoice)
    ids, mask = IDS.view(2, 2, -1), MASK.view(2, 2, -1)
    outputs = model(ids, attention_mask=mask, labels=torch.tensor([0, 1]))
    assert outputs.logits.shape == (2, 2)
    assert torch.allclose(outputs.loss, F.cross_entropy(outputs.logits, torch.tensor([0, 1])))
    swapped = model(ids.flip(1), attention_mask=mask.flip(1)).logits
    assert torch.allclose(swapped, outputs.logits.flip(1), atol=1e-5)
    embeds = model.get_input_embeddings()(ids)
    assert torch.allclose(model(inputs_embeds=embeds, attention_mask=mask).logits, outputs.logits, atol=1e-5)


def test_dropout_acts_in_training_only():
    model = small_model(dropout=0.2)
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, model(IDS).last_hidden_state)
        for kwargs in ({}, {"attention_mask": MASK}):
            model.train()
            assert not torch.equal(model(IDS, **kwargs).last_hidden_state, model(IDS, **kwargs).last_hidden_state)
            model.eval()
    # All three places: attention weights and both sub-layers.
    seen = []
    model.train()
    block = model.transformer_encoder[0]
    block.dropout.register_forward_hook(lambda *args: seen.append("sub-layer"))
    model(IDS)
    assert seen == ["sub-layer"] * 2
    with torch.no_grad():
        assert (model(IDS, output_attentions=True).attentions[0] == 0).any(), "attention dropout"


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("switch_off", ["p", "eval", "identity"])
def test_dropout_is_what_its_modules_say(backend, switch_off):
    """TRL sets `p` to 0 on every `nn.Dropout`, others take the modules out: attention drops nothing then, either."""
    model = small_model(attn_implementation=backend, dropout=0.5)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).last_hidden_state
    model.train()
    for block in model.transformer_encoder:
        if switch_off == "p":
            block.dropout.p = 0.0
        elif switch_off == "eval":
            block.dropout.eval()
        else:
            block.dropout = torch.nn.Identity()
    with torch.set_grad_enabled(backend != "flex_attention"):
        assert torch.allclose(model(IDS, attention_mask=MASK).last_hidden_state, expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(model(IDS, attention_mask=MASK).last_hidden_state, expected, atol=1e-5)


@pytest.mark.parametrize("cls", [NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTForTokenClassification])
def test_subclasses_keep_the_loss(cls):
    """Transformers picks the loss by the class's name, and falls back to next-token prediction."""

    class Mine(cls):
        pass

    labels = torch.tensor([0, 1, 1, 0]) if cls is NeoBERTForSequenceClassification else IDS % 2
    losses = [small_model(c)(IDS, attention_mask=MASK, labels=labels).loss for c in (cls, Mine)]
    assert torch.equal(*losses)

"""Promise 6: five heads and their losses, written out by hand."""

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
from tests.helpers.models import LENGTHS, batch_of, ragged_batch, small_model


IDS, MASK = ragged_batch()


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(23)])
@pytest.mark.parametrize("layout", ["right", "cu_seq_lens"])
def test_masked_language_modelling(layout, num_items):
    """Sparse prediction has the dense loss to float32 rounding, and logits of the labelled positions only."""
    ids, kwargs, documents = batch_of(layout)
    labels = torch.full_like(ids, -100)
    for row, columns in documents:
        labels[row, columns[::4]] = torch.randint(0, 100, columns[::4].shape)
    results = {}
    for sparse in (False, True):
        model = small_model(NeoBERTForMaskedLM, sparse_prediction=sparse, embedding_init_range=0.3)
        outputs = model(ids, labels=labels, num_items_in_batch=num_items, **kwargs)
        outputs.loss.backward()
        results[sparse] = outputs, {name: p.grad for name, p in model.named_parameters()}
        assert model(ids, **kwargs).logits.shape == (*ids.shape, 100), "dense when there are no labels"
    (dense, dense_gradients), (sparse, sparse_gradients) = results[False], results[True]
    labelled = labels != -100
    count = labelled.sum() if num_items is None else num_items
    by_hand = F.cross_entropy(dense.logits[labelled], labels[labelled], reduction="sum") / count
    assert torch.allclose(dense.loss, by_hand, rtol=1e-6) and torch.allclose(sparse.loss, by_hand, rtol=1e-6)
    assert torch.allclose(sparse.logits, dense.logits[labelled], atol=1e-5)
    for name, expected in dense_gradients.items():
        assert (sparse_gradients[name] - expected).abs().max() <= 2e-6 * max(1, expected.abs().max()), name


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_classification_in_every_layout(pooling, backend):
    """The first real token is not column 0 when the padding is on the left, and a packed row holds several."""
    model = small_model(NeoBERTForSequenceClassification, backend, classifier_pooling=pooling, num_labels=3)
    for layout in ("dense", "right", "left", "cu_seq_lens"):
        ids, kwargs, documents = batch_of(layout)
        states = [model.model(ids[row, columns][None]).last_hidden_state[0] for row, columns in documents]
        pooled = torch.stack([states[0] if pooling == "cls" else states.mean(0) for states in states])
        hidden = torch.tanh(pooled @ model.dense.weight.T + model.dense.bias)
        expected = hidden @ model.classifier.weight.T + model.classifier.bias
        assert (model(ids, **kwargs).logits - expected).abs().max() <= 1e-5, layout


@pytest.mark.parametrize(
    "num_labels, labels, loss",
    [
        (3, torch.tensor([0, 2, 1, 1]), F.cross_entropy),
        (3, torch.tensor([0, 2, -100, 1]), F.cross_entropy),
        (1, torch.tensor([0.5, -1.0, 2.0, 0.0]), lambda logits, labels: F.mse_loss(logits.squeeze(), labels)),
        (3, torch.tensor([[0.0, 1, 1]] * 4), F.binary_cross_entropy_with_logits),
    ],
    ids=["classes", "ignored", "regression", "multi_label"],
)
def test_classification_losses(num_labels, labels, loss):
    model = small_model(NeoBERTForSequenceClassification, num_labels=num_labels)
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    assert torch.allclose(outputs.loss, loss(outputs.logits, labels))
    # Not by the Trainer's count: a mean squared error ignores it, and accumulation would multiply the loss.
    assert model.accepts_loss_kwargs is False


def test_token_classification():
    model = small_model(NeoBERTForTokenClassification, num_labels=5)
    labels, real = torch.randint(0, 5, IDS.shape).masked_fill(MASK == 0, -100), MASK.bool()
    outputs = model(IDS, attention_mask=MASK, labels=labels)
    assert outputs.logits.shape == (4, 13, 5)
    assert torch.allclose(outputs.loss, F.cross_entropy(outputs.logits[real], labels[real]))
    outputs = model(IDS, attention_mask=MASK, labels=labels, num_items_in_batch=2 * real.sum())
    assert torch.allclose(outputs.loss * 2, F.cross_entropy(outputs.logits[real], labels[real]))


def test_question_answering():
    """The softmax is over the tokens of a row, without its padding; a position outside the row does not count."""
    model = small_model(NeoBERTForQuestionAnswering)
    start, end = torch.tensor([1, 0, 0, 4]), torch.tensor([3, 2, 0, 99])
    outputs = model(IDS, attention_mask=MASK, start_positions=start, end_positions=end)
    assert outputs.start_logits.shape == outputs.end_logits.shape == (4, 13)
    real = [logits.masked_fill(MASK == 0, -torch.inf) for logits in (outputs.start_logits, outputs.end_logits)]
    ends = F.cross_entropy(real[1][:3], end[:3])
    assert torch.allclose(outputs.loss, (F.cross_entropy(real[0], start) + ends) / 2)


@torch.no_grad()
def test_multiple_choice():
    model = small_model(NeoBERTForMultipleChoice)
    ids, mask = IDS.view(2, 2, -1), MASK.view(2, 2, -1)
    outputs = model(ids, attention_mask=mask, labels=torch.tensor([0, 1]))
    assert torch.allclose(outputs.loss, F.cross_entropy(outputs.logits, torch.tensor([0, 1])))
    alone = torch.cat([model(row[None, None, :length]).logits for row, length in zip(IDS, LENGTHS)]).view(2, 2)
    assert torch.allclose(outputs.logits, alone, atol=1e-5)
    embeds = model.get_input_embeddings()(ids)
    assert torch.allclose(model(inputs_embeds=embeds, attention_mask=mask).logits, outputs.logits, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["dense", "right"])
def test_dropout(backend, layout):
    """On attention weights and both sub-layers, in training only, and as its modules say: TRL sets `p` to 0."""
    model = small_model(attn_implementation=backend, dropout=0.5, num_hidden_layers=1)
    ids, kwargs, _ = batch_of(layout)
    expected, dropout, seen = model(ids, **kwargs).last_hidden_state, model.transformer_encoder[0].dropout, []
    hook = dropout.register_forward_hook(lambda module, inputs, output: seen.append(output) or inputs[0])
    # With the outputs of the sub-layers kept, training still differs, by the attention weights.
    assert not torch.allclose(model.train()(ids, **kwargs).last_hidden_state, expected, atol=0.01)
    assert len(seen) == 2 and all((output == 0).any() for output in seen)
    hook.remove()
    dropout.p = 0.0
    assert torch.allclose(model(ids, **kwargs).last_hidden_state, expected, atol=1e-5)


@pytest.mark.parametrize("cls", [NeoBERTForMaskedLM, NeoBERTForTokenClassification])
def test_subclasses_keep_the_loss(cls):
    """Transformers picks the loss by the class's name, and falls back to next-token prediction."""
    losses = [small_model(c)(IDS, labels=IDS % 2).loss for c in (cls, type("Mine", (cls,), {}))]
    assert torch.equal(*losses)

"""What explains a model's answers."""

import numpy as np
import pytest
import torch

from neobert_hf import NeoBERTForSequenceClassification, NeoBERTModel
from tests.clients.plain import TEXTS, logits, same, tokens


@pytest.mark.clients("captum")
def test_captum(classifier):
    """Attributions to the token embeddings add up to the difference between the logits of the text and of padding."""
    from captum.attr import LayerIntegratedGradients

    model = NeoBERTForSequenceClassification.from_pretrained(classifier).eval()
    ids = tokens(classifier, TEXTS[:1])["input_ids"]
    baseline = torch.full_like(ids, 5)

    def score(ids):
        return model(ids).logits[:, 1]

    gradients = LayerIntegratedGradients(score, model.model.encoder)
    found = gradients.attribute(ids, baseline, n_steps=200)
    with torch.no_grad():
        difference = (score(ids) - score(baseline)).item()
    assert found.shape == (*ids.shape, 64) and abs(found.sum().item() - difference) < 0.02 * abs(difference)


@pytest.mark.clients("transformers-interpret")
def test_transformers_interpret(classifier):
    """Its baseline text has `position_ids` that are all 0, which means many documents of one token here; see below."""
    from transformers import AutoTokenizer
    from transformers_interpret import SequenceClassificationExplainer

    model = NeoBERTForSequenceClassification.from_pretrained(classifier)
    explainer = SequenceClassificationExplainer(model, AutoTokenizer.from_pretrained(classifier))
    with pytest.raises(ValueError, match="position_ids"):
        explainer(TEXTS[0])


@pytest.mark.clients("bertviz")
def test_bertviz(encoder):
    """The page contains the attention weights of the eager backend."""
    from bertviz import head_view
    from transformers import AutoTokenizer

    model = NeoBERTModel.from_pretrained(encoder, attn_implementation="eager").eval()
    inputs = tokens(encoder, TEXTS[1:2])
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    words = AutoTokenizer.from_pretrained(encoder).convert_ids_to_tokens(inputs["input_ids"][0])
    page = head_view(weights, words, html_action="return")
    assert str(weights[0][0, 0, 0].tolist())[1:-1] in page.data


@pytest.mark.clients("shap")
def test_shap(classifier):
    """The values of a text's parts add up to the difference between the scores of the text and of masked text."""
    import shap
    from transformers import pipeline

    classify = pipeline("text-classification", classifier, top_k=None)
    found = shap.Explainer(classify)([TEXTS[0]])
    expected = logits(classifier, TEXTS[:1]).softmax(-1)
    assert same(np.squeeze(found.values.sum(1) + found.base_values), expected[0], 1e-4)

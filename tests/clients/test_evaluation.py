"""What measures with a model, and what measures a model."""

import pytest
import torch
from torch.nn import functional as F

from neobert_hf import NeoBERTModel
from tests.clients.plain import TEXTS, logits, same, tokens, vectors


CANDIDATES, REFERENCES = TEXTS[:2], TEXTS[2:]


@torch.no_grad()
def cosines(folder: str, layer: int) -> list[torch.Tensor]:
    """Of each token of a candidate with each of its reference, special tokens included, by the plain hidden states."""
    model = NeoBERTModel.from_pretrained(folder).eval()

    def normalized(text: str) -> torch.Tensor:
        return F.normalize(model(**tokens(folder, [text]), output_hidden_states=True).hidden_states[layer][0])

    return [normalized(left) @ normalized(right).T for left, right in zip(CANDIDATES, REFERENCES)]


def f1(matches: torch.Tensor) -> torch.Tensor:
    """Of greedy matches (Zhang et al., 2020), for every token but the first and the last, which are special."""
    precision, recall = (matches.max(dim).values[1:-1].mean() for dim in (1, 0))
    return 2 * precision * recall / (precision + recall)


@pytest.mark.clients("bert-score")
def test_bert_score(encoder):
    """F1 at every layer is that computed from the plain hidden states."""
    from bert_score import BERTScorer

    scorer = BERTScorer(model_type=encoder, num_layers=2, all_layers=True, device="cpu")
    _, _, found = scorer.score(CANDIDATES, REFERENCES)
    expected = torch.stack([torch.stack([f1(matches) for matches in cosines(encoder, layer)]) for layer in range(3)])
    assert same(found, expected)


@pytest.mark.clients("torchmetrics")
def test_torchmetrics(encoder):
    """F1 is that of the plain hidden states, with special tokens counted as 0; in a batch it is the same."""
    from torchmetrics.text import BERTScore

    options = {"num_layers": 1, "truncation": True, "max_length": 64}
    # Special tokens match as if their cosine was 0.
    inner = [F.pad(matches[1:-1, 1:-1], (1, 1, 1, 1)) for matches in cosines(encoder, 1)]
    expected = torch.stack([f1(matches) for matches in inner])
    for size in (1, 2):
        assert same(BERTScore(encoder, batch_size=size, **options)(CANDIDATES, REFERENCES)["f1"], expected)


@pytest.mark.clients("evaluate")
def test_evaluate(classifier):
    """The accuracy is that of the plain logits."""
    import evaluate
    from datasets import Dataset, Features, Value

    class Accuracy(evaluate.Metric):
        def _info(self):
            return evaluate.MetricInfo(
                description="",
                citation="",
                features=Features({"predictions": Value("int32"), "references": Value("int32")}),
            )

        def _compute(self, predictions, references):
            return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}

    rows = Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0, 1]})
    judge, labels = evaluate.evaluator("text-classification"), {"LABEL_0": 0, "LABEL_1": 1}
    found = judge.compute(classifier, rows, metric=Accuracy(), label_mapping=labels)
    expected = (logits(classifier).argmax(-1) == torch.tensor([0, 1, 0, 1])).float().mean()
    assert found["accuracy"] == expected


@pytest.mark.clients("mteb")
def test_mteb(encoder, tmp_path):
    """The rank correlation with given scores is that of the plain vectors' cosines."""
    import mteb
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer

    from neobert_hf.evaluation.mteb.local_tasks import LocalTask, make_task
    from tests.helpers.mteb_tasks import write_rows

    scores = [0.0, 1.0, 2.0, 3.0]
    write_rows(tmp_path / "pairs.jsonl", sentence1=TEXTS, sentence2=TEXTS[1:] + TEXTS[:1], score=scores)
    task = make_task(LocalTask("Pairs", "STS", tmp_path / "pairs.jsonl"))
    model = SentenceTransformer(encoder, device="cpu")
    result = mteb.evaluate(model, task, cache=None)
    plain = vectors(encoder, normalize=True)
    cosines = [plain[row] @ plain[(row + 1) % 4] for row in range(4)]
    assert abs(result.task_results[0].get_score() - spearmanr(cosines, scores).statistic) < 1e-6

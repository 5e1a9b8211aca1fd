"""Hard negatives that a model finds: which documents are too close to be wrong ones, and who finds them."""

import json
import shutil

import pytest
from datasets import Dataset

from neobert_hf.embeddings import mining
from neobert_hf.embeddings.datasets import PairDataset, positives_of_queries
from tests.helpers.embedding_runs import load, run


PROMPT = "Find the text. "


@pytest.fixture
def mine(data, edit, settings, tmp_path):
    """Train for a step on pairs whose negatives a model finds; the rows with what it found."""
    rows = [json.loads(line) for line in (data / "pairs.jsonl").read_text().splitlines()[:40]]
    # Some queries stand in two places, between others.
    rows += [row | {"body": f"also {row['body']}"} for row in rows[:10]]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = edit(lambda content: content["train"]["pairs"].update(source=str(tmp_path / "pairs.jsonl")))
    changes = {"datasets": file, "only": "pairs", "negatives": 3, "max_steps": 1, "save_steps": 1}

    def with_miner(miner) -> Dataset:
        run("dense", settings(miner=miner, eval_strategy="no", **changes))
        newest = max((tmp_path / "run" / "mined").iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return Dataset.from_parquet(str(newest))

    return with_miner


def test_negatives_are_further_from_the_query_than_the_margin_and_are_mined_once(
    trained, helper, mine, tmp_path, monkeypatch
):
    mined, miner = mine(trained["dense"] / "model"), load("dense", trained["dense"])
    right, documents, margins = positives_of_queries(mined), set(mined["positive"]), []

    def best(query: str, texts: list[str]) -> float:
        return miner.similarity(miner.encode([query], prompt=PROMPT), miner.encode(texts, prompt="")).max().item()

    for row in mined:
        query, wrong = row["query"], row["negatives"]
        assert len(wrong) <= 3 and set(wrong) <= documents - right[query]
        if wrong:
            score = best(query, list(right[query]))
            margins.append((score - best(query, wrong)) / abs(score))
    # The margin decides: without one, negatives come closer.
    assert len(mined) == 50 and len(margins) > 10
    assert mining.RELATIVE_MARGIN - 1e-5 <= min(margins) < mining.RELATIVE_MARGIN + 0.05
    with monkeypatch.context() as patch:
        patch.delattr(mining, "mine_hard_negatives")
        assert mine(trained["dense"] / "model")[:] == mined[:]
    # A run that has not begun finds others with another model.
    shutil.rmtree(tmp_path / "run" / "checkpoint-1")
    assert mine(helper)["negatives"][:] != mined["negatives"][:]


def test_miners_ask_with_prompts_of_their_own(trained, capsys):
    """That of the dataset if they were trained with it, otherwise their own for queries."""
    miner = load("dense", trained["dense"])
    instructions = ("Find the text.", "Another.", "")
    found = [mining.prompts_of_helper("miner", miner, PairDataset("d", text, [])) for text in instructions]
    assert found == [["Find the text. ", ""], ["Find the answer. ", ""], ["Find the answer. ", ""]]
    assert "Another. " in capsys.readouterr().out

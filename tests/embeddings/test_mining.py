"""Hard negatives that a model finds: which documents are too close to be wrong ones."""

import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from neobert_hf.embeddings.arguments import EmbeddingArguments, RerankerArguments
from neobert_hf.embeddings.datasets import PairDataset, TrainingData, positives_of_queries
from neobert_hf.embeddings.mining import add_mined_negatives, prompts_of_helper
from neobert_hf.embeddings.recipe import Run
from tests.helpers.embedding_runs import load, run


PROMPT = "Find the text. "


@pytest.fixture(scope="module")
def pairs(data) -> Dataset:
    """Some queries stand in several places, between others."""
    rows = Dataset.from_json(str(data / "pairs.jsonl")).select(range(40))
    pairs = [{"query": row["title"], "positive": row["body"], "negatives": []} for row in rows]
    return Dataset.from_list([*pairs, *(row | {"positive": f"also {row['positive']}"} for row in pairs[:10])])


@pytest.fixture
def mine(trained, pairs, tmp_path):
    """Mine at most three negatives for `pairs` into tmp_path / "mined", and check what is true of all negatives."""

    def mine(miner: Path | None = None, instruction: str = PROMPT, begun: bool = False, **changes) -> Dataset:
        miner = miner or trained["dense"] / "model"
        settings = RerankerArguments("m", "d", miner=str(miner), negatives=3, **changes)
        dataset = PairDataset("described", instruction, [], rows=pairs)
        arguments = EmbeddingArguments(str(tmp_path), use_cpu=True, bf16=False)
        checkpoint = tmp_path / "checkpoint-1" if begun else None
        add_mined_negatives(Run(settings, arguments, TrainingData({"described": dataset}, {}), {}, checkpoint))
        right = positives_of_queries(pairs)
        assert dataset.rows.select_columns(["query", "positive"])[:] == pairs.select_columns(["query", "positive"])[:]
        for row in dataset.rows:
            assert len(row["negatives"]) <= 3 and not right[row["query"]] & set(row["negatives"])
            assert set(row["negatives"]) <= set(pairs["positive"])
        return dataset.rows

    return mine


@pytest.mark.parametrize("margin", [0.0, 0.08])
def test_negatives_are_further_from_the_query_than_the_margin(trained, mine, margin):
    miner = load("dense", trained["dense"])

    def best(query: str, documents: list[str]) -> float:
        return miner.similarity(miner.encode([query], prompt=PROMPT), miner.encode(documents, prompt="")).max().item()

    mined = mine(relative_margin=margin)
    right = positives_of_queries(mined)
    rows = [row for row in mined if row["negatives"]]
    found = [(best(row["query"], list(right[row["query"]])), best(row["query"], row["negatives"])) for row in rows]
    assert len(found) > 10 and all(wrong <= score - margin * abs(score) + 1e-5 for score, wrong in found)
    # The margin decides: without one, negatives come this close.
    assert (min((score - wrong) / abs(score) for score, wrong in found) < 0.05) == (margin == 0)


def test_negatives_are_mined_once(trained, mine, tmp_path, monkeypatch):
    shutil.copytree(trained["dense"] / "model", tmp_path / "miner")
    first = mine(tmp_path / "miner")
    with monkeypatch.context() as patch:
        patch.delattr("neobert_hf.embeddings.mining.mine_hard_negatives")
        assert mine(tmp_path / "miner")[:] == first[:] and len(list((tmp_path / "mined").iterdir())) == 1
    # The same folder with another model.
    weights = load_file(tmp_path / "miner" / "model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, tmp_path / "miner" / "model.safetensors")
    assert mine(tmp_path / "miner")["negatives"][:] != first["negatives"][:]
    # A run that has begun does not go on with others.
    with pytest.raises(FileNotFoundError, match="mined/.*with which this run began, is missing"):
        mine(tmp_path / "miner", instruction="Other.", begun=True)


# A helper that is not there, and one that was not trained for its part.
BAD_HELPERS = [(name, "nowhere", OSError) for name in ("model", "miner", "guide")]
BAD_HELPERS += [(name, "encoder", ValueError) for name in ("miner", "guide")]


@pytest.mark.parametrize("name, given, kind", BAD_HELPERS)
def test_a_wrong_helper_is_named_by_its_setting(name, given, kind, settings, helper, encoder, tmp_path):
    paths = {"nowhere": tmp_path / "nowhere", "encoder": encoder}
    changes = settings(miner=helper, negatives=1, only="pairs", max_steps=1) | {name: paths[given]}
    with pytest.raises(kind, match=f"`{name}`"):
        run("dense", changes)


def test_miners_ask_with_prompts_of_their_own(trained, capsys):
    """That of the dataset if they were trained with it, otherwise their own for queries."""
    miner = load("dense", trained["dense"])
    instructions = ("Find the text.", "Another.", "")
    found = [prompts_of_helper("miner", miner, PairDataset("d", text, [])) for text in instructions]
    assert found == [["Find the text. ", ""], ["Find the answer. ", ""], ["Find the answer. ", ""]]
    assert "Another. " in capsys.readouterr().out

"""Hard negatives that a model finds: which documents are too close to be wrong ones, and who finds them."""

import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors.torch import load_file, save_file

from neobert_hf.embeddings import mining
from neobert_hf.embeddings.arguments import EmbeddingArguments
from neobert_hf.embeddings.datasets import PairDataset, TrainingData, positives_of_queries
from neobert_hf.embeddings.recipe import Run
from tests.helpers.embedding_runs import load, run
from tests.helpers.examples import load_example


PROMPT = "Find the text. "


@pytest.fixture(scope="module")
def pairs(data) -> Dataset:
    """Some queries stand in several places, between others."""
    rows = Dataset.from_json(str(data / "pairs.jsonl")).select(range(40))
    pairs = [{"query": row["title"], "positive": row["body"], "negatives": []} for row in rows]
    return Dataset.from_list([*pairs, *(row | {"positive": f"also {row['positive']}"} for row in pairs[:10])])


@pytest.fixture
def mine(pairs, tmp_path):
    """Mine negatives for `pairs` into tmp_path / "mined"."""

    def mine(miner: Path, negatives: int = 3, begun: bool = False) -> Dataset:
        settings = load_example("finetune_embeddings").DenseArguments("m", "d", miner=str(miner), negatives=negatives)
        dataset = PairDataset("described", PROMPT, [], rows=pairs)
        arguments = EmbeddingArguments(str(tmp_path), use_cpu=True, bf16=False)
        checkpoint = tmp_path / "checkpoint-1" if begun else None
        mining.add_mined_negatives(Run(settings, arguments, TrainingData({"described": dataset}, {}), {}, checkpoint))
        return dataset.rows

    return mine


@pytest.mark.parametrize("margin", [0.0, mining.RELATIVE_MARGIN])
def test_negatives_are_further_from_the_query_than_the_margin(trained, pairs, mine, monkeypatch, margin):
    monkeypatch.setattr(mining, "RELATIVE_MARGIN", margin)
    mined, miner = mine(trained["dense"] / "model"), load("dense", trained["dense"])

    def best(query: str, documents: list[str]) -> float:
        return miner.similarity(miner.encode([query], prompt=PROMPT), miner.encode(documents, prompt="")).max().item()

    assert mined.select_columns(["query", "positive"])[:] == pairs.select_columns(["query", "positive"])[:]
    right, documents, distances = positives_of_queries(pairs), set(pairs["positive"]), []
    for row in mined:
        wrong = set(row["negatives"])
        assert len(wrong) <= 3 and wrong <= documents - right[row["query"]]
        if wrong:
            score = best(row["query"], list(right[row["query"]]))
            distances.append((score - best(row["query"], list(wrong))) / abs(score))
    # The margin decides: without one, negatives come closer.
    assert len(distances) > 10 and margin - 1e-5 <= min(distances) < margin + 0.05
    # More than there are documents ends at what there is.
    assert 3 < max(map(len, mine(trained["dense"] / "model", negatives=10_000)["negatives"])) < len(documents)


def test_negatives_are_mined_once(trained, mine, tmp_path, monkeypatch):
    shutil.copytree(trained["dense"] / "model", tmp_path / "miner")
    first = mine(tmp_path / "miner")
    with monkeypatch.context() as patch:
        patch.delattr(mining, "mine_hard_negatives")
        assert mine(tmp_path / "miner")[:] == first[:] and len(list((tmp_path / "mined").iterdir())) == 1
    # The same folder with another model.
    weights = load_file(tmp_path / "miner" / "model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, tmp_path / "miner" / "model.safetensors")
    assert mine(tmp_path / "miner")["negatives"][:] != first["negatives"][:]
    # A run that has begun does not go on with others.
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "mined")):
        mine(tmp_path / "miner", negatives=2, begun=True)


# A model that is not there, an encoder that was not trained to embed, and a model of another kind.
BAD_HELPERS = [("model", "nowhere", OSError), ("guide", "encoder", ValueError), ("miner", "sparse", ValueError)]


@pytest.mark.parametrize("name, given, kind", BAD_HELPERS)
def test_a_wrong_helper_is_named_by_its_setting(name, given, kind, settings, helper, encoder, trained, tmp_path):
    paths = {"nowhere": tmp_path / "nowhere", "encoder": encoder, "sparse": trained["sparse"] / "model"}
    with pytest.raises(kind, match=f"`{name}`"):
        run("dense", settings(miner=helper, negatives=1, only="pairs", max_steps=1) | {name: paths[given]})


def test_miners_ask_with_prompts_of_their_own(trained, capsys):
    """That of the dataset if they were trained with it, otherwise their own for queries."""
    miner = load("dense", trained["dense"])
    instructions = ("Find the text.", "Another.", "")
    found = [mining.prompts_of_helper("miner", miner, PairDataset("d", text, [])) for text in instructions]
    assert found == [["Find the text. ", ""], ["Find the answer. ", ""], ["Find the answer. ", ""]]
    assert "Another. " in capsys.readouterr().out

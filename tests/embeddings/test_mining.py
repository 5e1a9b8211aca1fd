"""Hard negatives that a model finds: which documents are too close to be wrong ones, and who says so."""

import shutil

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from neobert_hf.embeddings.arguments import DenseArguments, RerankerArguments
from neobert_hf.embeddings.mining import mine_negatives, prompts_of_helper
from tests.helpers.embedding_runs import described, load, run


PROMPT = "Find the text. "


@pytest.fixture(scope="module")
def pairs(data) -> Dataset:
    rows = Dataset.from_json(str(data / "pairs.jsonl")).select(range(40))
    return Dataset.from_list([{"query": row["title"], "positive": row["body"], "negatives": []} for row in rows])


def arguments(trained, **changes) -> RerankerArguments:
    return RerankerArguments(**{"model": "m", "datasets": "d", "miner": str(trained["dense"] / "model")} | changes)


def scores_of(pairs: Dataset, mined: Dataset, score) -> list[tuple[float, torch.Tensor]]:
    """For each query that of the right document, and those of its negatives."""
    found = []
    for row in mined:
        assert row["positive"] not in row["negatives"] and set(row["negatives"]) <= set(pairs["positive"])
        if row["negatives"]:
            values = torch.as_tensor(score(row["query"], [row["positive"], *row["negatives"]]))
            found.append((values[0].item(), values[1:]))
    return found


@pytest.mark.parametrize("relative, absolute", [(0.0, None), (0.08, None), (0.0, 0.08)])
def test_negatives_are_further_from_the_query_than_the_margin(trained, pairs, tmp_path, relative, absolute):
    miner = load("dense", trained["dense"])

    def cosines(query: str, documents: list[str]) -> torch.Tensor:
        return miner.similarity(miner.encode([query], prompt=PROMPT), miner.encode(documents, prompt=""))[0]

    chosen = arguments(trained, negatives=3, relative_margin=relative, absolute_margin=absolute)
    found = scores_of(pairs, mine_negatives(pairs, described(PROMPT), chosen, tmp_path), cosines)
    assert len(found) > 10
    for right, wrong in found:
        assert (wrong <= right - relative * abs(right) - (absolute or 0) + 1e-5).all()
    closest = min(((right - wrong) / abs(right)).min().item() for right, wrong in found)
    # The margin decides: without one, negatives come this close.
    assert (closest < 0.05) == (relative == 0 and absolute is None)


def test_a_reranker_says_what_is_too_close(trained, pairs, tmp_path):
    reranker = load("reranker", trained["reranker"])

    def score(query: str, documents: list[str]):
        return reranker.predict([(query, document) for document in documents])

    # The scores of so small a reranker lie close to each other.
    plain = mine_negatives(pairs, described(PROMPT), arguments(trained, negatives=3, relative_margin=0.0), tmp_path)
    reranked = {"relative_margin": 0.0, "cross_encoder": str(trained["reranker"] / "model")}
    checked_by = arguments(trained, negatives=3, **reranked)
    checked = mine_negatives(pairs, described(PROMPT), checked_by, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and plain["negatives"][:] != checked["negatives"][:]
    found = scores_of(pairs, checked, score)
    assert len(found) > 10 and all((wrong <= right + 1e-6).all() for right, wrong in found)
    assert not all((wrong <= right).all() for right, wrong in scores_of(pairs, plain, score))


# A helper that is not there, and one that was not trained for its part.
BAD_HELPERS = [(name, "nowhere", OSError) for name in ("model", "miner", "cross_encoder", "guide")]
BAD_HELPERS += [(name, "encoder", ValueError) for name in ("miner", "cross_encoder", "guide")]


@pytest.mark.parametrize("name, given, kind", BAD_HELPERS)
def test_a_wrong_helper_is_named_by_its_setting(name, given, kind, settings, helper, encoder, tmp_path):
    paths = {"nowhere": tmp_path / "nowhere", "encoder": encoder}
    changes = settings(miner=helper, negatives=1, only="pairs", max_steps=1) | {name: paths[given]}
    with pytest.raises(kind, match=f"`{name}`"):
        run("dense", changes)


def test_a_miner_needs_to_know_how_many_negatives():
    with pytest.raises(ValueError, match="`miner`.*`negatives`"):
        DenseArguments("m", "d", miner="x")


def test_miners_ask_with_prompts_of_their_own(trained, capsys):
    """That of the dataset if they were trained with it, otherwise their own for queries."""
    miner = load("dense", trained["dense"])
    found = [prompts_of_helper("miner", miner, described(text)) for text in ("Find the text.", "Another.", "")]
    assert found == [["Find the text. ", ""], ["Find the answer. ", ""], ["Find the answer. ", ""]]
    assert "Another. " in capsys.readouterr().out


def test_mined_negatives_belong_to_their_queries_and_are_mined_once(trained, data, tmp_path, monkeypatch):
    rows = Dataset.from_parquet(str(data / "test.parquet"))
    # Queries that stand in several places, between others.
    pairs = [{"query": row["question"], "positive": row["answer"], "negatives": []} for row in rows]
    pairs = [*pairs, *({**row, "positive": f"also {row['positive']}"} for row in pairs[:10])]
    shutil.copytree(trained["dense"] / "model", tmp_path / "miner")
    settings = RerankerArguments("m", "d", negatives=3, miner=str(tmp_path / "miner"))
    mined = mine_negatives(Dataset.from_list(pairs), described("Find. "), settings, tmp_path / "mined")
    model = SentenceTransformer(settings.miner, device="cpu")
    assert mined["query"][:] == [row["query"] for row in pairs] and any(mined["negatives"][:])
    for row, original in zip(mined, pairs):
        assert row["positive"] == original["positive"] and len(row["negatives"]) <= 3
        if not row["negatives"]:
            continue
        right = {other["positive"] for other in pairs if other["query"] == row["query"]}
        assert not right & set(row["negatives"])
        # Its own prompt: it does not know this one.
        query = model.encode_query(row["query"], normalize_embeddings=True)
        scores = {text: float(query @ model.encode(text, normalize_embeddings=True)) for text in row["negatives"]}
        best = max(float(query @ model.encode(text, normalize_embeddings=True)) for text in right)
        assert max(scores.values()) < best - 0.05 * abs(best) + 1e-5
    with monkeypatch.context() as patch:
        patch.delattr("neobert_hf.embeddings.mining.mine_hard_negatives")
        again = mine_negatives(Dataset.from_list(pairs), described("Find. "), settings, tmp_path / "mined")
    assert again[:] == mined[:] and len(list((tmp_path / "mined").iterdir())) == 1
    # Another miner in the same folder.
    weights = load_file(tmp_path / "miner" / "model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, tmp_path / "miner" / "model.safetensors")
    other = mine_negatives(Dataset.from_list(pairs), described("Find. "), settings, tmp_path / "mined")
    assert other["negatives"][:] != mined["negatives"][:]
    # A run that has begun does not go on with others.
    with pytest.raises(FileNotFoundError, match="with which this run began, is missing"):
        mine_negatives(Dataset.from_list(pairs), described("Other. "), settings, tmp_path / "mined", begun=True)

"""Hard negatives that a model finds: which documents are too close to be wrong ones, and who says so."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from neobert_hf.embeddings.arguments import DenseArguments, EmbeddingArguments, RerankerArguments
from neobert_hf.embeddings.mining import mine_negatives
from neobert_hf.embeddings.models import load_trained_reranker
from neobert_hf.embeddings.recipe import read_data, run_settings
from tests.helpers.embedding_runs import described, load
from tests.helpers.examples import load_example


PROMPT = "Find the text. "


@pytest.fixture(scope="module")
def pairs(data) -> Dataset:
    rows = Dataset.from_json(str(data / "pairs.jsonl")).select(range(40))
    return Dataset.from_list([{"query": row["title"], "positive": row["body"], "negatives": []} for row in rows])


def settings(trained, **changes) -> RerankerArguments:
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

    chosen = settings(trained, negatives=3, relative_margin=relative, absolute_margin=absolute)
    found = scores_of(pairs, mine_negatives(pairs, described(PROMPT), chosen, tmp_path), cosines)
    assert len(found) > 10
    for right, wrong in found:
        assert (wrong <= right - relative * abs(right) - (absolute or 0) + 1e-5).all()
    closest = min(((right - wrong) / abs(right)).min().item() for right, wrong in found)
    # The margin decides: without one, negatives come this close.
    assert (closest < 0.05) == (relative == 0 and absolute is None)


def test_a_run_that_began_needs_what_was_mined(trained, pairs, tmp_path):
    chosen = settings(trained, negatives=3)
    mine_negatives(pairs, described(PROMPT), chosen, tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"{file}, with which this run began"):
        mine_negatives(pairs, described(PROMPT), chosen, tmp_path, begun=True)


def test_that_nothing_was_found_is_said_aloud(trained, pairs, tmp_path, capsys):
    mined = mine_negatives(pairs, described(PROMPT), settings(trained, negatives=3, relative_margin=0.5), tmp_path)
    assert not any(mined["negatives"])
    assert "for 0 of 40 queries\nnote: every document scores too near" in capsys.readouterr().out


def test_a_reranker_says_what_is_too_close(trained, pairs, tmp_path):
    reranker = load("reranker", trained["reranker"])

    def score(query: str, documents: list[str]):
        return reranker.predict([(query, document) for document in documents], prompt=PROMPT)

    # The scores of so small a reranker lie close to each other.
    plain = mine_negatives(pairs, described(PROMPT), settings(trained, negatives=3, relative_margin=0.0), tmp_path)
    reranked = {"relative_margin": 0.0, "cross_encoder": str(trained["reranker"] / "model")}
    checked_by = settings(trained, negatives=3, **reranked)
    checked = mine_negatives(pairs, described(PROMPT), checked_by, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and plain["negatives"][:] != checked["negatives"][:]
    found = scores_of(pairs, checked, score)
    assert len(found) > 10 and all((wrong <= right + 1e-6).all() for right, wrong in found)
    assert not all((wrong <= right).all() for right, wrong in scores_of(pairs, plain, score))


def test_what_was_mined_belongs_to_the_reranker_and_the_margins(trained, data, tmp_path):
    shutil.copytree(trained["reranker"] / "model", tmp_path / "reranker")
    arguments = EmbeddingArguments("unused", bf16=False, use_cpu=True)
    model = str(trained["dense"] / "model")
    base = {"model": model, "datasets": str(data / "datasets.yaml"), "only": ["pairs"]}

    def values(**changes) -> dict:
        chosen = DenseArguments(**base | changes)
        return run_settings(chosen, arguments, read_data(chosen, arguments))

    mined = {"miner": model, "negatives": 2, "cross_encoder": str(tmp_path / "reranker")}
    before = values(**mined)
    weights = load_file(tmp_path / "reranker" / "model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, tmp_path / "reranker" / "model.safetensors")
    after = values(**mined)
    assert {name for name in before if before[name] != after[name]} == {"cross_encoder"}
    assert values(**mined, absolute_margin=0.1)["absolute_margin"] == 0.1
    # Runs without a miner do not depend on how one would be used.
    assert not {"relative_margin", "absolute_margin", "cross_encoder"} & values().keys()


def test_the_weights_of_an_encoder_in_a_subfolder_belong_to_a_run(encoder, data, tmp_path):
    """Older models of Sentence Transformers have it there."""
    model = tmp_path / "model"
    shutil.copytree(encoder, model / "0_Transformer")
    (model / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "0_Transformer", "type": "x"}]))
    arguments = EmbeddingArguments("unused", bf16=False, use_cpu=True)
    chosen = DenseArguments(model=str(model), datasets=str(data / "datasets.yaml"), only=["pairs"])
    before = run_settings(chosen, arguments, read_data(chosen, arguments))
    weights = load_file(model / "0_Transformer" / "model.safetensors")
    changed = {name: weight + 1 for name, weight in weights.items()}
    save_file(changed, model / "0_Transformer" / "model.safetensors", metadata={"format": "pt"})
    after = run_settings(chosen, arguments, read_data(chosen, arguments))
    assert {name for name in before if before[name] != after[name]} == {"model"}


def test_what_cannot_check_anything_is_refused(trained, encoder):
    for name, value in (("cross_encoder", "x"), ("absolute_margin", 0.1), ("relative_margin", 0.1)):
        with pytest.raises(ValueError, match=f"`{name}` is of no use without `miner`"):
            RerankerArguments("m", "d", **{name: value})
    with pytest.raises(ValueError, match="`relative_margin` is 5"):
        DenseArguments("m", "d", miner="x", negatives=1, relative_margin=5)
    assert RerankerArguments("m", "d", miner="x").relative_margin == 0.05
    with pytest.raises(ValueError, match="`cross_encoder` is .*NeoBERTForMaskedLM"):
        load_trained_reranker(str(encoder), "cross_encoder")


@pytest.mark.parametrize("name", ["model", "miner", "cross_encoder", "guide"])
def test_a_model_that_is_not_there_is_named_by_its_setting(name, encoder, data, tmp_path):
    flags = {"model": encoder, "datasets": data / "datasets.yaml", "output_dir": tmp_path, "miner": encoder}
    flags |= {"negatives": 1, "use_cpu": True, name: tmp_path / "nowhere"}
    with pytest.raises(OSError, match=f"`{name}` is .*nowhere"):
        load_example("finetune_embeddings").main([f"--{flag}={value}" for flag, value in flags.items()])


@pytest.mark.parametrize("name", ["miner", "guide"])
def test_a_helper_of_another_kind_is_named_by_its_setting(name, encoder, data, tmp_path):
    flags = {"model": encoder, "datasets": data / "datasets.yaml", "output_dir": tmp_path, "only": "pairs"}
    flags |= {"use_cpu": True, "report_to": "none", "max_steps": 1, name: encoder}
    flags |= {"negatives": 1} if name == "miner" else {}
    with pytest.raises(ValueError, match=f"`{name}` is .*no embedding model"):
        load_example("finetune_embeddings").main([f"--{flag}={value}" for flag, value in flags.items()])


def test_a_helper_with_prompts_for_a_dataset_depends_on_its_name(trained, pairs, tmp_path):
    """It reads the same rows under another name with other prompts, and finds other negatives."""
    saved = shutil.copytree(trained["dense"] / "model", tmp_path / "miner")
    prompts = json.loads((saved / "config_sentence_transformers.json").read_text())
    prompts["prompts"] |= {"known": PROMPT, "known-document": "Text: "}
    (saved / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    chosen = settings(trained, negatives=2, miner=str(saved))
    for name in ("known", "known", "other", "another"):
        mine_negatives(pairs, replace(described(PROMPT), name=name), chosen, tmp_path / "mined")
    assert len(list((tmp_path / "mined").glob("*.parquet"))) == 2

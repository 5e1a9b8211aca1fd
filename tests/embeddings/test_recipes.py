"""Recipes called from Python: on a table of pairs in memory they give what the command gives on a file."""

import pandas
import pytest
from datasets import Dataset

import neobert_hf.contextual
import neobert_hf.embeddings
from neobert_hf.embeddings.arguments import EmbeddingArguments, PairSettings
from neobert_hf.embeddings.recipe import describe_data, load_data
from tests.helpers.embedding_runs import RECIPES, SMALL, files_of, run
from tests.helpers.models import ROOT


COLUMNS = {"query": "question", "positive": "answer", "instruction": "Find the answer."}


@pytest.fixture
def rows(data) -> list[dict]:
    rows = Dataset.from_parquet(str(data / "triplets.parquet")).select_columns(["question", "answer"]).to_list()
    # Two right answers of one question.
    return [*rows, *({"question": row["question"], "answer": f"also {row['answer']}"} for row in rows[:30])]


def call(kind: str, output, **settings):
    """The recipe with the settings of a small run."""
    name, config, _ = RECIPES[kind]
    recipe = getattr(neobert_hf.contextual if kind == "contextual" else neobert_hf.embeddings, name)
    return recipe(config=ROOT / "configs" / "embeddings" / config, output_dir=output, **SMALL | settings)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_table_in_memory_gives_what_the_command_gives_on_a_file(rows, encoder, helper, tmp_path, kind):
    pandas.DataFrame(rows).to_csv(tmp_path / "pairs.csv", index=False)
    settings = {"model": encoder, "max_steps": 4, "save_steps": 4, **COLUMNS}
    if kind == "contextual":
        settings |= {"first_model": helper, "context_size": 8, "mini_batch_size": 3}
    table = {"dense": pandas.DataFrame(rows), "sparse": Dataset.from_list(rows)}.get(kind, rows)
    result = call(kind, tmp_path / "table", pairs=table, **settings)
    # An instruction of several words.
    flags = {name: value for name, value in settings.items() if name != "instruction"}
    (tmp_path / "more.yaml").write_text(
        f"extends: {ROOT / 'configs' / 'embeddings' / RECIPES[kind][1]}\ninstruction: {COLUMNS['instruction']}\n"
    )
    file = {"config": tmp_path / "more.yaml", "pairs": tmp_path / "pairs.csv", "output_dir": tmp_path / "file"}
    log = run(kind, flags | file)
    assert files_of(tmp_path / "table") == files_of(tmp_path / "file") != {}
    assert result.model == tmp_path / "table" / "model"
    # Retrieval is measured before and after training.
    evaluated = {entry["step"]: entry for entry in log if any(name.startswith("eval_") for name in entry)}
    assert set(evaluated) == {0, 4} and result.scores.keys() == result.before.keys()
    for scores, step in ((result.before, 0), (result.scores, 4)):
        assert scores and all(evaluated[step][f"eval_{name}"] == value for name, value in scores.items())


def test_the_end_says_where_the_model_is_and_how_good_beside_before(rows, encoder, tmp_path, capsys):
    result = call("dense", tmp_path / "run", model=encoder, pairs=rows, max_steps=1, save_steps=1, **COLUMNS)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "before training" in line]
    numbers = [f"{found['retrieval_cosine_ndcg@10']:.4f}" for found in (result.scores, result.before)]
    assert all(part in line for part in (str(result.model), *numbers))


def test_a_share_of_the_queries_is_held_out_with_all_their_rows(rows, encoder):
    settings = PairSettings(str(encoder), pairs=rows, **COLUMNS)
    data = describe_data(settings)
    load_data(data, settings, EmbeddingArguments("unused", bf16=False, use_cpu=True))
    trained, held_out = data.train["pairs"].rows, data.evaluation["retrieval"].rows
    assert len(set(held_out["query"])) == 20 and not set(held_out["query"]) & set(trained["query"])
    found = {(row["query"], row["positive"]) for part in (trained, held_out) for row in part}
    assert found == {(row["question"], row["answer"]) for row in rows}


def test_too_few_queries_to_hold_some_out_are_trained_on_without_a_score(rows, encoder, tmp_path, capsys):
    options = {"max_steps": 1, "save_steps": 1, "warmup_steps": 20, "per_device_train_batch_size": 4}
    result = call("dense", tmp_path / "run", model=encoder, pairs=rows[:10], **options, **COLUMNS)
    assert result.model.is_dir() and not result.scores
    said = capsys.readouterr().out
    assert "too few to hold some out" in said and "note: `warmup_steps` is 20 and the training has 1" in said


MISTAKES = [
    ({"pairs": None}, ValueError, "`pairs`.*`datasets`"),
    ({"query": "asked"}, ValueError, "'asked'.*'question'"),
    ({"positive": "question"}, ValueError, "`query` is 'question'"),
    ({"pairs": [{"question": "a", "answer": "b"}, {"question": "a"}]}, ValueError, "row 1 of the table"),
    ({"pairs": "nowhere/pairs.csv"}, FileNotFoundError, "nowhere/pairs.csv"),
    ({"pairs": 5}, TypeError, "int"),
    ({"held_out": 1.0}, ValueError, "`held_out`"),
    ({"miner": "none", "negatives": 1}, OSError, "`miner`.*none"),
    ({"temprature": 1}, TypeError, "'temperature'"),
]


@pytest.mark.parametrize("change, error, named", MISTAKES)
def test_mistakes_are_named_before_a_model_is_loaded(rows, encoder, tmp_path, monkeypatch, change, error, named):
    monkeypatch.delattr("neobert_hf.embeddings.dense.build_encoder")
    settings = {"model": encoder, "pairs": rows, "output_dir": tmp_path / "run"} | COLUMNS | change
    with pytest.raises(error, match=named):
        neobert_hf.embeddings.finetune_embeddings(**settings)
    assert not (tmp_path / "run").exists()

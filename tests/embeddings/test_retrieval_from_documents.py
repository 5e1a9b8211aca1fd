"""examples/retrieval_from_documents.py, whole, on a folder of small documents."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from neobert_hf.search.vector_index import open_index
from tests.helpers.embedding_runs import SMALL
from tests.helpers.examples import load_example, to_flags


pytest.importorskip("lancedb")
recipe = load_example("retrieval_from_documents")


@pytest.fixture
def documents(corpus, tmp_path) -> Path:
    """A folder with 40 Markdown files."""
    texts = [json.loads(line)["text"].split() for line in (corpus / "train.jsonl").read_text().splitlines()]
    texts = [words for words in texts if len(words) > 80]
    (tmp_path / "documents").mkdir()
    for number, words in enumerate(texts[:40]):
        sections = [f"## {' '.join(words[at : at + 3])}\n{' '.join(words[at + 3 : at + 33])}" for at in (0, 40)]
        loose = f"{' '.join(words[1:13]).capitalize()}. {' '.join(words[20:40]).capitalize()}."
        (tmp_path / "documents" / f"{number}.md").write_text("\n\n".join([*sections, loose]))
    return tmp_path / "documents"


@pytest.fixture
def flags(documents, encoder, tmp_path):
    """The command line of a run in tmp_path / "run", with changes."""
    training = SMALL | {"max_steps": 8, "save_steps": 8, "eval_steps": 8}
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(training))

    def build(**changes) -> list[str]:
        settings = {"documents": documents, "model": encoder, "output_dir": tmp_path / "run"}
        return to_flags(settings | {"training": tmp_path / "training.yaml", "held_out": 0.2, "negatives": 2} | changes)

    return build


def test_from_documents_to_numbers_and_an_index(flags, encoder, tmp_path, capsys):
    recipe.main(flags())
    printed, run = capsys.readouterr().out, tmp_path / "run"
    train, held_out = (Dataset.from_parquet(str(run / f"pairs{part}.parquet")) for part in ("", "_held_out"))
    assert set(train["kind"]) == {"title", "sentence"} and len(train) > 3 * len(held_out) > 15
    report = json.loads((run / "report.json").read_text())
    assert report["queries"] == len(held_out) and len(report["ndcg_at_10"]) == 6
    for name, score in report["ndcg_at_10"].items():
        assert 0 <= score <= 1 and f"  {name:<32}{score:.3f}\n" in printed
    before, alone, hard, _, *both = report["ndcg_at_10"].values()
    models = {encoder: before, run / "pairs_alone" / "model": alone, run / "hard_negatives" / "model": hard}
    assert open_index(str(run / "index")).identity["model"] == str(max(models, key=models.get))
    mined = Dataset.from_parquet(str(next((run / "hard_negatives" / "mined").iterdir())))
    assert any(mined["negatives"]) and set(mined["query"]) == set(train["query"])

    # The command at the end works as it is printed.
    command = printed.strip().splitlines()[-1]
    program, script, *words = shlex.split(command)
    assert (program, script) == ("python", "examples/semantic_search.py")
    best = max((max(models.values()), 0), *zip(both, (0.5, 2)), key=lambda found: found[0])[1]
    assert command.endswith(f" --keyword_weight {best}") if best else "--keyword_weight" not in command
    load_example("semantic_search").main([*words, "--device", "cpu"])
    assert ".md [" in capsys.readouterr().out


BAD_SETTINGS = [
    ({"training": "none.yaml"}, "none.yaml"),
    ({"documents": "./nowhere"}, "nowhere"),
    ({"model": "runs/small/model"}, "`model`.*runs/small/model"),
]


@pytest.mark.parametrize("changes, message", BAD_SETTINGS)
def test_bad_settings_are_refused_before_anything_is_written(flags, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        recipe.main(flags(**changes))
    assert not (tmp_path / "run").exists()

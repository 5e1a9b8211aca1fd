"""The recipe `retrieval_from_documents`, whole, on a folder of small documents."""

import json
import shlex
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import yaml
from datasets import Dataset

from neobert_hf.search import own_documents
from neobert_hf.search.recipe import query
from neobert_hf.search.vector_index import open_index
from tests.helpers.embedding_runs import SMALL
from tests.helpers.examples import load_example, to_flags
from tests.helpers.models import save_encoder
from tests.helpers.small_tokenizer import word_tokenizer


pytest.importorskip("lancedb")
recipe = load_example("retrieval_from_documents")


TEXTS = [" ".join(text.split()) for _, text in sorted(topics.items())]
TEXTS = [text[start : start + 600] for text in TEXTS for start in range(0, len(text), 600)][:500]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    tokenizer = word_tokenizer("\n".join(TEXTS).lower(), 600, 128)
    return save_encoder(tmp_path_factory.mktemp("encoder"), tokenizer)


@pytest.fixture
def documents(tmp_path) -> Path:
    """A folder with 40 Markdown files."""
    texts = [words for text in TEXTS if len(words := text.split()) > 80]
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
    result = recipe.main(flags())
    printed, run = capsys.readouterr().out, tmp_path / "run"
    train, held_out = (Dataset.from_parquet(str(run / f"pairs{part}.parquet")) for part in ("", "_held_out"))
    assert set(train["kind"]) == {"title", "sentence"} and len(train) > 3 * len(held_out) > 15
    report = json.loads((run / "report.json").read_text())
    assert report["queries"] == len(held_out) and len(report["ndcg_at_10"]) == 6
    for name, score in report["ndcg_at_10"].items():
        assert 0 <= score <= 1 and f"  {name:<32}{score:.3f}\n" in printed
    before, alone, hard, words, *both = report["ndcg_at_10"].values()
    models = {encoder: before, run / "pairs_alone" / "model": alone, run / "hard_negatives" / "model": hard}
    assert open_index(str(run / "index")).identity["model"] == str(max(models, key=models.get))
    assert (result.model, result.output) == (max(models, key=models.get), run / "index")
    found = [result.scores, result.before, result.baseline]
    assert found == [{"ndcg_at_10": score} for score in (max(models.values()), before, words)]
    mined = Dataset.from_parquet(str(next((run / "hard_negatives" / "mined").iterdir())))
    assert any(mined["negatives"]) and set(mined["query"]) == set(train["query"])

    # The command at the end works as it is printed.
    program, command, *words = shlex.split(printed.strip().splitlines()[-1])
    assert (program, command) == ("neobert-hf", "query")
    best = max((max(models.values()), 0), *zip(both, (0.5, 2)), key=lambda found: found[0])[1]
    assert words[-2:] == ["--keyword_weight", str(best)] if best else "--keyword_weight" not in words
    query.main([*words, "--device", "cpu"])
    assert ".md [" in capsys.readouterr().out


def test_a_table_gives_the_numbers_of_its_file_and_a_stopped_run_goes_on(
    documents, flags, encoder, tmp_path, monkeypatch
):
    """Stopped before its index, from Python; the same call goes on."""
    rows = [{"path": file.name, "text": file.read_text()} for file in sorted(documents.iterdir())]
    settings = {"model": encoder, "training": tmp_path / "training.yaml", "held_out": 0.2, "negatives": 2}
    settings |= {"documents": rows, "id_column": "path", "output_dir": tmp_path / "table"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own_documents, "index_documents", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        recipe(**settings)
    checkpoint = tmp_path / "table" / "hard_negatives" / "checkpoint-8" / "complete.json"
    written = checkpoint.stat().st_mtime_ns
    result = recipe(**settings)
    assert checkpoint.stat().st_mtime_ns == written
    by_command = recipe.main(flags())
    assert (result.scores, result.before, result.baseline) == (
        by_command.scores,
        by_command.before,
        by_command.baseline,
    )
    assert open_index(str(result.output)).sources() == ["documents"]


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

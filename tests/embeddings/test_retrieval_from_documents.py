"""examples/retrieval_from_documents.py, whole, on a folder of small documents."""

import contextlib
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.search.index import open_index
from tests.helpers.embedding_runs import SMALL
from tests.helpers.examples import load_example


pytest.importorskip("lancedb")
recipe = load_example("retrieval_from_documents")


@pytest.fixture(scope="module")
def material(corpus, tmp_path_factory) -> Path:
    """A folder with 40 Markdown files in `documents`, and `training.yaml`: a few steps."""
    folder = tmp_path_factory.mktemp("material")
    texts = [json.loads(line)["text"].split() for line in (corpus / "train.jsonl").read_text().splitlines()]
    texts = [words for words in texts if len(words) > 80]
    (folder / "documents").mkdir()
    for number, words in enumerate(texts[:40]):
        sections = [f"## {' '.join(words[at : at + 3])}\n{' '.join(words[at + 3 : at + 33])}" for at in (0, 40)]
        loose = f"{' '.join(words[1:13]).capitalize()}. {' '.join(words[20:40]).capitalize()}."
        (folder / "documents" / f"{number}.md").write_text("\n\n".join([*sections, loose]))
    (folder / "training.yaml").write_text(yaml.safe_dump(SMALL | {"max_steps": 8, "save_steps": 8, "eval_steps": 8}))
    return folder


@pytest.fixture(scope="module")
def flags(material, encoder):
    def build(output: Path, **changes) -> list[str]:
        settings = {"documents": material / "documents", "model": encoder, "output_dir": output}
        settings |= {"training": material / "training.yaml", "held_out": 0.2, "negatives": 2} | changes
        return [word for name, value in settings.items() for word in (f"--{name}", str(value))]

    return build


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> Path:
    """A run that nothing interrupted, with what it printed beside it in `printed.txt`."""
    folder = tmp_path_factory.mktemp("whole")
    with open(folder / "printed.txt", "w") as file, contextlib.redirect_stdout(file):
        recipe.main(flags(folder / "run"))
    return folder / "run"


def test_from_documents_to_numbers_and_an_index(whole, material, encoder, capsys):
    printed = (whole.parent / "printed.txt").read_text()
    assert all(f"\n{step}. " in "\n" + printed for step in range(1, 7))
    train, held_out = (Dataset.from_parquet(str(whole / f"pairs{part}.parquet")) for part in ("", "_held_out"))
    assert set(train["kind"]) == {"title", "sentence"} and len(train) > 3 * len(held_out) > 15
    # No document has pairs on both sides.
    files = {file: " ".join(file.read_text().split()) for file in (material / "documents").iterdir()}
    sides = [{f for f, text in files.items() for p in part["positive"] if p in text} for part in (train, held_out)]
    assert sides[0] and sides[1] and sides[0].isdisjoint(sides[1])
    report = json.loads((whole / "report.json").read_text())
    assert report["queries"] == len(held_out) and len(report["ndcg_at_10"]) == 6
    for name, score in report["ndcg_at_10"].items():
        assert 0 <= score <= 1 and f"  {name:<32}{score:.3f}\n" in printed
    before, alone, hard, _, *both = report["ndcg_at_10"].values()
    models = {encoder: before, whole / "pairs_alone" / "model": alone, whole / "hard_negatives" / "model": hard}
    assert open_index(str(whole / "index")).identity["model"] == str(max(models, key=models.get))
    mined = Dataset.from_parquet(str(next((whole / "hard_negatives" / "mined").iterdir())))
    assert any(mined["negatives"]) and set(mined["query"]) == set(train["query"])

    # The command at the end works as it is printed.
    command = printed.strip().splitlines()[-1]
    assert printed.strip().splitlines()[-2] == "Ask it:"
    program, script, *words = shlex.split(command)
    assert (program, script) == ("python", "examples/semantic_search.py")
    best = max((max(models.values()), 0), *zip(both, (0.5, 2)), key=lambda found: found[0])[1]
    assert command.endswith(f" --keyword_weight {best}") if best else "--keyword_weight" not in command
    load_example("semantic_search").main([*words, "--device", "cpu"])
    assert ".md [" in capsys.readouterr().out


def test_other_documents_are_noticed(flags, material, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(material / "documents", tmp_path / "more")
    text = "# Another title of words\n\n" + "Some more words of a document that is new here. " * 3
    (tmp_path / "more" / "x.md").write_text(text)
    with pytest.raises(SettingsMismatch, match="other settings:\n  dataset: "):
        recipe.main(flags(tmp_path / "run", documents=tmp_path / "more"))


BAD_SETTINGS = [
    ({"training": "none.yaml"}, "none.yaml"),
    ({"documents": "./nowhere"}, "nowhere"),
    ({"model": "runs/small/model"}, "`model`.*runs/small/model"),
]


@pytest.mark.parametrize("changes, message", BAD_SETTINGS)
def test_bad_settings_are_refused_before_anything_is_written(flags, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        recipe.main(flags(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()

"""The recipe `retrieval_from_documents`, whole, on a folder of small documents."""

import json
import re
import shlex
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from neobert_hf.common.fingerprints import file_checksum, weights_fingerprint
from neobert_hf.distillation import distil
from neobert_hf.embeddings.space import check_student
from neobert_hf.search import own_documents
from neobert_hf.search.recipe import query
from neobert_hf.search.vector_index import open_index
from tests.helpers.embedding_runs import SMALL
from tests.helpers.examples import load_example, to_flags
from tests.helpers.models import ROOT, save_encoder
from tests.helpers.small_tokenizer import word_tokenizer


pytest.importorskip("lancedb")
recipe = load_example("retrieval_from_documents")
DISTILLED = ROOT / "models" / "distilled"


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
    training = SMALL | {"max_steps": 8, "save_steps": 8, "eval_strategy": "no"}
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(training))

    def build(**changes) -> list[str]:
        settings = {"documents": documents, "model": encoder, "output_dir": tmp_path / "run"}
        return to_flags(settings | {"training": tmp_path / "training.yaml"} | changes)

    return build


def checksums(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file_checksum(file) for file in folder.rglob("*") if file.is_file()}


def test_from_documents_to_numbers_and_an_index(flags, encoder, tmp_path, capsys, monkeypatch):
    """Any gain is taken for one, so that the mean of the weights before and after is indexed."""
    monkeypatch.setattr(own_documents, "STANDARD_ERRORS", -1e9)
    result = recipe.main(flags())
    printed, run = capsys.readouterr().out, tmp_path / "run"
    train, held_out = (Dataset.from_parquet(str(run / f"pairs{part}.parquet")) for part in ("", "_held_out"))
    assert set(train["kind"]) == {"title", "sentence"} and len(train) > 3 * len(held_out) > 15
    report = json.loads((run / "report.json").read_text())
    assert report["queries"] == len(held_out) and report["texts"] > len(train)
    for name, scores in report["models"].items():
        alone, both = scores.values()
        assert 0 <= min(alone, both) and max(alone, both) <= 1
        assert re.search(rf"^  {name} +{alone:.3f}  {both:.3f}$", printed, re.MULTILINE)
    before, after = report["models"].values()
    assert (result.before, result.scores, result.baseline) == (before, after, {"ndcg_at_10": report["bm25"]})
    assert before != after and (result.model, result.output) == (run / "half", run / "index")
    assert open_index(str(run / "index")).identity["model"] == str(result.model)
    weights = {
        name: load_file(folder / "model.safetensors")
        for name, folder in {"before": encoder, "trained": run / "trained/model", "half": run / "half"}.items()
    }
    for name, half in weights["half"].items():
        mean = (weights["before"][f"model.{name}"] + weights["trained"][name]) / 2
        assert half.numpy() == pytest.approx(mean.numpy(), abs=1e-6)

    # The command at the end works as it is printed.
    program, command, *words = shlex.split(printed.strip().splitlines()[-1])
    assert (program, command) == ("neobert-hf", "query")
    query.main([*words, "--device", "cpu"])
    assert ".md [" in capsys.readouterr().out


def test_a_model_that_training_makes_worse_is_left_as_it_was(flags, documents, tmp_path, capsys):
    model, before = tmp_path / "model", checksums(DISTILLED)
    shutil.copytree(DISTILLED, model)
    ruinous = SMALL | {"max_steps": 2, "learning_rate": 1.0, "eval_strategy": "no", "save_strategy": "no"}
    (tmp_path / "ruinous.yaml").write_text(yaml.safe_dump(ruinous))
    result = recipe.main(flags(model=model, training=tmp_path / "ruinous.yaml"))
    assert "left as it was" in capsys.readouterr().out
    _, after = json.loads((tmp_path / "run" / "report.json").read_text())["models"].values()
    assert after["ndcg_at_10_with_words"] < 0.9 * min(result.before.values())
    assert result.model == model and result.scores == result.before and checksums(model) == before
    assert open_index(str(result.output)).identity["model"] == str(model)
    assert not (tmp_path / "run" / "half").exists()


def test_with_a_teacher_a_model_comes_nearer_to_it_and_stays_in_its_space(documents, encoder, tmp_path):
    """A student as it begins; then one that cannot come nearer, which is left as it was."""
    teacher, sizes = tmp_path / "teacher", {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 24}
    SentenceTransformer(str(encoder), device="cpu").save(str(teacher), create_model_card=False)
    untrained = {"max_steps": 1, "learning_rate": 0, "embedding_learning_rate": 0, "use_cpu": True}
    student = distil(teacher=teacher, texts=documents, output_dir=tmp_path / "student", **sizes, **untrained).model
    rates = {"embedding_learning_rate": 1e-2, "learning_rate": 1e-2}
    for name, changes in (("run", rates), ("none", dict.fromkeys(rates, 0))):
        training = {"per_device_train_batch_size": 16, "warmup_steps": 2, "nearest_texts": 8} | changes
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(training))
        settings = {"documents": documents, "model": student, "teacher": teacher, "max_steps": 20}
        result = recipe(**settings, training=tmp_path / f"{name}.yaml", output_dir=tmp_path / name)
        learned = name == "run"
        assert result.model == (tmp_path / "run/trained/model" if learned else student)
        assert (result.scores != result.before) == learned
        check_student(str(result.model), {"weights": weights_fingerprint(teacher)}, "the index")
        log = json.loads((tmp_path / name / "trained" / "log.json").read_text())
        first, *_, last = (entry["eval_cosine"] for entry in log if "eval_cosine" in entry)
        assert (last > first + 0.01) == learned


@pytest.mark.parametrize(("gain", "spread", "helped"), [(0.2, 0.5, True), (0.2, 2, False), (-0.2, 0, False)])
def test_a_gain_that_may_be_chance_is_none(gain, spread, helped):
    """Of 100 queries, whose standard error is a tenth of the spread of the logarithms of their ranks."""
    before, noise = np.full(100, 5.0), np.tile([-spread, spread], 50)
    found = {"before": before, "after": before - gain + noise}
    ranks = {name: {"alone": 2**each, "with_words": 2**each} for name, each in found.items()}
    assert own_documents.finds_more(ranks)[0] == helped


def test_a_table_gives_the_numbers_of_its_file_and_a_stopped_run_goes_on(
    documents, flags, encoder, tmp_path, monkeypatch
):
    """Stopped before its index, from Python; the same call goes on."""
    rows = [{"path": file.name, "text": file.read_text()} for file in sorted(documents.iterdir())]
    settings = {"model": encoder, "training": tmp_path / "training.yaml"}
    settings |= {"documents": rows, "id_column": "path", "output_dir": tmp_path / "table"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(own_documents, "index_documents", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        recipe(**settings)
    checkpoint = tmp_path / "table" / "trained" / "checkpoint-8" / "complete.json"
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

"""examples/run_mteb.py on local data: the scores, what is done again, and what is not taken for this run."""

import shutil
from pathlib import Path

import mteb
import pytest
import yaml
from sentence_transformers import SentenceTransformer

from neobert_hf.common.paths import name_of_model
from neobert_hf.common.run import SettingsMismatch
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.local_tasks import TYPES, read_local_tasks
from tests.helpers.mteb_tasks import INSTRUCTIONS, results_of, run_local, run_mteb, save_model, write_rows


@pytest.fixture
def copied(evaluated, tmp_path) -> Path:
    return shutil.copytree(evaluated, tmp_path / "copied")


def test_every_local_type_is_evaluated_with_the_scores_of_mteb_itself(local, models, copied):
    before = results_of(copied)["m"]
    found = run_local(local, models[1], copied, "--batch_size", "7")
    assert found["m"] == before and {each["type"] for each in before.values()} == set(TYPES)
    # Chance is below 0.1 (48 documents), 0.46 (5 candidates) and about 0.5.
    for task, least in (("Search", 0.35), ("Rerank", 0.6), ("Pairs", 0.8)):
        assert before[task]["score"] > least
    for task in ("Search", "Similarity", "Topics", "Clusters"):
        assert before[task]["score"] != found["same_name"][task]["score"], task
    report = (copied / "report.md").read_text()
    assert all(name in report for name in [*before, "ndcg_at_10", *found])
    # Its own wrapper, where there are no instructions to differ in.
    tasks = [task for task in read_local_tasks(local / "tasks.yaml")[0] if task.metadata.name in ("Topics", "Pairs")]
    for result in mteb.evaluate(SentenceTransformer(models[0], device="cpu"), tasks, cache=None).task_results:
        assert before[result.task_name]["score"] == pytest.approx(result.get_score(), abs=1e-5)


def test_called_with_the_names_of_settings_it_gives_what_the_command_gives(local, models, evaluated, tmp_path):
    settings = {"model": models[0], "name": "m", "local_tasks": local / "tasks.yaml", "output_dir": tmp_path / "out"}
    result = run_mteb(**settings, tasks=["Pairs", "STS"])
    expected = results_of(evaluated)["m"]
    assert results_of(tmp_path / "out") == {"m": {name: expected[name] for name in ("Pairs", "Similarity")}}
    assert result.scores == {
        "Pairs": {"max_ap": expected["Pairs"]["score"]},
        "Similarity": {"cosine_spearman": expected["Similarity"]["score"]},
    }
    assert result.output.read_text().startswith("# MTEB")


def test_only_tasks_without_a_result_are_evaluated_wherever_model_and_data_are(local, models, copied, monkeypatch):
    """Interrupted, a file half written. A model without a `name` is called by the last part of its path."""
    expected = results_of(copied)["m"]
    (copied / "m").rename(copied / "same_name")
    for name in ("Rerank", "Similarity", "Pairs"):
        (copied / "same_name" / f"{name}.json").unlink()
    (copied / "same_name" / "Rerank.json.7.partial").write_text('{"task": "Re')
    model = shutil.copytree(models[0], copied.parent / "moved" / "same_name" / "model")
    data = shutil.copytree(local, copied.parent / "data")
    encoded, encode = set(), InstructionEncoder.encode

    def record(self, inputs, *, task_metadata, **kwargs):
        encoded.add(task_metadata.name)
        return encode(self, inputs, task_metadata=task_metadata, **kwargs)

    monkeypatch.setattr(InstructionEncoder, "encode", record)
    assert run_local(data, str(model), copied) == {"same_name": expected}
    assert encoded == {"Rerank", "Similarity", "Pairs"}
    assert name_of_model(None, "chandar-lab/NeoBERT") == "NeoBERT"
    with pytest.raises(ValueError, match="name"):
        name_of_model("a/b", "m")


@pytest.mark.parametrize(
    "name, value, found",
    [
        ("dtype", "bfloat16", "dtype"),
        ("max_length", "8", "max_length"),
        ("truncate_dim", "32", "truncate_dim"),
        ("separator", "special_tokens", "prompts.text"),
    ],
)
def test_results_of_other_settings_are_refused_by_name(local, models, evaluated, name, value, found):
    with pytest.raises(SettingsMismatch, match=f"\\n  {found}: "):
        run_local(local, models[0], evaluated, "--name", "m", "--tasks", "Similarity", f"--{name}", value)


def test_a_length_that_leaves_nothing_of_a_text_is_refused(local, models, tmp_path):
    for length in ("0", "2"):
        with pytest.raises(ValueError, match=f"`max_length` is {length}"):
            run_local(local, models[0], tmp_path, "--max_length", length)


def test_results_of_other_weights_or_data_are_refused(local, models, copied, tmp_path):
    (copied / "m" / "Search.json").unlink()
    # Nor may other tasks of another model stand in the same row.
    for task in ("Pairs", "Search"):
        with pytest.raises(SettingsMismatch, match="\n  model: "):
            run_local(local, models[1], copied, "--name", "m", "--tasks", task)
    assert not (copied / "m" / "Search.json").exists()
    data = shutil.copytree(local, tmp_path / "data")
    # The same number of bytes.
    (data / "pairs.jsonl").write_text((data / "pairs.jsonl").read_text().replace("cat", "dog"))
    with pytest.raises(SettingsMismatch, match="\n  dataset: "):
        run_local(data, models[0], copied, "--name", "m", "--tasks", "Pairs")


def test_a_task_that_fails_does_not_stop_the_others_and_nan_is_no_result(local, models, tmp_path):
    """Equal similarities have no correlation with anything; states beyond float16 give no embeddings."""
    rows = {"sentence1": ["a cat"] * 5, "sentence2": ["the dog"] * 5, "score": [0.0, 1.0, 2.0, 3.0, 4.0]}
    write_rows(tmp_path / "constant.jsonl", **rows)
    tasks = {"Constant": {"type": "STS", "data": "constant.jsonl"}}
    tasks["Pairs"] = {"type": "PairClassification", "data": str(local / "pairs.jsonl")}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump(tasks, sort_keys=False))
    with pytest.raises(RuntimeError, match="1 of 2 tasks failed.*:\n  Constant: FloatingPointError: .*nan"):
        run_local(tmp_path, models[0], tmp_path / "out", "--name", "m")
    assert [file.name for file in (tmp_path / "out" / "m").rglob("*.json")] == ["Pairs.json"]
    assert "Pairs" in (tmp_path / "out" / "report.md").read_text()

    folder = save_model(tmp_path / "model", 1)
    backbone = SentenceTransformer(folder, device="cpu")[0].auto_model
    backbone.layer_norm.weight.data.fill_(6e4)
    backbone.save_pretrained(folder)
    with pytest.raises(RuntimeError, match="embeddings are not finite.*Set `dtype` to float32"):
        run_local(local, folder, tmp_path / "float16", "--tasks", "Pairs", "--dtype", "float16")
    assert not list((tmp_path / "float16").rglob("Pairs.json"))


FIRST = ["--benchmark", "MTEB(eng, v1)"]


@pytest.mark.parametrize(
    "flags, instructions, message",
    [
        ([*FIRST, "--tasks", "STS-12"], INSTRUCTIONS, "STS-12.*STS12"),
        (["--local_tasks", "tasks.yaml"], INSTRUCTIONS, "`instructions`.*`benchmark`"),
        ([], INSTRUCTIONS, "`benchmark`, `local_tasks`"),
        (["--benchmark", "NanoBIER"], INSTRUCTIONS, "`benchmark`.*'NanoBIER'.*NanoBEIR"),
        (FIRST, INSTRUCTIONS | {"STS12": None}, "i.yaml: STS12"),
        (FIRST, INSTRUCTIONS | {"STS-12": "x"}, "'STS-12'.*'STS12'"),
        (FIRST, {"STS12": "Find."}, "i.yaml has no instruction for .*NQ"),
    ],
)
def test_wrong_settings_and_instructions_are_refused_before_anything_is_loaded(tmp_path, flags, instructions, message):
    (tmp_path / "i.yaml").write_text(yaml.safe_dump(instructions))
    flags = [*flags, "--instructions", str(tmp_path / "i.yaml"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=message):
        run_mteb.main(["--model", "no/such/model", *flags])
    assert not (tmp_path / "out").exists()

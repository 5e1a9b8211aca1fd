"""examples/run_glue.py on small data in GLUE's form: what it trains, reports and refuses, and that it resumes."""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, Value
from safetensors.torch import load_file, save_file
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
)

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.common.results import ResultError
from neobert_hf.evaluation.glue.report import collect
from neobert_hf.evaluation.glue.runs import Results
from neobert_hf.evaluation.glue.tasks import load_task, read_tasks
from neobert_hf.evaluation.glue.trainer import build_classifier
from neobert_hf.training.run_checkpoints import CheckpointError, Progress, complete_checkpoints, mark_complete
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import ENCODERS, save_other_encoder


run_glue = load_example("run_glue")


TASKS = read_tasks(str(ROOT / "configs" / "glue" / "tasks.yaml"))
SMALL = {
    "task_config": ROOT / "configs" / "glue" / "tasks.yaml",
    "published": ROOT / "configs" / "glue" / "table3.yaml",
    "name": "small",
    "max_length": 32,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
    "eval_steps": 10,
    "use_cpu": True,
}
GRID = {
    "grid": True,
    "num_train_epochs": 2,
    "per_device_train_batch_size": None,
    "learning_rate": None,
    "weight_decay": None,
    "batch_sizes": "8 16",
    "learning_rates": "0.003 0.0001",
    "weight_decays": "0.01",
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Such small models lose time with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return AutoTokenizer.from_pretrained(prepared / "tokenizer")


def save_encoder(folder: Path, tokenizer, seed: int = 0, hidden_size: int = 32) -> Path:
    """With dropout, so that a resume has to restore its generator."""
    torch.manual_seed(seed)
    config = NeoBERTConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_length=64,
        dropout=0.1,
        decoder_init_range=0.2,
        embedding_init_range=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    NeoBERTForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), tokenizer)


# How a second sentence begins tells its relation to the first, in MNLI and, the same way, in RTE.
RELATIONS = ("the", "a class", "if not")


@pytest.fixture(scope="module")
def rows(prepared) -> dict[str, dict[str, list[dict]]]:
    """Rows of four tasks by split, in the Hub's column names."""
    lines = (prepared / "train.jsonl").read_text().splitlines()
    words = [text.split() for line in lines if len((text := json.loads(line)["text"]).split()) > 40]
    texts = [" ".join(w[start : start + 6]) for w in words for start in (0, 6, 12, 18)]
    draw = random.Random(0)

    def pairs(number, first, second, labels):
        drawn = [(draw.choice(texts), draw.choice(texts), draw.choice(labels)) for _ in range(number)]
        return [{first: one, second: f"{RELATIONS[label]} {two}", "label": label} for one, two, label in drawn]

    def sentences(number):
        return [{"sentence": f"{RELATIONS[i % 2]} {draw.choice(texts)}", "label": i % 2} for i in range(number)]

    def similar(number):
        scores = [draw.choice([0.0, 1.5, 3.0, 5.0]) for _ in range(number)]
        return [
            {
                "sentence1": draw.choice(texts),
                "sentence2": " ".join(["class"] * int(score) + ["object"]),
                "label": score,
            }
            for score in scores
        ]

    rte = {"train": 160, "validation": 30}
    return {
        "mnli": {
            split: pairs(number, "premise", "hypothesis", [0, 1, 2])
            for split, number in {"train": 240, "validation_matched": 30, "validation_mismatched": 20}.items()
        },
        # Of the labels 0 and 2 of MNLI, the latter as 1.
        "rte": {
            split: [row | {"label": row["label"] // 2} for row in pairs(number, "sentence1", "sentence2", [0, 2])]
            for split, number in rte.items()
        },
        "sst2": {"train": sentences(160), "validation": sentences(30)},
        "stsb": {"train": similar(160), "validation": similar(30)},
    }


@pytest.fixture(scope="module")
def data_dir(rows, tmp_path_factory) -> Path:
    """As on the Hub: Parquet with named labels, of one task in two files; and JSON lines."""
    folder = tmp_path_factory.mktemp("glue")
    for task, splits in rows.items():
        (folder / task).mkdir()
        for split, part in splits.items():
            if task == "sst2":
                (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
                continue
            label = ClassLabel(names=TASKS[task].labels) if TASKS[task].labels else Value("float32")
            features = Features({name: Value("string") for name in TASKS[task].texts} | {"label": label})
            table = Dataset.from_list(part, features=features)
            if split == "train":
                table.select(range(100)).to_parquet(folder / task / "train-00000-of-00002.parquet")
                table.select(range(100, len(part))).to_parquet(folder / task / "train-00001-of-00002.parquet")
            else:
                table.to_parquet(folder / task / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def flags(data_dir, encoder):
    """The command line of a run in `output_dir`, with changes."""

    def build(output_dir, **changes) -> list[str]:
        settings = {"output_dir": output_dir, "model": encoder, "data_dir": data_dir, "task": "sst2"}
        return [
            word
            for name, value in (settings | SMALL | changes).items()
            if value is not None
            for word in (f"--{name}", *str(value).split())
        ]

    return build


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory) -> Path:
    """Four tasks with transfer, two seeds each."""
    folder = tmp_path_factory.mktemp("finished")
    run_glue.main(flags(folder, task="stsb rte sst2 mnli", seeds="0 1"))
    return folder


def results_of(folder: Path) -> dict[str, dict]:
    """By run, without the seconds."""
    files = sorted((folder / "small").glob("*/*.json"))
    results = {str(file.relative_to(folder / "small"))[:-5]: json.loads(file.read_text()) for file in files}
    return {name: {key: value for key, value in result.items() if key != "seconds"} for name, result in results.items()}


def best_of(folder: Path, task: str) -> dict:
    return Results(folder / "small").of_task(task)[0]


def model_folder(folder: Path, task: str) -> Path:
    return folder / "small" / best_of(folder, task)["run"] / "model"


def test_tasks_run_in_dependency_order_and_learn(finished):
    results = results_of(finished)
    assert len(results) == 8
    times = {name: (finished / "small" / f"{name}.json").stat().st_mtime_ns for name in results}
    assert max(times[name] for name in times if name.startswith("mnli")) < min(
        times[name] for name in times if name.startswith(("rte", "stsb"))
    )
    chance = {"mnli": 0.34, "rte": 0.5, "sst2": 0.5, "stsb": 0.0}
    for name, result in results.items():
        assert result["score"] > chance[result["task"]] + 0.25, name
        assert result["score"] == max(entry["score"] for entry in result["evaluations"])
        steps = [entry["step"] for entry in result["evaluations"]]
        assert steps == list(range(10, 3 * result["settings"]["rows"]["train"] // 8 + 1, 10))


def predictions_of(folder: Path, data_dir: Path, task: str, split: str) -> tuple[list, list]:
    """With Transformers alone, from the saved model."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    part = load_task(TASKS[task], str(data_dir))[split]
    texts = [part[column][:] for column in part.column_names if column != "label"]
    with torch.no_grad():
        inputs = tokenizer(*texts, padding=True, truncation=True, max_length=32, return_tensors="pt")
        logits = model(**inputs).logits
    return (logits.argmax(-1) if TASKS[task].labels else logits[:, 0].double()).tolist(), part["label"][:]


def test_results_are_those_of_the_saved_models(finished, data_dir):
    best = {task: best_of(finished, task)["metrics"] for task in ("mnli", "sst2", "stsb")}
    accuracies = []
    for split in ("validation_matched", "validation_mismatched"):
        predicted, labels = predictions_of(model_folder(finished, "mnli"), data_dir, "mnli", split)
        accuracies.append(accuracy_score(labels, predicted))
        assert best["mnli"][f"{split}_accuracy"] == accuracies[-1]
    assert best_of(finished, "mnli")["score"] == statistics.mean(accuracies)
    predicted, labels = predictions_of(model_folder(finished, "sst2"), data_dir, "sst2", "validation")
    assert best["sst2"] == {"accuracy": accuracy_score(labels, predicted)}
    predicted, labels = predictions_of(model_folder(finished, "stsb"), data_dir, "stsb", "validation")
    # Other batches, in float32.
    assert best["stsb"]["pearson"] == pytest.approx(pearsonr(predicted, labels).statistic, abs=1e-5)
    assert best["stsb"]["spearmanr"] == pytest.approx(spearmanr(predicted, labels).statistic, abs=1e-2)
    both = statistics.mean(best["stsb"].values())
    assert best_of(finished, "stsb")["score"] == pytest.approx(both, abs=1e-12)


def test_transfer_takes_the_best_backbone_and_a_new_head(finished, flags, encoder, tmp_path):
    source = best_of(finished, "mnli")
    for name, result in results_of(finished).items():
        assert result["settings"]["start"] == (source["run"] if name.startswith(("rte", "stsb")) else str(encoder))
    mnli = model_folder(finished, "mnli")
    for task, labels in (("rte", 2), ("stsb", 1)):
        torch.manual_seed(0)
        model = build_classifier(str(encoder), TASKS[task], 0.1, [mnli])
        stored, state = load_file(mnli / "model.safetensors"), model.state_dict()
        for key, weight in state.items():
            same = weight.shape == stored[key].shape and torch.equal(weight, stored[key])
            # Biases of a new head are zero, and might be in the old one.
            assert same == key.startswith("model.") or "bias" in key, key
        assert state["classifier.weight"].shape[0] == labels and model.config.num_labels == labels
    # One model a task is kept, and no checkpoint.
    assert len(list((finished / "small" / "mnli").glob("*/model"))) == 1
    assert not list(finished.rglob("checkpoint-*")) and not list(finished.rglob("*.partial"))
    # Without MNLI's model in reach, nothing is trained unless it is switched off.
    with pytest.raises(CheckpointError, match="small/mnli holds no result.*--task mnli"):
        run_glue.main(flags(tmp_path, task="rte"))
    run_glue.main(flags(tmp_path, task="rte", transfer=False, max_steps=2))
    assert best_of(tmp_path, "rte")["settings"]["start"] == str(encoder)


def test_the_report_has_the_papers_columns_and_rows(finished):
    text, content = (finished / "report.md").read_text(), json.loads((finished / "report.json").read_text())
    lines = text.splitlines()
    assert lines[2] == "| Model | MNLI | QNLI | QQP | RTE | SST | MRPC | CoLA | STS | Avg. |"
    assert "| NeoBERT 4096 (paper) | 89.0 | 93.7 | 90.7 | 91.3 | 95.6 | 93.4 | 66.2 | 91.8 | 89.0 |" in lines
    tasks, results = content["models"]["small"], results_of(finished)
    for task, entry in tasks.items():
        scores = [100 * result["score"] for result in results.values() if result["task"] == task]
        assert entry["score"] == pytest.approx(statistics.mean(scores), abs=1e-9) and entry["seeds"] == 2
        assert entry["std"] == pytest.approx(statistics.stdev(scores), abs=1e-9)
    cells = [f"{tasks[task]['score']:.1f} ± {tasks[task]['std']:.1f}" for task in ("mnli", "rte", "sst2", "stsb")]
    average = statistics.mean(tasks[task]["score"] for task in tasks)
    row = f"| **small** | {cells[0]} | - | - | {cells[1]} | {cells[2]} | - | - | {cells[3]} | {average:.1f} [4] |"
    assert row in lines
    assert (finished / "small" / "learning_rates.png").stat().st_size > 10_000


def test_finished_runs_are_not_repeated_and_other_settings_are_refused(finished, flags, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "copy").rglob("*seed*.json")}
    run_glue.main(flags(tmp_path / "copy", task="mnli rte stsb sst2", seeds="0 1"))
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "copy").rglob("*seed*.json")}
    with pytest.raises(ResultError, match="(?s)other settings.*max_length: 32 there, 16 now"):
        run_glue.main(flags(tmp_path / "copy", max_length=16))
    # Also of a further seed: the report would take their mean.
    with pytest.raises(ResultError, match="(?s)sst2/bs8.*seed0.json.*schedule: .*'max_steps': -1,.*'max_steps': 2,"):
        run_glue.main(flags(tmp_path / "copy", seeds=7, max_steps=2))
    # And if two shards were started with different settings at the same time.
    file = next((tmp_path / "copy" / "small" / "sst2").glob("*seed1.json"))
    result = json.loads(file.read_text())
    file.write_text(json.dumps(result | {"settings": result["settings"] | {"max_length": 16}}))
    with pytest.raises(ResultError, match="(?s)seed1.json is the result of other settings.*max_length: 16 there"):
        collect(tmp_path / "copy")


def test_other_weights_or_data_in_the_same_place_are_refused(flags, data_dir, tokenizer, tmp_path):
    changes = {"model": save_encoder(tmp_path / "encoder", tokenizer), "max_steps": 2}
    changes["data_dir"] = edit(data_dir, tmp_path, lambda rows: rows)
    run_glue.main(flags(tmp_path / "run", **changes))
    file = changes["data_dir"] / "sst2" / "validation.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"label": 1', '"label": 0', 1))
    with pytest.raises(ResultError, match="(?s)other settings:\n  data: .*there, .*now\nGive"):
        run_glue.main(flags(tmp_path / "run", **changes))
    file.write_text(text)
    save_encoder(changes["model"], tokenizer, seed=1)
    with pytest.raises(ResultError, match="(?s)other settings:\n  weights: .*there, .*now\nGive"):
        run_glue.main(flags(tmp_path / "run", **changes))


def test_a_better_source_leaves_finished_runs_as_they_are(finished, flags, encoder, tokenizer, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    best = best_of(finished, "mnli")
    name = best["run"].replace(f"seed{best['seed']}", "seed2")
    (tmp_path / "copy" / "small" / f"{name}.json").write_text(json.dumps(best | {"run": name, "score": 1.0}))
    # It has no model, and is not asked for one.
    run_glue.main(flags(tmp_path / "copy", task="rte stsb", seeds="0 1"))
    with pytest.raises(CheckpointError, match="small/mnli holds 3 results and no model of the best"):
        run_glue.main(flags(tmp_path / "copy", task="rte", seeds="2"))
    with pytest.raises(ResultError, match="transfer: True there, False now"):
        run_glue.main(flags(tmp_path / "copy", task="rte", transfer=False))
    # Nor is a model taken that comes from other weights.
    shutil.copytree(model_folder(finished, "mnli"), tmp_path / "copy" / "small" / name / "model")
    shutil.rmtree(tmp_path / "copy" / "small" / "rte")
    changed = save_encoder(tmp_path / "encoder", tokenizer, seed=1)
    with pytest.raises(ResultError, match="seed2.json is the result of other settings:\n  weights: "):
        run_glue.main(flags(tmp_path / "copy", task="rte", model=changed))


def test_a_point_of_a_grid_that_diverges_is_recorded_and_left_out(flags, tmp_path):
    grid = GRID | {"num_train_epochs": 1, "batch_sizes": "8", "learning_rates": "1e30 0.003"}
    run_glue.main(flags(tmp_path / "grid", **grid))
    results = results_of(tmp_path / "grid")
    (name,) = (name for name in results if "1e+30" in name)
    assert (
        results[name]["score"] is None and results[name]["error"] == "The loss is nan at step 10." and len(results) == 2
    )
    report = json.loads((tmp_path / "grid" / "report.json").read_text())
    assert report["diverged"] == [f"small/{name}"]
    assert report["models"]["small"]["sst2"]["hyperparameters"] == "bs8_lr0.003_wd0.01"
    assert f"Diverged, and in no mean: small/{name}." in (tmp_path / "grid" / "report.md").read_text()
    assert not list(tmp_path.rglob("checkpoint-*"))
    run_glue.main(flags(tmp_path / "grid", **grid))
    assert results_of(tmp_path / "grid") == results
    # By itself it is an error, at once or if the grid has it.
    alone = {"num_train_epochs": 1, "learning_rate": 1e30}
    with pytest.raises(ResultError, match="1e\\+30.*this run diverged in a grid"):
        run_glue.main(flags(tmp_path / "grid", **alone))
    with pytest.raises(SystemExit, match="The loss is nan at step 10. There is no earlier checkpoint"):
        run_glue.main(flags(tmp_path / "alone", **alone))
    assert not results_of(tmp_path / "alone")


# Nothing is learned, so that the first evaluation stays the best.
STILL = {"learning_rate": 1e-12, "eval_steps": None, "early_stopping_patience": 3, "num_train_epochs": 10}


@pytest.fixture(scope="module")
def stopped_early(flags, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("early")
    run_glue.main(flags(folder, **STILL))
    return results_of(folder)


def test_early_stopping(stopped_early):
    (result,) = stopped_early.values()
    assert (result["best_step"], result["last_step"]) == (2, 8) and result["settings"]["max_steps"] == 200


def test_patience_survives_sigterm(flags, stopped_early, tmp_path):
    def stop():
        for _ in range(6000):
            if list(tmp_path.rglob("checkpoint-4/complete.json")):
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        run_glue.main(flags(tmp_path, **STILL))
    thread.join()
    assert ended.value.code == 143
    # The best, of step 2, and the newest.
    kept = [complete_checkpoints(folder) for folder in (tmp_path / "small" / "sst2").iterdir()]
    assert [folder.name for folder in kept[0]] in (["checkpoint-2", f"checkpoint-{step}"] for step in range(4, 9))
    run_glue.main(flags(tmp_path, **STILL))
    assert results_of(tmp_path) == stopped_early


def test_a_run_killed_before_its_result_does_not_train_on(flags, stopped_early, tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_glue, "write_json", fail)
        with pytest.raises(KeyboardInterrupt):
            run_glue.main(flags(tmp_path, **STILL))
    assert not results_of(tmp_path) and list(tmp_path.rglob("checkpoint-8/complete.json"))
    run_glue.main(flags(tmp_path, **STILL))
    assert results_of(tmp_path) == stopped_early


@pytest.fixture(scope="module")
def whole_grid(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grid")
    run_glue.main(flags(folder, **GRID))
    return folder


def start(flags: list[str], *launcher: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*(launcher or [sys.executable]), str(ROOT / "examples" / "run_glue.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )


def assert_same_best_model(first: Path, second: Path, task: str) -> None:
    first, second = (load_file(model_folder(folder, task) / "model.safetensors") for folder in (first, second))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_killed_grid_goes_on_where_it_was(flags, whole_grid, tmp_path):
    process = start(flags(tmp_path, **GRID))
    while process.poll() is None and not (
        results_of(tmp_path) and any(complete_checkpoints(folder) for folder in (tmp_path / "small" / "sst2").iterdir())
    ):
        time.sleep(0.01)
    # At any moment: in the middle of a step, of saving or of finishing.
    time.sleep(random.Random(0).random() / 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*seed*.json")}
    assert 1 <= len(before) <= 3
    run_glue.main(flags(tmp_path, **GRID))
    assert all(file.stat().st_mtime_ns == written for file, written in before.items())
    assert results_of(tmp_path) == results_of(whole_grid) and len(results_of(tmp_path)) == 4
    assert_same_best_model(tmp_path, whole_grid, "sst2")


def test_shards_are_the_grid(flags, whole_grid, tmp_path):
    for shard, number in (("2/3", 1), ("1/3", 3), ("3/3", 4)):
        run_glue.main(flags(tmp_path, **GRID, shard=shard))
        assert len(results_of(tmp_path)) == number
    assert results_of(tmp_path) == results_of(whole_grid)
    assert_same_best_model(tmp_path, whole_grid, "sst2")
    report = json.loads((tmp_path / "report.json").read_text())["models"]["small"]["sst2"]
    assert (report["runs"], report["searched"], report["seeds"]) == (4, 4, 1)
    assert report["score"] == 100 * max(result["score"] for result in results_of(tmp_path).values())


@pytest.mark.slow
def test_processes_of_accelerate_take_runs_of_their_own(flags, tmp_path):
    changes = {"task": "mnli rte", "seeds": "0 1", "max_steps": 12}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    process = start(flags(tmp_path / "two", **changes), *launcher, str(ROOT / "configs/accelerate/cpu_ddp.yaml"))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]
    assert "share 1 of 2" in output and "share 2 of 2" in output
    run_glue.main(flags(tmp_path / "one", **changes))
    assert results_of(tmp_path / "two") == results_of(tmp_path / "one") and len(results_of(tmp_path / "two")) == 4


def test_all_layouts_give_the_same_rows(rows, data_dir):
    for name, splits in rows.items():
        loaded = load_task(TASKS[name], str(data_dir))
        for split, part in splits.items():
            assert loaded[split]["label"][:] == [row["label"] for row in part]
            assert loaded[split]["text"][:] == [row[TASKS[name].texts[0]] for row in part]


def edit(data_dir: Path, tmp_path: Path, change) -> Path:
    """A copy of SST-2 with other rows in its training split."""
    shutil.copytree(data_dir / "sst2", tmp_path / "data" / "sst2")
    file = tmp_path / "data" / "sst2" / "train.jsonl"
    changed = change([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return tmp_path / "data"


BAD_ROWS = [
    (lambda rows: [*rows, rows[0] | {"label": 2}], "row 160 has the label 2; the task expects 0 negative, 1 positive"),
    (lambda rows: [*rows, rows[0] | {"label": -1}], "row 160 has the label -1"),
    (lambda rows: [*rows, rows[0] | {"label": None}], "row 160 has the label None"),
    (lambda rows: [row | {"label": "good"} for row in rows], "row 0 has the label 'good'"),
    (lambda rows: [*rows, rows[0] | {"sentence": None}], r"1 rows have no 'sentence' \(None\)"),
    (lambda rows: [row | {"sentence": 3} for row in rows], "the column 'sentence' holds .*int64.*, not text"),
    (
        lambda rows: [{"text": row["sentence"], "label": 0} for row in rows],
        "no column 'sentence'; it has 'text', 'label'",
    ),
    (lambda rows: [], "empty or cannot be read"),
]


@pytest.mark.parametrize("change, message", BAD_ROWS)
def test_bad_rows_are_refused_before_training(flags, data_dir, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", data_dir=edit(data_dir, tmp_path, change)))
    assert not (tmp_path / "run").exists()


def test_missing_splits_and_other_label_maps_are_refused_before_training(flags, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    (tmp_path / "data" / "mnli" / "validation_mismatched.parquet").unlink()
    message = "mnli has no split 'validation_mismatched': expected .*dev_mismatched.tsv; found .*validation_matched.par"
    with pytest.raises(ValueError, match=message):
        # Of the second task, before the first is trained.
        run_glue.main(flags(tmp_path / "run", task="sst2 mnli", data_dir=tmp_path / "data"))
    features = Features(
        {"sentence1": Value("string"), "sentence2": Value("string"), "label": ClassLabel(names=["no", "yes"])}
    )
    rows = [{"sentence1": "a", "sentence2": "b", "label": 0}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "data" / "rte" / "validation.parquet")
    with pytest.raises(ValueError, match=r"labels are \['no', 'yes'\].*expects \['entailment', 'not_entailment'\]"):
        run_glue.main(flags(tmp_path / "run", task="rte", transfer=False, data_dir=tmp_path / "data"))
    Dataset.from_list([{"sentence1": "a", "sentence2": "b", "label": 5.1}]).to_parquet(
        tmp_path / "data" / "stsb" / "validation.parquet"
    )
    with pytest.raises(ValueError, match="row 0 has the label 5.1; the task expects numbers from 0 to 5"):
        run_glue.main(flags(tmp_path / "run", task="stsb", transfer=False, data_dir=tmp_path / "data"))
    assert not (tmp_path / "run").exists()


BAD_FLAGS = [
    ({"task": "mnl"}, "no task 'mnl'; did you mean 'mnli'"),
    ({"task": "mnli sst2 sst"}, "no task 'sst'; did you mean 'sst2'"),
    ({"learning_rate": None}, "no hyperparameters for sst2 in None: add them, or give"),
    ({"grid": True, "batch_sizes": "8", "learning_rates": "1e-5"}, "'batch_size' is set"),
    (GRID | {"weight_decays": None}, "one of them is empty"),
    ({"shard": "9/8"}, "k from 1 to n, such as 3/8"),
    ({"gradient_accumulation_steps": 2}, "`gradient_accumulation_steps` is 2; this recipe needs 1"),
    ({"ignore_data_skip": True}, "`ignore_data_skip` is True; this recipe needs False"),
    ({"eval_steps": 0.5}, "`eval_steps` is 0.5; it must be a whole number of steps"),
    ({"greater_is_better": False}, "`greater_is_better` is False; this recipe needs True"),
    ({"name": "./"}, "give the model a `name`"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps"}, "`load_best_model_at_end` is True"),
    ({"lerning_rate": 1}, "Unknown argument '--lerning_rate'"),
]


@pytest.mark.parametrize("change, message", BAD_FLAGS)
def test_bad_settings_are_refused_before_training(flags, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", **change))
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_file_without_seeds_is_refused(flags, tmp_path):
    (tmp_path / "none.yaml").write_text("seeds: []\n")
    with pytest.raises(ValueError, match="`seeds` is empty"):
        run_glue.main(flags(tmp_path / "run", config=tmp_path / "none.yaml"))


BAD_TASKS = [
    ({"textz": ["a"]}, "no meaning for the key 'textz'; did you mean 'texts'"),
    ({"metrics": ["acuracy"]}, "'acuracy' is no metric of a classification; did you mean 'accuracy'"),
    ({"metrics": ["pearson"]}, "'pearson' is no metric of a classification"),
    ({"labels": None}, "'accuracy' is no metric of a regression"),
    ({"labels": ["a", "a"]}, "two names or more, each once"),
    ({"labels": ["a", "b", "c"], "metrics": ["f1"]}, "take 'macro_f1'"),
    ({"texts": ["a", "b", "c"]}, "one text column or two"),
    ({"texts": "a"}, "texts"),
    ({"transfer_from": "mnli"}, "starts from 'mnli', which is no task of this file"),
    ({"transfer_from": "mine"}, "mine.* start from each other"),
    ({"label_range": [0, 1]}, "`label_range` is for a regression"),
]


@pytest.mark.parametrize("change, message", BAD_TASKS)
def test_bad_task_definitions_are_refused(flags, data_dir, tmp_path, change, message):
    task = {"source": str(data_dir / "sst2"), "texts": ["sentence"], "labels": ["a", "b"], "metrics": ["accuracy"]}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task | change}))
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", task="mine", task_config=tmp_path / "tasks.yaml", data_dir=None))


def test_a_task_of_ones_own(flags, data_dir, tmp_path):
    task = {
        "source": str(data_dir / "sst2"),
        "texts": ["sentence"],
        "labels": ["class", "none"],
        "metrics": ["accuracy", "macro_f1"],
    }
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"mine": task}))
    run_glue.main(flags(tmp_path, task="all", task_config=tmp_path / "tasks.yaml", data_dir=None))
    result = best_of(tmp_path, "mine")
    assert set(result["metrics"]) == {"accuracy", "macro_f1"} and result["score"] > 0.75
    assert result["score"] == pytest.approx(statistics.mean(result["metrics"].values()), abs=1e-12)
    assert AutoConfig.from_pretrained(model_folder(tmp_path, "mine")).id2label == {0: "class", 1: "none"}
    report = (tmp_path / "report.md").read_text()
    assert "| small | mine |" in report and "| **small** |" not in report


def pretraining_run(folder: Path, tokenizer, sizes: list[int]) -> Path:
    """Complete checkpoints as pretraining leaves them, of models of these widths, and one that is not complete."""
    for step, size in enumerate(sizes):
        save_encoder(folder / f"checkpoint-{step}", tokenizer, step, size)
        mark_complete(folder / f"checkpoint-{step}", Progress("plain", {}, {}))
    save_encoder(folder / f"checkpoint-{len(sizes)}", tokenizer, 7, sizes[-1])
    return folder


def test_averaged_checkpoints(flags, tokenizer, tmp_path):
    run = pretraining_run(tmp_path / "pretraining", tokenizer, [32, 32, 32])
    run_glue.main(flags(tmp_path, model=run, average_checkpoints=2, max_steps=4, learning_rate=1e-12))
    stored = load_file(model_folder(tmp_path, "sst2") / "model.safetensors")
    parts = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (1, 2)]
    backbone = [key for key in stored if key.startswith("model.")]
    assert len(backbone) == len(stored) - 4
    for key in backbone:
        # Four steps of 1e-12 and the rounding of the mean.
        torch.testing.assert_close(stored[key], (parts[0][key] + parts[1][key]) / 2, rtol=0, atol=1e-6)
    assert best_of(tmp_path, "sst2")["settings"]["start"] == f"{run}/checkpoint-1 + {run}/checkpoint-2"
    with pytest.raises(CheckpointError, match="holds 3 complete checkpoints, and `average_checkpoints` is 4"):
        run_glue.main(flags(tmp_path / "more", model=run, average_checkpoints=4))


def test_masked_language_models_without_a_pooler_are_averaged(tokenizer, tmp_path):
    config = ENCODERS["bert"](
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        BertForMaskedLM(config).save_pretrained(folder)
    model = build_classifier(str(folders[0]), TASKS["sst2"], 0.1, folders)
    parts = [load_file(folder / "model.safetensors") for folder in folders]
    backbone = {key: value for key, value in model.bert.state_dict().items() if not key.startswith("pooler.")}
    assert len(backbone) == len(model.bert.state_dict()) - 2
    for key, weight in backbone.items():
        torch.testing.assert_close(weight, (parts[0][f"bert.{key}"] + parts[1][f"bert.{key}"]) / 2)
    assert model.bert.pooler.dense.weight.std().item() == pytest.approx(0.02, rel=0.2)
    # All have one or none has.
    model.save_pretrained(tmp_path / "2")
    for order, message in (([0, 2], "has beyond the model's own bert.pooler"), ([2, 0], "lacks bert.pooler")):
        with pytest.raises(ValueError, match=message):
            build_classifier(str(folders[0]), TASKS["sst2"], 0.1, [tmp_path / str(number) for number in order])


def test_half_precision_checkpoints_are_averaged_in_float32(tokenizer, tmp_path):
    run = pretraining_run(tmp_path, tokenizer, [32, 32])
    for step in (0, 1):
        file = run / f"checkpoint-{step}" / "model.safetensors"
        save_file({key: value.half() for key, value in load_file(file).items()}, file, {"format": "pt"})
    checkpoints = [run / "checkpoint-0", run / "checkpoint-1"]
    model = build_classifier(str(checkpoints[0]), TASKS["sst2"], 0.1, checkpoints)
    parts = [load_file(folder / "model.safetensors")["model.encoder.weight"].double() for folder in checkpoints]
    assert model.dtype == torch.float32
    torch.testing.assert_close(model.model.encoder.weight.double(), sum(parts) / 2, rtol=1e-7, atol=1e-9)


def test_checkpoints_of_another_width_are_refused_before_training(flags, tokenizer, encoder, tmp_path):
    run = pretraining_run(tmp_path / "pretraining", tokenizer, [64, 32])
    message = (
        r"checkpoint-0/model.safetensors is of another backbone: model.* shape \[.*64\] there; expected is \[.*32\]"
    )
    with pytest.raises(ValueError, match=message):
        run_glue.main(flags(tmp_path / "run", model=run, average_checkpoints=2))
    wide = save_encoder(tmp_path / "wide", tokenizer, hidden_size=64)
    shutil.copy(encoder / "config.json", wide / "config.json")
    with pytest.raises(ValueError, match=r"weights of .*wide do not fit its config.json \(hidden_size 32\)"):
        run_glue.main(flags(tmp_path / "run", model=wide))
    file = run / "checkpoint-1" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.more"] = tensors.pop("model.layer_norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="it lacks model.layer_norm.weight"):
        build_classifier(str(encoder), TASKS["sst2"], 0.1, [run / "checkpoint-1"])
    assert not list((tmp_path / "run").rglob("checkpoint-*"))


@pytest.mark.parametrize("name", ENCODERS)
def test_it_works_for_other_encoders(flags, tokenizer, tmp_path, name):
    save_other_encoder(name, tmp_path / name, tokenizer)
    changes = {"model": tmp_path / name, "classifier_dropout": 0.25, "max_steps": 2}
    run_glue.main(flags(tmp_path, **changes))
    trained = model_folder(tmp_path, "sst2")
    stored = load_file(trained / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    model = build_classifier(str(tmp_path / name), TASKS["mnli"], 0.25, [trained])
    prefix = f"{model.base_model_prefix}."
    # Stored, since files have other names and shapes than the modules of some.
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    backbone = {key: weight for key, weight in again.items() if key.startswith(prefix)}
    assert len(backbone) > 10 and all(torch.equal(weight, stored[key]) for key, weight in backbone.items())
    # Before the classifier, and nowhere else.
    modules = model.named_modules()
    dropouts = [key for key, module in modules if 0.25 in (getattr(module, "p", 0), getattr(module, "drop_prob", 0))]
    assert len(dropouts) == 1 and not dropouts[0].startswith(prefix)

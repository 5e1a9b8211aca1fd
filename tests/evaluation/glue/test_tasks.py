"""GLUE without training: tasks, files, metrics, protocol, shares, and the paper's tables as data."""

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from neobert_hf.common.results import folder_of_results
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.recipe import GlueSettings, choose_tasks, plan_runs
from neobert_hf.evaluation.glue.report import read_published
from neobert_hf.evaluation.glue.results import Results
from neobert_hf.evaluation.glue.runs import (
    Hyperparameters,
    Run,
    grid,
    order_tasks,
    own_share,
    read_hyperparameters,
    separate_processes,
)
from neobert_hf.evaluation.glue.tasks import load_task, read_tasks
from neobert_hf.evaluation.glue.trainer import GlueArguments
from neobert_hf.training.metrics import ScoreMetric
from tests.helpers.models import ROOT


CONFIGS = ROOT / "configs" / "glue"
TASKS = read_tasks(str(CONFIGS / "tasks.yaml"))


def test_metrics_equal_scikit_learn_and_scipy():
    draw = random.Random(0)
    labels = [draw.choice([0, 0, 1]) for _ in range(200)]
    predicted = [label if draw.random() < 0.7 else 1 - label for label in labels]
    expected = {
        "accuracy": accuracy_score(labels, predicted),
        "f1": f1_score(labels, predicted),
        "macro_f1": f1_score(labels, predicted, average="macro"),
        "matthews_correlation": matthews_corrcoef(labels, predicted),
    }
    assert ScoreMetric(list(expected)).compute(predictions=predicted, references=labels) == expected
    # From their definitions.
    hits = sum(guess == label == 1 for guess, label in zip(predicted, labels))
    assert expected["f1"] == pytest.approx(2 * hits / (sum(predicted) + sum(labels)), abs=1e-12)
    scores = [draw.random() * 5 for _ in range(100)]
    noisy = [score + draw.gauss(0, 1) for score in scores]
    computed = ScoreMetric(["pearson", "spearmanr"]).compute(predictions=noisy, references=scores)
    assert computed == pytest.approx(
        {"pearson": pearsonr(noisy, scores).statistic, "spearmanr": spearmanr(noisy, scores).statistic}, abs=1e-12
    )
    constant = ScoreMetric(["pearson", "spearmanr"]).compute(predictions=[2.0] * 100, references=scores)
    assert constant == {"pearson": 0.0, "spearmanr": 0.0}


def test_wnli_is_a_task_and_not_in_the_average():
    assert "wnli" in order_tasks(TASKS, list(TASKS))
    settings = GlueSettings("m", ["all"], str(CONFIGS / "tasks.yaml"))
    assert "wnli" not in choose_tasks(settings) and len(choose_tasks(settings)) == 8
    assert list(choose_tasks(replace(settings, task=["wnli"]))) == ["wnli"]
    assert len(choose_tasks(replace(settings, task=["all", "wnli"]))) == 9
    assert "wnli" not in read_published(str(CONFIGS / "table3.yaml")).columns and len(TASKS) == 9


@pytest.mark.parametrize("name", ["paper", "neobert_1024"])
@pytest.mark.parametrize(
    "rows, batch_size, every, steps", [(100, 32, 1, 40), (2490, 8, 31, 3120), (392_702, 16, 500, 245_440)]
)
def test_the_papers_protocol(name, rows, batch_size, every, steps, tmp_path):
    """min(500, len(dataloader) // 10), 10 epochs, 6% of warm-up, 15 evaluations."""
    settings, arguments = parse_config(
        GlueSettings,
        GlueArguments,
        args=["--config", str(CONFIGS / f"{name}.yaml"), "--model", "m", "--task", "all", "--bf16", "0"],
    )
    run = arguments.for_run(Run("mnli", Hyperparameters(batch_size, 1e-5, 0.0), seed=3), tmp_path, rows)
    assert (run.per_device_train_batch_size, run.learning_rate, run.weight_decay, run.seed) == (batch_size, 1e-5, 0, 3)
    assert (run.eval_steps, run.save_steps, run.max_steps) == (every, every, steps)
    assert run.get_warmup_steps(run.max_steps) == -(-steps * 6 // 100) and run.lr_scheduler_type == "linear"
    assert (arguments.early_stopping_patience, settings.max_length, settings.classifier_dropout) == (15, 1024, 0.1)
    assert len(grid(settings.batch_sizes, settings.learning_rates, settings.weight_decays)) == 60


def test_shares_of_processes_and_shards():
    runs = list(range(60))
    shares = [own_share(f"{shard}/3", process, 4) for shard in (1, 2, 3) for process in range(4)]
    taken = [run for share, shares in shares for run in runs[share::shares]]
    assert sorted(taken) == runs
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0"):
        with pytest.raises(ValueError, match="k/n with k from 1 to n"):
            own_share(wrong, 0, 1)


def test_gpus_are_counted_without_starting_cuda(monkeypatch):
    """Which would keep it from seeing that CUDA_VISIBLE_DEVICES has changed. No GPU here: this is what it asks for."""
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
    )
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert separate_processes() == (1, 2) and asked == ["1"]
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()


def test_the_folder_of_a_model_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert folder_of_results(None, ".") == "mine" and folder_of_results(None, "..") == tmp_path.name
    assert folder_of_results(None, "./runs/a/model/") == folder_of_results("runs/a/model", ".") == "runs__a__model"
    for name, model in (("", "m"), ("./", "m"), (None, "/")):
        with pytest.raises(ValueError, match="give the model a `name`"):
            folder_of_results(name, model)


def test_a_dependent_task_waits_for_the_runs_of_others(tmp_path, capsys):
    results = Results(tmp_path)
    runs = [Run("mnli", point, 0) for point in grid([8, 16], [1e-5], [0.0])]
    (tmp_path / "mnli").mkdir()
    results.file(runs[0]).write_text("{}")
    thread = threading.Thread(target=lambda: results.wait_for(runs, 0.01))
    thread.start()
    printed = ""
    while not printed.endswith("\n"):
        assert thread.is_alive()
        time.sleep(0.01)
        printed += capsys.readouterr().out
    assert printed == (
        f"waiting for 1 runs of other processes or shards: {runs[1].name}. If nothing runs them, start their shard, or "
        "the same command without `--shard`.\n"
    )
    assert thread.is_alive()
    results.file(runs[1]).write_text("{}")
    thread.join(300)
    assert not thread.is_alive()


# GLUE's own files: columns of the first line, and the label as it is written there.
TSV = {
    "cola": (None, ["gj04", "{label}", "", "{0}"], "01"),
    "sst2": ("sentence\tlabel", ["{0}", "{label}"], "01"),
    "mrpc": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["{label}", "702876", "702977", "{0}", "{1}"], "01"),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        ["0", "main-captions", "MSRvid", "2012test", "0001", "none", "none", "{0}", "{1}", "{label}"],
        ["5.000", "0.75"],
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        ["133273", "213221", "213222", "{0}", "{1}", "{label}"],
        "01",
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        ["0", "31193", "31193n", "slate", "( a )", "( b )", "(ROOT)", "(ROOT)", "{0}", "{1}", "neutral", "{label}"],
        ["entailment", "neutral", "contradiction"],
    ),
    "qnli": ("index\tquestion\tsentence\tlabel", ["0", "{0}", "{1}", "{label}"], ["entailment", "not_entailment"]),
    "rte": ("index\tsentence1\tsentence2\tlabel", ["0", "{0}", "{1}", "{label}"], ["entailment", "not_entailment"]),
    "wnli": ("index\tsentence1\tsentence2\tlabel", ["0", "{0}", "{1}", "{label}"], "01"),
}


def write_tsv(folder: Path, task: str, lines_more: str = "") -> None:
    header, columns, labels = TSV[task]
    described = TASKS[task].tsv
    (folder / described.folder).mkdir(parents=True, exist_ok=True)
    lines = [header] if header else []
    # Quotation marks that open and never close are part of the text.
    lines += ["\t".join(columns).format(f'"One {n}', f'two" {n}', label=label) for n, label in enumerate(labels)]
    for split in (TASKS[task].train, *TASKS[task].validation):
        file = folder / described.folder / described.files[split]
        # MRPC's files begin with a byte order mark.
        encoding = "utf-8-sig" if task == "mrpc" else "utf-8"
        file.write_text("\n".join(lines) + "\n" + lines_more, encoding=encoding)


@pytest.mark.parametrize("name", TASKS)
def test_glues_own_files(tmp_path, name):
    write_tsv(tmp_path, name)
    task = TASKS[name]
    splits = load_task(task, str(tmp_path))
    assert list(splits) == ["train", *task.validation]
    labels = [5.0, 0.75] if name == "stsb" else list(range(len(task.labels)))
    for split in splits.values():
        expected = {"text": [f'"One {n}' for n in range(len(labels))]}
        if len(task.texts) == 2:
            expected["text_pair"] = [f'two" {n}' for n in range(len(labels))]
        assert split[:] == expected | {"label": labels}


def test_broken_lines_are_few_or_an_error(tmp_path, capsys):
    write_tsv(tmp_path, "qqp", "".join(f"{n}\t1\t2\tOne\ttwo\t0\n" for n in range(20_000)) + "12\tbroken off\n")
    assert len(load_task(TASKS["qqp"], str(tmp_path))["train"]) == 20_002
    assert "1 of 20,003 lines do not have 6 columns and are left out" in capsys.readouterr().out
    write_tsv(tmp_path, "qqp", "12\tbroken off\n")
    with pytest.raises(ValueError, match="train.tsv: 1 of 3 lines do not have 6 columns, id, qid1"):
        load_task(TASKS["qqp"], str(tmp_path))
    (tmp_path / "QQP" / "train.tsv").write_text("")
    with pytest.raises(ValueError, match="Task qqp: there is no row"):
        load_task(TASKS["qqp"], str(tmp_path))


def test_the_papers_hyperparameters_are_table_6(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text()
    lines = paper[paper.index("Model\tTask\tBatch Size") : paper.index("Table 6:")].strip().splitlines()[1:]
    expected, model = {}, None
    for line in lines:
        first, task, *values = line.split("\t")
        model = "".join(filter(str.isdigit, first)) or model
        expected.setdefault(model, {})[task.lower().replace("-", "")] = [float(value) for value in values]
    assert {model: len(tasks) for model, tasks in expected.items()} == {"1024": 8, "4096": 8}
    for model, tasks in expected.items():
        found = read_hyperparameters(str(CONFIGS / f"table6_{model}.yaml"))
        assert set(found) - set(tasks) == {"wnli", "snli", "allnli"} and found["wnli"] == found["rte"]
        for task, values in tasks.items():
            point = found[task]
            assert [point.batch_size, point.learning_rate, point.weight_decay] == values, task


def test_the_published_rows_are_table_3(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text()
    lines = paper[paper.index("Size\tModel\tMNLI") : paper.index("## 5.2 MTEB")].strip().splitlines()
    published = read_published(str(CONFIGS / "table3.yaml"))
    assert lines[0].split("\t")[2:] == [*published.columns.values(), "Avg."]
    rows = []
    for line in lines[1:]:
        numbers = "".join(c if c.isdigit() or c in ".\t" else "" for c in line.replace("250M", ""))
        rows.append([float(cell) for cell in numbers.split("\t")[-9:]])
    assert rows == list(published.rows.values())
    assert list(published.columns) == ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]


def test_the_grid_and_the_gains_of_the_ablations_are_those_of_the_paper(shared):
    flags = ["--config", str(CONFIGS / "ablations.yaml"), "--model", "m", "--task", "all", "--use_cpu", "true"]
    settings, arguments = parse_config(GlueSettings, GlueArguments, args=[*flags, "--bf16", "false"])
    tasks = {"cola": read_tasks(settings.task_config)["cola"]}
    points = {run.hyperparameters for run in plan_runs(settings, arguments, tasks)}
    assert {point.batch_size for point in points} == {16, 32} and len(points) == 6
    assert {point.learning_rate for point in points} == {1e-5, 2e-5, 3e-5}
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text()
    caption = paper[paper.index("Figure 1: GLUE ablation") :].split("\n")[0].replace("*", "")
    gains = read_published(settings.published).gains
    for name in ("m2", "m3", "m6", "m7"):
        assert f"{name.upper()}, {gains[name]['percent']:+.1f}%" in caption
    text = paper.replace("**", "").replace("*", "")
    for name in ("m4", "m5"):
        assert f"performance by {gains[name]['percent']:+.1f}%" in text


def test_the_example_of_a_task_has_the_labels_of_its_data(shared):
    (task,) = read_tasks(str(CONFIGS / "debian_sections.yaml")).values()
    folder = shared / "data" / "classification_debian_sections"
    table = Dataset.from_parquet(str(folder / "train.parquet"))
    assert {row["label"]: row["label_text"] for row in table} == dict(enumerate(task.labels))

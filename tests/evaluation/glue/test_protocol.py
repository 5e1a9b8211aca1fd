"""The paper's GLUE as configuration: its protocol, grid and tables; which runs follow; which settings are refused."""

import pytest
from datasets import Dataset

from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.report import read_published
from neobert_hf.evaluation.glue.runs import (
    GlueArguments,
    GlueSettings,
    Hyperparameters,
    Run,
    grid,
    own_share,
    plan_runs,
    read_hyperparameters,
)
from neobert_hf.evaluation.glue.tasks import choose_tasks, read_tasks
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import GRID
from tests.helpers.models import ROOT
from tests.helpers.pages import blocks_of


CONFIGS = ROOT / "configs" / "glue"
PAPER = {"qnli": "mnli", "stsb": "mnli", "mrpc": "mnli", "rte": "mnli"}


def read_config(name: str, *flags: str) -> tuple[GlueSettings, GlueArguments]:
    args = ["--config", str(CONFIGS / f"{name}.yaml"), "--model", "m", "--task", "all", "--bf16", "0", "--use_cpu", "1"]
    return parse_config(GlueSettings, GlueArguments, args=[*args, *flags])


def transfers(file: str) -> dict[str, str]:
    return {name: task.transfer_from for name, task in read_tasks(str(CONFIGS / file)).items() if task.transfer_from}


@pytest.mark.parametrize("name", ["paper", "neobert_1024"])
@pytest.mark.parametrize(
    "rows, batch_size, every, steps", [(100, 32, 1, 40), (2490, 8, 31, 3120), (392_702, 16, 500, 245_440)]
)
def test_the_papers_protocol(name, rows, batch_size, every, steps, tmp_path):
    """min(500, len(dataloader) // 10), 10 epochs, 6% of warm-up, 15 evaluations."""
    settings, arguments = read_config(name)
    run = Run("mnli", Hyperparameters(batch_size, 1e-5, 0.0), seed=3).arguments(arguments, tmp_path, rows)
    assert (run.per_device_train_batch_size, run.learning_rate, run.weight_decay, run.seed) == (batch_size, 1e-5, 0, 3)
    assert (run.eval_steps, run.save_steps, run.max_steps) == (every, every, steps)
    assert run.get_warmup_steps(run.max_steps) == -(-steps * 6 // 100) and run.lr_scheduler_type == "linear"
    assert (arguments.early_stopping_patience, settings.max_length, settings.classifier_dropout) == (15, 1024, 0.1)
    assert len(grid(settings)) == 60


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
    settings, arguments = read_config("ablations")
    points = {
        run.hyperparameters for run in plan_runs(settings, arguments, choose_tasks(settings.task_config, ["cola"]))
    }
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


def test_the_default_is_the_papers_transfer_and_the_released_one_has_a_file():
    assert transfers("tasks.yaml") == PAPER
    assert transfers("released_tasks.yaml") == PAPER | {"mnli": "snli", "wnli": "allnli"}
    assert transfers("superglue.yaml") == dict.fromkeys(("boolq", "cb", "rte"), "allnli")
    # `all` is the paper's eight; a task comes after the one that it starts from.
    assert set(choose_tasks(str(CONFIGS / "released_tasks.yaml"), ["all"])) == set(
        read_published(str(CONFIGS / "table3.yaml")).columns
    )
    assert list(choose_tasks(str(CONFIGS / "tasks.yaml"), ["rte", "wnli", "mnli"])) != ["rte", "wnli", "mnli"]
    assert list(choose_tasks(str(CONFIGS / "released_tasks.yaml"), ["rte", "mnli", "snli"])) == ["snli", "mnli", "rte"]


def test_the_guides_commands_have_all_that_they_need():
    """Tasks, what these start from, and hyperparameters; the data are the Hub's."""
    planned = []
    for block in blocks_of(ROOT / "docs" / "guides" / "evaluate.md"):
        for command in block.commands() if block.language == "bash" else []:
            if "examples/run_glue.py" in command and "chandar-lab/NeoBERT" in command:
                args = [str(ROOT / word) if word.startswith("configs/") else word for word in command[2:]]
                parsed = parse_config(GlueSettings, GlueArguments, args=[*args, "--bf16", "0", "--use_cpu", "1"])
                tasks = choose_tasks(parsed[0].task_config, parsed[0].task)
                planned.append({run.task for run in plan_runs(*parsed, tasks)})
                assert {task.transfer_from for task in tasks.values()} - {None} <= set(tasks)
    assert planned[1:] == [set(read_tasks(str(CONFIGS / f"{name}.yaml"))) for name in ("released_tasks", "superglue")]


def test_the_example_of_a_task_has_the_labels_of_its_data(shared):
    (task,) = read_tasks(str(CONFIGS / "debian_sections.yaml")).values()
    table = Dataset.from_parquet(str(shared / "data" / "classification_debian_sections" / "train.parquet"))
    assert {row["label"]: row["label_text"] for row in table} == dict(enumerate(task.labels))


def test_shares_of_processes_and_shards_are_all_runs():
    runs = list(range(60))
    shares = [own_share(f"{shard}/3", process, 4) for shard in (1, 2, 3) for process in range(4)]
    assert sorted(run for share, shares in shares for run in runs[share::shares]) == runs


BAD_FLAGS = [
    ({"task": "mnl"}, "mnl.*mnli"),
    ({"learning_rate": None}, "no hyperparameters for sst2"),
    ({"grid": True, "batch_sizes": "8", "learning_rates": "1e-5"}, "batch_size"),
    (GRID | {"weight_decays": None}, "weight_decays"),
    ({"seed": 3}, "seeds"),
    ({"shard": "9/8"}, "shard"),
    ({"label_smoothing_factor": 0.1, "task": "sst2 stsb"}, "stsb"),
    ({"lerning_rate": 1}, "lerning_rate"),
]


@pytest.mark.parametrize("change, name", BAD_FLAGS)
def test_bad_settings_are_refused_before_training(flags, tmp_path, change, name):
    with pytest.raises(ValueError, match=name):
        load_example("run_glue").main(flags(tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def test_a_number_that_yaml_reads_as_text_is_refused(tmp_path):
    (tmp_path / "best.yaml").write_text("cola: {batch_size: 4, learning_rate: 6e-6, weight_decay: 0.01}\n")
    with pytest.raises(ValueError, match="cola.*6e-6"):
        read_hyperparameters(str(tmp_path / "best.yaml"))

"""The paper's GLUE as configuration: its protocol, grid, tables, and which runs follow."""

import pytest

from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.report import read_published
from neobert_hf.evaluation.glue.tasks import choose_tasks
from neobert_hf.evaluation.glue.trials import GlueArguments, GlueSettings, Trial, plan_trials
from tests.helpers.glue_runs import TASKS
from tests.helpers.models import ROOT


CONFIGS = ROOT / "configs" / "glue"


@pytest.fixture
def paper(shared) -> str:
    return (shared / "paper" / "neobert_2502.19587.md").read_text()


def read_config(name: str, *flags: str) -> tuple[GlueSettings, GlueArguments]:
    args = ["--config", str(CONFIGS / f"{name}.yaml"), "--model", "m", "--task", "all", "--bf16", "0", "--use_cpu", "1"]
    return parse_config(GlueSettings, GlueArguments, args=[*args, *flags])


@pytest.mark.parametrize(
    "rows, batch_size, every, steps", [(100, 32, 1, 40), (2490, 8, 31, 3120), (392_702, 16, 500, 245_440)]
)
def test_the_papers_protocol(rows, batch_size, every, steps, tmp_path):
    """min(500, len(dataloader) // 10), 10 epochs, 6% of warm-up, 15 evaluations."""
    settings, arguments = read_config("paper")
    run = Trial("mnli", 3, batch_size, 1e-5, 0.0).arguments(arguments, tmp_path).planned(rows)
    assert (run.per_device_train_batch_size, run.learning_rate, run.weight_decay, run.seed) == (batch_size, 1e-5, 0, 3)
    assert (run.eval_steps, run.save_steps, run.max_steps) == (every, every, steps)
    assert run.get_warmup_steps(run.max_steps) == -(-steps * 6 // 100) and run.lr_scheduler_type == "linear"
    assert (arguments.early_stopping_patience, settings.max_length, settings.classifier_dropout) == (15, 1024, 0.1)


def test_the_papers_tasks_and_their_transfer():
    """A task comes after the one that it starts from."""
    transfers = {name: task.transfer_from for name, task in TASKS.items() if task.transfer_from}
    assert transfers == dict.fromkeys(("qnli", "stsb", "mrpc", "rte"), "mnli")
    assert set(TASKS) == set(read_published(str(CONFIGS / "table3.yaml")).columns)
    assert list(choose_tasks(str(CONFIGS / "tasks.yaml"), ["rte", "mnli"])) == ["mnli", "rte"]


def test_the_papers_hyperparameters_and_grid_are_table_6(paper):
    lines = paper[paper.index("Model\tTask\tBatch Size") : paper.index("Table 6:")].strip().splitlines()[1:]
    expected, model = {}, None
    for line in lines:
        first, task, *values = line.split("\t")
        model = "".join(filter(str.isdigit, first)) or model
        expected.setdefault(model, {})[task.lower().replace("-", "")] = tuple(map(float, values))
    for model, name in (("1024", "neobert_1024"), ("4096", "paper")):
        runs = plan_trials(*read_config(name), TASKS)
        found = {run.task: (run.batch_size, run.learning_rate, run.weight_decay) for run in runs}
        assert found == expected[model] and len(runs) == 8
    assert len(plan_trials(*read_config("paper", "--grid", "1"), {"cola": TASKS["cola"]})) == 60


def test_the_published_rows_are_table_3(paper):
    lines = paper[paper.index("Size\tModel\tMNLI") : paper.index("## 5.2 MTEB")].strip().splitlines()
    published = read_published(str(CONFIGS / "table3.yaml"))
    assert lines[0].split("\t")[2:] == [*published.columns.values(), "Avg."]
    rows = []
    for line in lines[1:]:
        numbers = "".join(c if c.isdigit() or c in ".\t" else "" for c in line.replace("250M", ""))
        rows.append([float(cell) for cell in numbers.split("\t")[-9:]])
    assert rows == list(published.rows.values())
    assert list(published.columns) == ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]


def test_the_grid_and_the_gains_of_the_ablations_are_those_of_the_paper(paper):
    settings, arguments = read_config("ablations")
    runs = plan_trials(settings, arguments, {"cola": TASKS["cola"]})
    assert {run.batch_size for run in runs} == {16, 32} and len(runs) == 6
    assert {run.learning_rate for run in runs} == {1e-5, 2e-5, 3e-5}
    caption = paper[paper.index("Figure 1: GLUE ablation") :].split("\n")[0].replace("*", "")
    gains = read_published(settings.published).gains
    for name in ("m2", "m3", "m6", "m7"):
        assert f"{name.upper()}, {gains[name]['percent']:+.1f}%" in caption
    text = paper.replace("**", "").replace("*", "")
    for name in ("m4", "m5"):
        assert f"performance by {gains[name]['percent']:+.1f}%" in text

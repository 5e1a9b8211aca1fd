"""The transfer of the released code as descriptions: which task starts from which, and runs that do."""

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features, Value

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.recipe import GlueSettings, choose_tasks, plan_runs
from neobert_hf.evaluation.glue.runs import read_hyperparameters
from neobert_hf.evaluation.glue.tasks import load_task, read_tasks
from neobert_hf.evaluation.glue.trainer import GlueArguments
from tests.helpers.examples import load_example
from tests.helpers.glue_runs import best_of, make_rows, results_of, write_rows
from tests.helpers.models import ROOT
from tests.helpers.pages import blocks_of


CONFIGS = ROOT / "configs" / "glue"
RELEASED = read_tasks(str(CONFIGS / "released_tasks.yaml"))
PAPER = {"qnli": "mnli", "stsb": "mnli", "mrpc": "mnli", "rte": "mnli"}
# Three names and -1, as stanfordnlp/snli and sentence-transformers/all-nli have them.
NLI = Features(
    {
        "premise": Value("string"),
        "hypothesis": Value("string"),
        "label": ClassLabel(names=["entailment", "neutral", "contradiction"]),
    }
)


def transfers(tasks: dict) -> dict[str, str]:
    return {name: task.transfer_from for name, task in tasks.items() if task.transfer_from is not None}


def test_the_default_is_the_papers_transfer_and_the_released_one_has_a_file():
    assert transfers(read_tasks(str(CONFIGS / "tasks.yaml"))) == PAPER
    assert transfers(RELEASED) == PAPER | {"mnli": "snli", "wnli": "allnli"}
    # All else is as in the file that it extends.
    tasks = read_tasks(str(CONFIGS / "tasks.yaml"))
    assert set(RELEASED) - set(tasks) == {"snli", "allnli"} and RELEASED["qqp"] == tasks["qqp"]
    assert RELEASED["mnli"].tsv == tasks["mnli"].tsv and RELEASED["mnli"].validation == tasks["mnli"].validation
    everything = choose_tasks(GlueSettings("m", ["all"], str(CONFIGS / "released_tasks.yaml")))
    assert not {"snli", "allnli", "wnli"} & set(everything) and len(everything) == 8
    for table in ("table6_1024", "table6_4096"):
        best = read_hyperparameters(str(CONFIGS / f"{table}.yaml"))
        assert best["snli"] == best["allnli"] == best["mnli"]


@pytest.fixture
def nli_dir(tmp_path):
    """SNLI and AllNLI as on the Hub, and other tasks; how a hypothesis begins tells its relation to the premise."""
    rows = make_rows()
    write_rows({name: rows[name] for name in ("mnli", "rte")}, tmp_path)
    # Left out, so that it does not matter that their texts are empty.
    unlabelled = [row | {"label": -1, "premise": ""} for row in rows["mnli"]["train"][:3]]
    for name, development in (("snli", "validation"), ("allnli", "dev")):
        (tmp_path / name).mkdir()
        train = rows["mnli"]["train"] + (unlabelled if name == "snli" else [])
        Dataset.from_list(train, features=NLI).to_parquet(tmp_path / name / "train.parquet")
        Dataset.from_list(rows["mnli"]["validation_matched"], features=NLI).to_parquet(
            tmp_path / name / f"{development}.parquet"
        )
    (tmp_path / "wnli").mkdir()
    for split, part in rows["rte"].items():
        Dataset.from_list(part).to_parquet(tmp_path / "wnli" / f"{split}.parquet")
    return tmp_path


def test_rows_without_a_label_are_left_out_and_classes_are_merged(nli_dir, capsys):
    labels = [row["label"] for row in make_rows()["mnli"]["train"]]
    snli, allnli = (load_task(RELEASED[name], str(nli_dir)) for name in ("snli", "allnli"))
    assert snli["train"]["label"][:] == labels and set(labels) == {0, 1, 2}
    assert "train.parquet: 3 rows have no label (-1) and are left out" in capsys.readouterr().out
    assert list(allnli) == ["train", "dev"] and allnli["train"]["label"][:] == [min(label, 1) for label in labels]
    # What has the merged names and numbers is another dataset.
    two = NLI | {"label": ClassLabel(names=["entailment", "not_entailment"])}
    Dataset.from_list([{"premise": "a", "hypothesis": "b", "label": 1}], features=Features(two)).to_parquet(
        nli_dir / "allnli" / "dev.parquet"
    )
    with pytest.raises(ValueError, match="'not_entailment'; the task expects 0 entailment, 1 neutral, 2 contradiction"):
        load_task(RELEASED["allnli"], str(nli_dir))
    for name, message in (("allnli", "row 0 has the label None; the task exp"), ("snli", "all rows have the label -1")):
        split = RELEASED[name].validation[0]
        Dataset.from_list([{"premise": "a", "hypothesis": "b", "label": -1}], features=NLI).to_parquet(
            nli_dir / name / f"{split}.parquet"
        )
        with pytest.raises(ValueError, match=message):
            load_task(RELEASED[name], str(nli_dir))


def test_the_released_transfer_runs(flags, encoder, nli_dir, tmp_path):
    changes = {"task": "rte wnli mnli allnli snli", "task_config": CONFIGS / "released_tasks.yaml", "published": None}
    changes |= {"data_dir": nli_dir, "max_steps": 4, "eval_steps": 2}
    load_example("run_glue").main(flags(tmp_path / "run", **changes))
    starts = {result["task"]: result["settings"]["start"] for result in results_of(tmp_path / "run").values()}
    best = {task: best_of(tmp_path / "run", task)["run"] for task in starts}
    expected = {"mnli": best["snli"], "rte": best["mnli"], "wnli": best["allnli"]}
    assert starts == expected | dict.fromkeys(("snli", "allnli"), model_fingerprint(str(encoder)))


def test_the_guides_commands_have_all_that_they_need():
    """Tasks, what these start from, and hyperparameters; the data are the Hub's."""
    planned = []
    for block in blocks_of(ROOT / "docs" / "guides" / "evaluate.md"):
        for command in block.commands() if block.language == "bash" else []:
            if "examples/run_glue.py" in command:
                args = [str(ROOT / word) if word.startswith("configs/") else word for word in command[2:]]
                parsed = parse_config(GlueSettings, GlueArguments, args=[*args, "--bf16", "0", "--use_cpu", "1"])
                tasks = choose_tasks(parsed[0])
                planned.append([run.task for run in plan_runs(*parsed, tasks)])
                assert {task.transfer_from for task in tasks.values()} - {None} <= set(tasks)
    superglue = ["allnli", "wic", "wsc", "copa", "multirc", "boolq", "cb", "rte"]
    assert [sorted(names) for names in planned] == [sorted(RELEASED), sorted(superglue)]


BAD_FILES = [
    ({"extends": "bases.yaml"}, "bases.yaml"),
    ({"extends": "base.yaml", "snli": {"sorce": "a"}}, "mine.yaml, task snli has the unknown key 'sorce'"),
    ({"extends": "base.yaml", "snli": {"labels": ["a"]}}, "mine.yaml, task snli: .*two or more different names"),
    ({"extends": "base.yaml", "snli": {"unlabelled": 1}}, "`unlabelled` is 1: .* not be the number of a label"),
    (
        {"extends": "base.yaml", "snli": {"source_labels": {"x": "a", "y": "c"}}},
        "maps to the labels a, c, but .*`labels` is .*'a', 'b'",
    ),
]


@pytest.mark.parametrize("content, message", BAD_FILES)
def test_bad_files_of_tasks_are_refused(tmp_path, content, message):
    snli = {"source": "owner/snli", "texts": ["t"], "labels": ["a", "b"], "metrics": ["accuracy"]}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"snli": snli}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        read_tasks(str(tmp_path / "mine.yaml"))

"""A recipe called from Python: keywords become settings as a command line's words do."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from neobert_hf.common.recipe import recipe
from neobert_hf.training.fine_tuning import FineTuningArguments


@dataclass
class Places:
    """Settings that take one value or several."""

    source: list[str]
    more: list[str] | None = None
    lengths: list[int] = field(default_factory=list)
    model: str = field(default="m", metadata={"path": "or Hub id"})
    steps: int | None = None
    quick: bool = True
    kind: Literal["cls", "mean"] | None = None
    parts: list[str] | None = field(default=None, metadata={"choices": ["a", "b"]})


@recipe
def places(settings: Places) -> Places:
    return settings


@recipe
def train(settings: Places, arguments: FineTuningArguments) -> None:
    pass


def test_paths_are_texts_and_one_value_is_a_list_where_several_are_taken():
    found = places(source=Path("a"), more="b", lengths=3, model=Path("x/y"))
    assert (
        found == Places(["a"], ["b"], [3], "x/y") == places.main("--source a --more b --lengths 3 --model x/y".split())
    )
    assert places(source=[Path("a"), "b"], more=None).source == ["a", "b"]


def test_a_home_is_that_of_the_user(monkeypatch):
    """A shell leaves the ~ of `--model=~/x` as it is."""
    monkeypatch.setenv("HOME", "/home/ada")
    assert places(source="a", model="~/x").model == "/home/ada/x"
    assert places.main(["--source", "a", "--model=~/x"]).model == "/home/ada/x"


@pytest.mark.parametrize("wrong", [{"steps": "3"}, {"lengths": ["3"]}, {"quick": "false"}])
def test_a_text_is_no_number_and_not_true(wrong):
    """`if "false"` is true."""
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is the text"):
        places(source="a", **wrong)


def test_a_whole_number_may_be_written_as_a_float():
    assert places(source="a", steps=1e3, lengths=[2.0, 3]) == Places(["a"], steps=1000, lengths=[2, 3])
    with pytest.raises(ValueError, match="`steps` is 2.5; it must be a whole number"):
        places(source="a", steps=2.5)


@pytest.mark.parametrize("wrong", [{"kind": "meen"}, {"parts": ["a", "c"]}])
def test_what_is_none_of_the_choices_is_refused(wrong):
    assert places(source="a", kind="mean", parts="b") == Places(["a"], kind="mean", parts=["b"])
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is '{'meen' if 'kind' in wrong else 'c'}'"):
        places(source="a", **wrong)


@pytest.mark.parametrize("name", ["learning_rate", "quick", "lengths", "model"])
def test_none_is_no_value_of_a_setting_that_needs_one(name):
    with pytest.raises(ValueError, match=f"`{name}` is None"):
        train(**{"source": "a", "output_dir": "run", name: None})


@pytest.mark.parametrize(
    ("name", "wrong", "meant"), [("optim", "adamw", "adamw_torch"), ("lr_scheduler_type", "linaer", "linear")]
)
def test_choices_of_transformers_are_named(name, wrong, meant):
    with pytest.raises(ValueError, match=f"`{name}` is '{wrong}'; did you mean '{meant}'"):
        train(source="a", output_dir="run", **{name: wrong})


def test_a_folder_to_write_is_named_by_the_user(tmp_path):
    """Transformers would write to `trainer_output`."""
    with pytest.raises(TypeError, match=r"train\(\) needs `output_dir`"):
        train(source="a")
    with pytest.raises(ValueError, match="--output_dir"):
        train.main(["--source", "a"])
    (tmp_path / "own.yaml").write_text("output_dir: runs")
    train.main(["--source", "a", "--config", str(tmp_path / "own.yaml")])


def test_a_setting_without_its_name_is_refused_with_one_by_name():
    with pytest.raises(TypeError, match="places.*source="):
        places("a")


def test_a_misspelt_configuration_of_the_package_is_named():
    with pytest.raises(FileNotFoundError, match="embeddings/small.yaml"):
        places(source="a", config="embeddings/smal.yaml")

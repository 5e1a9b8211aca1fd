"""Settings from YAML and the command line: nothing unknown passes, and an error names the setting."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from neobert_hf.common.paths import PACKAGE
from neobert_hf.common.recipe import recipe
from neobert_hf.common.settings import SettingsParser, help_text, parse_config
from neobert_hf.evaluation.mteb.recipe import MTEBSettings
from neobert_hf.training.fine_tuning import FineTuningArguments
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


@dataclass
class Settings:
    rate: float
    name: str = "a"
    steps: int = 3
    warm: bool = True
    limit: int | None = None
    sizes: list[int] = field(default_factory=lambda: [1])
    weights: list[float] = field(default_factory=list)
    options: dict | str | None = None


def parse(tmp_path, text: str, *flags: str) -> Settings:
    (tmp_path / "settings.yaml").write_text(text)
    return parse_config(Settings, args=["--config", str(tmp_path / "settings.yaml"), *flags])[0]


def test_file_then_flags(tmp_path):
    text = "rate: 1e-3\nwarm: false\nlimit: 7\nsizes: [2, 3]\nweights: [1, 1e-4]\n"
    assert parse(tmp_path, text) == Settings(0.001, "a", 3, False, 7, [2, 3], [1.0, 1e-4])
    flags = ["--steps", "9", "--rate", "2", "--sizes", "4", "5"]
    assert parse(tmp_path, text, *flags) == Settings(2.0, "a", 9, False, 7, [4, 5], [1.0, 1e-4])
    assert parse(tmp_path, "rate: -1\nname: --odd\nsizes: 4\noptions: {a: 1}\nlimit: null\n") == Settings(
        -1.0, "--odd", sizes=[4], options='{"a": 1}'
    )
    assert parse_config(Settings, args=["--rate", "0.5"])[0] == Settings(0.5)


@pytest.mark.parametrize(
    "text, flags, message",
    [
        ("rate: 1\nstep: 5\n", [], "settings.yaml .*'step'.*'steps'"),
        ("rate: 1\nsteps: many\n", [], "settings.yaml.*steps.*many"),
        ("rate: 1\nsteps: 2.5\n", [], "settings.yaml.*steps.*2.5"),
        ("rate: null\n", [], "settings.yaml.*rate"),
        ("steps: 5\n", [], "--rate"),
        ("rate: 1\nname: !!python/object:os.system {}\n", [], "settings.yaml"),
        ("- 1\n", [], "settings.yaml"),
        ("rate: 1\n", ["--stepz", "5"], "'--stepz'.*'--steps'"),
        # The flag of a setting that is needed.
        ("steps: 1\n", ["--rat=2"], "'--rat'.*'--rate'"),
        ("rate: 1\n", ["--steps", "many"], "--steps.*many"),
        ("rate: 1\n", ["rows.csv"], "'rows.csv' .*without its setting"),
    ],
)
def test_errors_name_the_setting(tmp_path, text, flags, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        parse(tmp_path, text, *flags)


def test_of_a_flag_that_stands_twice_the_last_one_counts_and_is_noted(tmp_path, capsys):
    assert parse(tmp_path, "rate: 1\n", "--steps", "1", "--steps=2").steps == 2
    assert "`--steps` stands" in capsys.readouterr().err


@dataclass
class Paths:
    output: str = field(metadata={"path": True})
    model: str = field(default="m", metadata={"path": "or Hub id"})
    others: list[str] = field(default_factory=list, metadata={"path": "name=or Hub id"})
    several: list[str] | None = field(default=None, metadata={"path": True})


@dataclass
class Kinds:
    kind: Literal["cls", "mean"] | None = "cls"
    names: list[str] | None = field(default_factory=lambda: ["a"])


def test_null_is_no_value_on_the_command_line_as_in_a_file(tmp_path):
    found = parse(tmp_path, "rate: 1\nlimit: 3\n", "--limit", "null", "--options=null", "--name", "null")
    # A name must be given, and may be this one.
    assert (found.limit, found.options, found.name) == (None, None, "null")
    assert parse_config(Kinds, args="--kind null --names null".split())[0] == Kinds(None, None)


def test_a_shipped_config_writes_where_one_stands(tmp_path, monkeypatch):
    """Wherever the package is installed; and it finds what lies beside it."""
    monkeypatch.chdir(tmp_path)
    found = SettingsParser(load_example("train_contextual").kinds).read_config("embeddings/contextual_small.yaml")
    assert found["output_dir"].startswith("runs/") and Path(found["datasets"]).is_file()


def test_paths_of_a_file_are_relative_to_it_and_those_of_flags_to_where_one_stands(tmp_path, monkeypatch):
    for folder in ("a/b", "a/model", "here/own"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a" / "base.yaml").write_text("output: ../runs/x\nmodel: model\nseveral: ['*.txt', /abs]\n")
    (tmp_path / "a" / "b" / "own.yaml").write_text("extends: ../base.yaml\noutput: y\nothers: [m=../model, n=o/n]\n")

    def read(*args: str) -> Paths:
        return parse_config(Paths, args=list(args))[0]

    monkeypatch.chdir(tmp_path)
    expected = Paths("a/b/y", "a/model", ["m=a/model", "n=o/n"], ["a/*.txt", "/abs"])
    assert read("--config", "a/b/own.yaml") == expected
    assert read("--config", "a/base.yaml").output == "runs/x"
    assert read("--config", "a/base.yaml", "--output", "x", "--model", "model").model == "model"
    monkeypatch.chdir(tmp_path / "here")
    assert read("--config", "../a/b/own.yaml").output == "../a/b/y"


CONFIGS = [
    (line.removeprefix("# For examples/").removesuffix(".py."), file)
    for file in sorted((ROOT / "configs").rglob("*.yaml"))
    for line in file.read_text().splitlines()[:1]
    if line.startswith("# For examples/") and "demo.py" not in line
]


@pytest.mark.parametrize(("script", "file"), CONFIGS, ids=lambda part: getattr(part, "stem", part))
def test_every_shipped_config_is_read_by_its_recipe_and_found_by_name(script, file, tmp_path, monkeypatch):
    kinds = load_example(script).kinds
    found = SettingsParser(kinds).read_config(str(file))
    assert found
    monkeypatch.chdir(tmp_path)
    name = str(file.relative_to(ROOT / "configs"))
    assert SettingsParser(kinds).read_config(name).keys() == found.keys()


@dataclass
class Sized(Settings):
    """How large it is. Not shown."""

    size: int = field(default=4, metadata={"help": "in cm"})


def test_the_help_has_each_setting_once_and_the_needed_ones_first():
    for everything in (False, True):
        found = help_text((Sized, FineTuningArguments), everything)
        names = re.findall(r"^  --(\w+)", found, re.MULTILINE)
        assert len(names) == len(set(names)) and names[:3] == ["config", "rate", "output_dir"]
        assert {"size", "learning_rate", "early_stopping_patience"} < set(names)
        assert ("adam_beta1" in names) == everything
        # This recipe refuses them.
        assert not {"save_steps", "eval_strategy", "resume_from_checkpoint"} & set(names)
    assert "(None)" not in found and "How large it is:" in found


def greet(settings: Settings, paths: Paths) -> tuple:
    """Greets."""
    return settings, paths


def test_a_script_of_its_own_prints_its_settings_too(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(Settings, args=["--help"])
    assert not ended.value.code and "--limit" in capsys.readouterr().out


def test_keywords_are_settings_as_flags_are(tmp_path):
    called = recipe(greet)
    (tmp_path / "settings.yaml").write_text("rate: 1e-3\nsteps: 7\n")
    expected = (Settings(0.001, steps=9, sizes=[2]), Paths(str(tmp_path), others=["m=x"]))
    given = {"steps": 9, "sizes": 2, "output": tmp_path, "others": ["m=x"]}
    assert called(config=tmp_path / "settings.yaml", **given) == expected
    flags = ["--config", str(tmp_path / "settings.yaml"), "--steps", "9", "--sizes", "2", "--output", str(tmp_path)]
    assert called.main([*flags, "--others", "m=x"]) == expected
    with pytest.raises(TypeError, match=r"greet\(\).*'stepz'.*'steps'"):
        called(stepz=5, rate=1, output="x")
    with pytest.raises(TypeError, match=r"greet\(\) needs `rate` and `output`"):
        called(steps=5)


def test_configurations_of_the_package_are_found_by_name_and_write_into_the_current_folder(tmp_path, monkeypatch):
    """Where there is no clone; what they name beside them stays in the package."""
    monkeypatch.chdir(tmp_path)
    (settings,) = parse_config(MTEBSettings, args=["--config", "mteb/local.yaml", "--model", "mine"])
    tasks = PACKAGE / "configs" / "mteb" / "local_tasks.yaml"
    assert (settings.output_dir, settings.local_tasks) == ("runs/mteb_local", str(tasks))
    (tmp_path / "mine.yaml").write_text("extends: mteb/local.yaml\nname: mine")
    (again,) = parse_config(MTEBSettings, args=["--config", "mine.yaml", "--model", "mine"])
    assert (again.output_dir, again.local_tasks, again.name) == ("runs/mteb_local", str(tasks), "mine")

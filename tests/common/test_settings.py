"""Settings from YAML and the command line: typed, and nothing unknown passes."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pytest

from neobert_hf.common.settings import (
    LocalPath,
    NamedPathOrId,
    PathOrId,
    Range,
    check_ranges,
    differences,
    nearest,
    parse_config,
    read_yaml,
)
from neobert_hf.evaluation.pseudo_perplexity.recipe import PseudoPerplexityArguments
from neobert_hf.pretraining.preparing import PrepareArguments
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


def parse(tmp_path, text: str, *flags: str) -> Settings:
    (tmp_path / "settings.yaml").write_text(text)
    return parse_config(Settings, args=["--config", str(tmp_path / "settings.yaml"), *flags])[0]


def test_file_then_flags(tmp_path):
    text = "rate: 1e-3\nwarm: false\nlimit: 7\nsizes: [2, 3]\n"
    assert parse(tmp_path, text) == Settings(0.001, "a", 3, False, 7, [2, 3])
    assert parse(tmp_path, text, "--steps", "9", "--rate", "2") == Settings(2.0, "a", 9, False, 7, [2, 3])
    assert parse(tmp_path, "rate: 1\nlimit: null\n") == Settings(1.0)
    assert parse_config(Settings, args=["--rate", "0.5"])[0] == Settings(0.5)


@pytest.mark.parametrize(
    "text, flags, message",
    [
        ("rate: 1\nstep: 5\n", [], "settings.yaml has the unknown key 'step'; did you mean 'steps'"),
        ("rate: 1\nsteps: many\n", [], "settings.yaml.*'steps'.*int"),
        ("rate: fast\n", [], "settings.yaml.*'rate'"),
        ("- 1\n", [], "holds a list"),
        ("rate: 1\n", ["--stepz", "5"], "Unknown argument '--stepz'.*'--steps'"),
    ],
)
def test_errors_name_the_key(tmp_path, text, flags, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        parse(tmp_path, text, *flags)


def test_missing_required_setting(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(tmp_path, "steps: 5\n")
    assert "--rate" in capsys.readouterr().err
    # If its flag is misspelt, the error is about that.
    with pytest.raises(ValueError, match="Unknown argument '--rat=2' on the command line; did you mean '--rate'"):
        parse_config(Settings, args=["--rat=2"])
    # What begins with two dashes and has a space is a value, and help is help whatever else is there.
    assert parse_config(Settings, args=["--rate", "1", "--name", "--steps 4"])[0].name == "--steps 4"
    with pytest.raises(SystemExit):
        parse_config(Settings, args=["--rat", "1", "-h"])
    assert "sizes" in capsys.readouterr().out


def test_whole_numbers_in_lists_of_floats(tmp_path):
    @dataclass
    class Weights:
        weights: list[float]

    (tmp_path / "weights.yaml").write_text("weights: [1, 0.5]\n")
    (settings,) = parse_config(Weights, args=["--config", str(tmp_path / "weights.yaml")])
    assert settings.weights == [1.0, 0.5] and type(settings.weights[0]) is float


def test_extending_another_file(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "first.yaml").write_text("rate: 1e-3\nsteps: 5\n")
    (tmp_path / "base" / "second.yaml").write_text("extends: first.yaml\nsteps: 6\n")
    text = "extends: base/second.yaml\nlimit: 7\n"
    assert parse(tmp_path, text) == parse(tmp_path, "rate: 1e-3\nsteps: 6\nlimit: 7\n")


@pytest.mark.parametrize(
    ("base", "text", "message"),
    [
        ("stepz: 5\n", "extends: base.yaml\nrate: 1\n", "base.yaml has the unknown key 'stepz'"),
        ("rate: 1\n", "extends: base.yaml\nstepz: 1\n", "settings.yaml has the unknown key 'stepz'"),
        ("extends: settings.yaml\n", "extends: base.yaml\n", "extends it in turn"),
    ],
)
def test_errors_in_extended_files_name_the_file(tmp_path, base, text, message):
    (tmp_path / "base.yaml").write_text(base)
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, text)


def test_an_unknown_name_is_taken_for_the_one_that_it_begins_with_or_is_like():
    known = ["--ddp_find_unused_parameters", "--learning_rate", "--rope", "--num_train_epochs", "--train_data"]
    meant = {"--rope_parameters": "--rope", "--train_epochs": "--num_train_epochs", "--lerning_rate": "--learning_rate"}
    for wrong, right in meant.items():
        assert nearest(wrong, known) == f"; did you mean {right!r}?"


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    for name, text in (("settings", "extends: bse.yaml\n"), ("base", "steps: 1\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    for wanted, missing, meant in (
        ("seting.yaml", "seting.yaml", "settings.yaml"),
        ("settings.yaml", "bse.yaml", "base.yaml"),
    ):
        with pytest.raises(FileNotFoundError, match=f"no file .*{missing}; did you mean '{meant}'"):
            parse_config(Settings, args=["--config", str(tmp_path / wanted)])
    with pytest.raises(FileNotFoundError, match="no file .*a.yaml; .*none holds no .yaml file"):
        parse_config(Settings, args=["--config", str(tmp_path / "none" / "a.yaml")])


def test_every_shipped_config_is_read():
    """Those of the recipes in the tests of the recipes."""
    DemoArguments = load_example("demo").DemoArguments

    readers = {"demo.yaml": DemoArguments, "data/refinedweb.yaml": PrepareArguments}
    readers |= {"data/refinedweb_validation.yaml": PrepareArguments}
    readers |= {"pseudo_perplexity.yaml": PseudoPerplexityArguments}
    settings = {
        name: parse_config(reader, args=["--config", f"{ROOT}/configs/{name}"])[0] for name, reader in readers.items()
    }
    assert (ROOT / settings["demo.yaml"].pretraining).is_file()
    # Section 5.3: every position of 2,467 sequences.
    paper = settings["pseudo_perplexity.yaml"]
    assert (paper.max_documents, paper.sample, paper.stride) == (2_467, None, 1) and paper.min_tokens > 1_024
    # What one leaves out the other holds.
    assert settings["data/refinedweb.yaml"].skip_documents == settings["data/refinedweb_validation.yaml"].max_documents
    assert settings["data/refinedweb_validation.yaml"].skip_documents == 0
    recipes = {"adapt", "pretrain", "accelerate", "embeddings", "mteb", "glue", "tasks"}
    names = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {name for name in names if name.split("/")[0] not in recipes} == set(readers)


def test_positional_settings_come_first(tmp_path):
    @dataclass
    class Settings:
        source: str = ""
        output: str = ""
        dry_run: bool = False

    order = ("source", "output")
    (settings,) = parse_config(Settings, args=["a", "b", "--dry_run"], positional=order)
    assert settings == Settings("a", "b", True)
    assert parse_config(Settings, args=["a", "--output", "c"], positional=order) == (Settings("a", "c"),)
    with pytest.raises(ValueError, match="'c' on the command line is a value without a flag: only source, output"):
        parse_config(Settings, args=["a", "b", "c"], positional=order)
    with pytest.raises(ValueError, match="'a' on the command line is a value without a flag"):
        parse_config(Settings, args=["a"])


def test_a_setting_may_be_called_config(tmp_path, capsys):
    @dataclass
    class Settings:
        source: str
        config: str | None = None

    (tmp_path / "settings.yaml").write_text("config: a.json")
    options = {"positional": ("source",), "file_flag": "--settings", "prog": "neobert-hf convert"}
    assert parse_config(Settings, args=["a", "--config", "b.json"], **options) == (Settings("a", "b.json"),)
    file = str(tmp_path / "settings.yaml")
    assert parse_config(Settings, args=["a", "--settings", file], **options) == (Settings("a", "a.json"),)
    with pytest.raises(SystemExit):
        parse_config(Settings, args=["-h"], **options)
    printed = capsys.readouterr().out
    assert printed.startswith("usage: neobert-hf convert") and "before all flags: source." in printed


@pytest.mark.parametrize(
    "content, message",
    [
        ("- a\n- b", "holds a list"),
        ("a: [", "is not valid YAML .line 1: "),
        ("a: 1\n\tb: 2", "is not valid YAML .line 2: found character '.t' that cannot start any token"),
        ("3", "holds a int"),
        ("a: 2001-13-01", "is not valid YAML .month"),
        ("a: " + "[" * 5000, "is not valid YAML .maximum recursion"),
    ],
)
def test_what_is_no_mapping_is_named(tmp_path, content, message):
    (tmp_path / "file.yaml").write_text(content)
    with pytest.raises(ValueError, match=f"file.yaml {message}"):
        read_yaml(tmp_path / "file.yaml")


@pytest.mark.parametrize(
    "content, key", [("a: 1\nb: 2\na: 3\n", "a"), ("a:\n  - b: {c: 1, c: 2}\n", "c"), ("1: 2\n0x1: 3\n", "1")]
)
def test_a_key_that_stands_twice_is_refused(tmp_path, content, key):
    (tmp_path / "file.yaml").write_text(content)
    with pytest.raises(ValueError, match=f"file.yaml is not valid YAML .line [23]: the key '?{key}'? occurs twice"):
        read_yaml(tmp_path / "file.yaml")


def test_keys_of_another_mapping_may_be_replaced(tmp_path):
    (tmp_path / "file.yaml").write_text("a: {b: &base {x: 1, y: 2}, c: &more {<<: *base, x: 3}}\nd: {<<: *more}\n")
    assert read_yaml(tmp_path / "file.yaml")["d"] == {"x": 3, "y": 2}


@pytest.mark.parametrize("parent", ["5", "", "[base.yaml]"])
def test_another_file_is_named_by_a_text(tmp_path, parent):
    with pytest.raises(ValueError, match="settings.yaml: `extends` is .*it must name another YAML file"):
        parse(tmp_path, f"rate: 1\nextends: {parent}\n")


@dataclass
class Numbers:
    count: Annotated[int, Range(1)] = 1
    share: Annotated[float, Range(0, below=1)] | None = None
    sizes: list[Annotated[int, Range(2, 9)]] = field(default_factory=list)
    plain: float = 0.0
    inherited: float = 1.0
    options: dict | None = None
    name: str = ""
    switch: bool = False

    def __post_init__(self):
        check_ranges(self, {"inherited": Range(above=0)})


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("count", 0, "it must be 1 or more"),
        ("count", True, "it must be 1 or more"),
        ("count", 2.0, "it must be a whole number, 1 or more"),
        ("count", None, "it must be a whole number, 1 or more"),
        ("count", math.nan, "it must be a whole number, 1 or more"),
        ("share", 1, "it must be 0 or more and below 1"),
        ("share", -math.inf, "it must be a number, 0 or more and below 1"),
        ("share", "0.5", "it must be a number, 0 or more and below 1"),
        ("sizes", [3, 10], "each must be from 2 to 9"),
        ("sizes", [3, math.nan], "each must be a whole number, from 2 to 9"),
        ("plain", math.nan, "it must be a number, finite"),
        ("plain", math.inf, "it must be a number, finite"),
        ("plain", 10**400, "it must be finite"),
        ("inherited", 0, "it must be above 0"),
        ("inherited", math.nan, "it must be a number, above 0"),
        ("options", {"a": [1, math.inf]}, "each must be a number, finite"),
    ],
)
def test_numbers_out_of_range_are_named(name, value, needed):
    with pytest.raises(ValueError, match=re.escape(f"`{name}` is {value!r}; {needed}.")):
        Numbers(**{name: value})


def test_numbers_in_range_and_what_is_no_number_pass():
    Numbers(3, 0.5, [2, 9], -1e9, 1e-300, {"a": "text", "b": [True, None, 3]}, "nan", True)
    Numbers(np.int64(3), np.float32(0.5), [np.int32(2)], 10**18)


def test_help_says_what_is_allowed(capsys):
    with pytest.raises(SystemExit):
        parse_config(Numbers, args=["-h"])
    assert "0 or more and below 1" in " ".join(capsys.readouterr().out.split())


def test_differences():
    assert differences({"seed": 1}, {"seed": 1, "dtype": None}) == []
    found = differences({"tokenizer_fingerprint": "a"}, {"tokenizer_fingerprint": "b", "seed": 1})
    assert found == [("seed", None, 1), ("tokenizer_fingerprint", "a", "b")]


@dataclass
class Paths:
    output: LocalPath
    model: PathOrId = "m"
    others: list[NamedPathOrId] = field(default_factory=list)
    several: list[LocalPath] | None = None


def test_paths_of_a_file_are_relative_to_it_and_those_of_flags_to_where_one_stands(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    for folder in ("a/b", "a/model", "runs/model", "here/own"):
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
    assert read("--config", str(tmp_path / "a" / "b" / "own.yaml")).model == str(tmp_path / "a" / "model")


def test_what_lies_only_where_one_stands_is_no_guess(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "runs" / "model").mkdir(parents=True)
    for text in ("output: runs/model\n", "output: x\nmodel: runs/model\n"):
        (tmp_path / "configs" / "a.yaml").write_text(text)
        with pytest.raises(ValueError, match="is 'runs/model'. Paths in a file are relative.*write ../runs/model if"):
            parse_config(Paths, args=["--config", "configs/a.yaml"])
    (tmp_path / "configs" / "a.yaml").write_text("output: ./runs/model\nmodel: owner/name\n")
    found = parse_config(Paths, args=["--config", "configs/a.yaml"])[0]
    assert (found.output, found.model) == ("configs/runs/model", "owner/name")


def test_shipped_files_name_the_repositorys_folders_from_where_they_lie():
    for file in (ROOT / "configs").rglob("*.yaml"):
        if file.parent.name != "mteb":  # Whose tasks are examples, with data beside the file.
            found = re.findall(r"^\s*\w+: (?:runs|data|configs)/\S+", file.read_text(), re.MULTILINE)
            assert not found, f"{file}: {found[0]} is relative to the file, write ../ before it"

"""The pages of the documentation, and their blocks run at reduced size in this process.

A block of YAML that begins with `# my/...` is written to that file. Commands that need the Hub, several GPUs or hours
are only read: the script is there, and its own reader of settings takes every flag.
"""

import re
import runpy
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import neobert_hf_cli
from neobert_hf.common import recipe
from neobert_hf.common.settings import parse_config, settings_of_keywords
from tests.helpers.examples import command_of, to_flags
from tests.helpers.models import ROOT


PUBLISHED = "chandar-lab/NeoBERT"

# What shows that a command is beyond a test: it is read only.
TOO_LARGE = (PUBLISHED, "accelerate launch", "mteb/eng_v1.yaml", "configs/data/", "data/yours", "/shared/")
# Commands that change the machine, or that only a shell knows.
NOT_OURS = ("hf auth login", "export ")
# Scripts that are no recipes.
NO_RECIPES = ("demo", "onnx_inference", "sample_data")


@dataclass
class Block:
    """One fenced block of a page: its language and its text."""

    language: str
    text: str

    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block; lines that end in a backslash go on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)]


def not_printed(page: Path, printed: str, digits: bool = False) -> list[str]:
    """The lines of a page's `text` blocks that were not printed; unless `digits` is set, with any numbers and hashes.

    `...` stands for lines that the page leaves out.
    """

    def plain(line: str) -> str:
        words = " ".join(line.split())
        return words if digits else re.sub(r"\b[0-9a-f]{32}\b|-?\d[\d.,]*", "N", words)

    shown = [line for block in blocks_of(page) if block.language == "text" for line in block.text.splitlines()]
    found = {plain(line) for line in printed.splitlines()}
    return [line for line in shown if line != "..." and plain(line) not in found]


@dataclass
class PageRunner:
    """Runs the blocks of pages in the current folder.

    Args:
        model: what stands for the published checkpoint in blocks of Python.
        reduced: settings that a recipe gets on top, by its name.
        read_only: beginnings of commands that are not run, besides those that are too large.
    """

    model: Path
    reduced: dict[str, dict] = field(default_factory=dict)
    read_only: tuple[str, ...] = ()
    names: dict = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def run(self, page: Path) -> None:
        for block in blocks_of(page):
            if block.language == "python":
                code = block.text.replace(PUBLISHED, str(self.model))
                with patch.object(recipe, "settings_of_keywords", self._reduced_settings):
                    exec(compile(code, page.name, "exec"), self.names)
            elif block.language == "yaml" and block.text.startswith("# my/"):
                file = Path(block.text.splitlines()[0].removeprefix("# "))
                file.parent.mkdir(exist_ok=True)
                file.write_text(block.text)
            elif block.language == "bash":
                for command in block.commands():
                    self.run_command(command)

    def run_command(self, words: list[str]) -> None:
        line = " ".join(words)
        if line in self.done or line.startswith(NOT_OURS):
            return
        self.done.append(line)
        read_only = line.startswith(self.read_only) or any(mark in line for mark in TOO_LARGE)
        if words[:2] == ["pip", "install"]:
            for extra in re.findall(r"\[(.*)\]", words[-1])[0].split(","):
                assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), line
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif words[0] == "neobert-hf":
            self._run_recipe(words[1], words[2:], read_only)
        else:
            self._run_script(words, read_only)

    def _reduced_settings(self, kinds, given: dict, name: str) -> tuple:
        return settings_of_keywords(kinds, given | self.reduced.get(name, {}), name)

    def _run_script(self, words: list[str], read_only: bool) -> None:
        (script,) = (word for word in words if word.endswith(".py"))
        launcher, args = words[: words.index(script)], words[words.index(script) + 1 :]
        assert launcher[-1] == "python" or launcher[:2] == ["accelerate", "launch"], words
        for file in [script, *(word for word in launcher if word.endswith(".yaml"))]:
            assert (ROOT / file).is_file(), file
        if Path(script).parent.name != "examples":
            return
        if Path(script).stem in NO_RECIPES:
            if not read_only:
                with patch.object(sys, "argv", [script, *args]):
                    runpy.run_path(str(ROOT / script), run_name="__main__")
            return
        several = Path(script).stem == "semantic_search"
        self._run_recipe(args.pop(0) if several else command_of(Path(script).stem), args, read_only)

    def _run_recipe(self, command: str, args: list[str], read_only: bool) -> None:
        function = neobert_hf_cli.load(command)
        if read_only:
            # Some commands are for a GPU.
            with patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True):
                parse_config(*function.kinds, args=args, positional=function.positional)
        else:
            assert function.main([*args, *to_flags(self.reduced.get(command, {}))]) not in (1, False), args

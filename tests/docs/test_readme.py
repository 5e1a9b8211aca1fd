"""The README's commands and code run, on a small model in place of the published one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel
from tests.helpers.models import ROOT, small_model
from tests.helpers.small_tokenizer import small_tokenizer, tiny_tokenizer


README = (ROOT / "README.md").read_text()


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_blocks_run_in_order(tmp_path):
    small_model(NeoBERTForMaskedLM).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    blocks = code_blocks(README, "python")
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(compile(block.replace("chandar-lab/NeoBERT", str(tmp_path)), "README.md", "exec"), names)
    assert names["states"].shape[-1] == 64 and (names["states"][1, 4:] == 0).all()
    assert names["loss"].isfinite()


def test_pretraining_commands_run(tmp_path):
    """On 60 documents, two steps."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "corpus").mkdir()
    documents = [json.dumps({"text": text}) for text in topics.values()][:60]
    (tmp_path / "corpus" / "all.jsonl").write_text("\n".join(documents))
    (block,) = (block for block in code_blocks(README, "bash") if "examples/prepare_data.py" in block)
    commands = block.replace("1000", "10").replace("python ", f"{sys.executable} ").strip().splitlines()
    assert [command.split()[1] for command in commands] == [
        "examples/train_tokenizer.py", "examples/prepare_data.py", "examples/prepare_data.py", "examples/pretrain.py"
    ]  # fmt: skip
    commands[-1] += " --max_steps 2 --warmup_steps 0 --num_hidden_layers 1 --use_cpu true --report_to none"
    for command in commands:
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "runs" / "small" / "model" / "model.safetensors").is_file()


def run_block(containing: str, folder: Path, changes: dict[str, str] | None = None) -> str:
    """Run the commands of a block in a folder, with other words where the size must be smaller; what they print."""
    for name in ("examples", "configs", "docs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    (block,) = (block for block in code_blocks(README, "bash") if containing in block)
    for words, instead in (changes or {}).items():
        assert words in block
        block = block.replace(words, instead)
    # `python` and `neobert-hf` of this environment.
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    output = ""
    for command in block.strip().splitlines():
        done = subprocess.run(command, shell=True, cwd=folder, env=os.environ | path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        output += done.stdout
    return output


def save_small(cls, folder: Path) -> None:
    tokenizer = small_tokenizer(model_max_length=64)
    small_model(cls, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_pseudo_perplexity_command_runs(tmp_path):
    save_small(NeoBERTForMaskedLM, tmp_path / "model")
    (tmp_path / "articles").mkdir()
    (tmp_path / "articles" / "all.jsonl").write_text(json.dumps({"text": " ".join(topics.values())}))
    changes = {"chandar-lab/NeoBERT": "model", "1024 4096 8192": "16 32", "--sample 64": "--sample 4"}
    assert "| neobert, yarn:2 |" in run_block("pseudo_perplexity.py", tmp_path, changes)
    assert (tmp_path / "runs" / "long" / "pseudo_perplexity.png").is_file()


def test_search_commands_run(tmp_path):
    save_small(NeoBERTModel, tmp_path / "runs" / "embeddings" / "model")
    output = run_block("semantic_search.py", tmp_path)
    assert "1 documents embedded" in output and "scaling.md" in output


def test_checkpoint_commands_run(tmp_path):
    save_small(NeoBERTForMaskedLM, tmp_path / "original" / "checkpoint")
    shutil.move(tmp_path / "original" / "checkpoint" / "config.json", tmp_path / "original")
    save_small(NeoBERTModel, tmp_path / "runs" / "embeddings" / "model")
    output = run_block("neobert-hf convert", tmp_path)
    assert "FAIL" not in output
    assert (tmp_path / "exported" / "onnx" / "model_quantized.onnx").is_file()
    assert "Not sent." in run_block("neobert-hf publish", tmp_path)


def test_files_named_in_commands_exist():
    names = re.findall(r"(?:configs|examples)/\S+\.(?:yaml|py|sbatch)", README)
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).is_file(), name


def test_make_targets_exist():
    targets = re.findall(r"^make (\w+)", "\n".join(code_blocks(README, "bash")), re.MULTILINE)
    assert set(targets) == {"demo", "test"}
    for target in [*targets, "slow", "lint", "bench"]:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_files_named_in_the_layout_exist():
    for name in re.findall(r"`([\w/]+\.(?:py|md|txt))`", README.split("## Layout")[1]):
        assert any(ROOT.glob(f"**/{Path(name).name}")), name

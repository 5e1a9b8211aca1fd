"""The wheel alone, in an empty environment and an empty folder: its commands run with one extra.

By default the environment borrows the libraries that are installed here. `make wheel` sets NEOBERT_HF_INSTALL, and pip
installs each extra, and nothing else, from the package index.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import ROOT, save_checkpoint


pytestmark = pytest.mark.slow
TRAINING = "--max_steps 2 --use_cpu true --report_to none"
PREPARING = "prepare_data --source texts.jsonl --tokenizer tokenizer --max_length 32 --held_out_share 0.3"
# By extra; each command runs in the folder that the one before it has left.
COMMANDS = {
    "": ["convert checkpoint original --to original"],
    "train": [
        "train_tokenizer --source texts.jsonl --vocab_size 300 --output_dir tokenizer",
        f"{PREPARING} --output_dir shards",
        f"{PREPARING} --part held_out --output_dir held_out",
        "pretrain --config pretrain/demo.yaml --train_data shards --validation_data held_out --hidden_size 48 "
        f"--num_hidden_layers 1 --max_length 32 {TRAINING}",
    ],
    "embed": [
        "doctor checkpoint",
        f"finetune_embeddings --model checkpoint --pairs pairs.csv --query title --positive body {TRAINING} "
        "--per_device_train_batch_size 4 --warmup_steps 0 --output_dir trained",
        "embed --model trained/model --source texts.jsonl --output_dir vectors",
        "publish trained/model me/model --dry_run",
    ],
    "eval": [
        f"classify --model checkpoint --data labels.csv --per_device_train_batch_size 4 {TRAINING} --eval_steps 1 "
        "--output_dir classes"
    ],
    "search": [
        "index --index index --model embedder --source texts.jsonl",
        "query --index index --text list --top_k 2",
    ],
    "export": ["export embedder exported --precisions float32", "export embedder page --space"],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, folder]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def work(tmp_path) -> Path:
    """A folder with small models and tables of all kinds."""
    save_checkpoint(tmp_path / "checkpoint", NeoBERTForMaskedLM)
    SentenceTransformer(str(tmp_path / "checkpoint"), device="cpu").save(str(tmp_path / "embedder"))
    texts = [f"the {word} of a list, number {number}" for number in range(20) for word in ("value", "end")]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "pairs.csv").write_text(
        "title,body\n" + "".join(f'"{text[:12]} {text[-2:]}","{text}"\n' for text in texts)
    )
    (tmp_path / "labels.csv").write_text("text,label\n" + "".join(f'"{text}",{text.split()[1]}\n' for text in texts))
    return tmp_path


@pytest.mark.parametrize("extra", COMMANDS)
def test_the_commands_of_an_extra_run_after_pip_install_alone(extra, wheel, work):
    environment = work / "environment"
    venv.create(environment, symlinks=True, with_pip=True)
    python = environment / "bin" / "python"
    # pip of the new environment, which knows no other: that of another one would replace what is installed there.
    pip = [python, "-I", "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt"]
    if os.environ.get("NEOBERT_HF_INSTALL"):
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, f"{wheel}[{extra}]" if extra else wheel], check=True)
    else:
        subprocess.run([*pip, "--no-deps", wheel], check=True)
        # The libraries, but not the editable installation, whose .pth file is not read from there.
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "others.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    variables = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [python, "-c", "import neobert_hf; print(neobert_hf.__file__)"],
        capture_output=True, text=True, env=variables, cwd=work,
    )  # fmt: skip
    assert found.stdout.startswith(str(environment)), found.stdout + found.stderr
    for line in COMMANDS[extra]:
        command = [environment / "bin" / "neobert-hf", *line.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=work)
        assert done.returncode == 0, f"{line}: {done.stdout[-1000:]} {done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, line
    outputs = {
        "train": "runs/demo/pretraining/model",
        "embed": "vectors",
        "search": "index",
        "export": "page/index.html",
    }
    assert (work / outputs.get(extra, "")).exists()

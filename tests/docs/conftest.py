"""One folder with small models and a small corpus, of which every page gets a copy."""

import json
import runpy
import shutil
import sysconfig
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from neobert_hf import NeoBERTForMaskedLM
from tests.helpers.models import ROOT, save_checkpoint
from tests.helpers.pages import PageRunner


# As many rows as each file of the guides' data may keep.
MOST_ROWS = {
    "docstrings": 120,
    "docstrings_held_out": 24,
    "reference": 24,
    "returned": 120,
    "train": 64,
    "validation": 24,
}
# Part of the standard library, to be read in no time.
PACKAGES = ("asyncio", "email", "logging", "unittest", "xml")

# Runs of two steps.
TASK = {"max_length": 32, "max_steps": 2, "eval_steps": 1, "per_device_train_batch_size": 4}
PAIRS = {"max_steps": 2, "eval_steps": 2, "per_device_train_batch_size": 8, "report_to": "none"}
REDUCED = {
    "pretrain": {
        "max_steps": 2,
        "warmup_steps": 0,
        "num_hidden_layers": 1,
        "hidden_size": 48,
        "max_length": 32,
        "micro_batch_tokens": 64,
        "global_batch_tokens": 64,
        "eval_steps": 2,
        "report_to": "none",
    },
    "finetune_embeddings": PAIRS,
    # A teacher that is there, in place of one on the Hub.
    "distil": {
        "teacher": "runs/embeddings/model",
        "passages": 60,
        "num_train_epochs": 1,
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    },
    "train_contextual": PAIRS | {"context_size": 4, "mini_batch_size": 4},
    "run_glue": {"max_length": 32, "num_train_epochs": 1, "max_steps": 2, "eval_steps": 1, "report_to": "none"},
    "classify": TASK,
    "tag": TASK,
    "answer": TASK | {"max_length": 64, "stride": 1},
    "pseudo_perplexity": {"lengths": [16, 32], "min_tokens": 32, "max_documents": 2, "sample": 2},
}


@pytest.fixture(scope="session")
def guide_data(tmp_path_factory) -> Path:
    """What the guides share: `corpus/` and `data/` of `examples/sample_data.py`, cut short, and models in `runs/`."""
    folder = tmp_path_factory.mktemp("guides")
    for package in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, folder / "library" / package)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sysconfig, "get_path", lambda name: str(folder / "library"))
        runpy.run_path(str(ROOT / "examples" / "sample_data.py"))["main"]()
    for file in folder.glob("*/**/*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        rows = lines[:: max(1, len(lines) // MOST_ROWS[file.stem])][: MOST_ROWS[file.stem]]
        assert all(json.loads(row) for row in rows)
        file.write_text("".join(rows))
    code = folder / "data/code.conll"
    code.write_text("\n\n".join(code.read_text().split("\n\n")[:400]))
    for name in ("tiny", "domain"):
        save_checkpoint(folder / "runs" / name / "model", NeoBERTForMaskedLM)
    for name in ("embeddings", "my_embeddings"):
        SentenceTransformer(str(folder / "runs/tiny/model")).save(str(folder / "runs" / name / "model"))
    return folder


@pytest.fixture
def workplace(guide_data, tmp_path, monkeypatch) -> Path:
    """A folder like a clone in which the data of the guides are; the current one."""
    for name in ("corpus", "data", "runs"):
        shutil.copytree(guide_data / name, tmp_path / name)
    for name in ("examples", "configs", "docs", "benchmarks", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runner(workplace) -> PageRunner:
    return PageRunner(model=workplace / "runs/tiny/model", reduced=dict(REDUCED))

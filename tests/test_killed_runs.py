"""Every command that goes on after an interruption ends with the same bits; and of two at once, one runs."""

import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import yaml
from sentence_transformers import SentenceTransformer

from neobert_hf.common.fingerprints import file_checksum
from tests.helpers import embedding_runs, glue_runs, task_runs
from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import small_flags, start, to_flags
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.word_tokenizer import word_tokenizer


@dataclass
class Command:
    """A script, its flags without the folder that it writes, and the files of that folder that must come out equal.

    Args:
        flag: that names the folder.
        clean: what of a result file differs between equal runs.
    """

    script: str
    flags: list[str]
    results: tuple[str, ...]
    flag: str = "--output_dir"
    clean: Callable[[Path], object] = file_checksum

    def arguments(self, folder: Path) -> list[str]:
        first = ["index"] if self.script == "semantic_search" else []
        # Tests of pretraining expect the folder first.
        return [*first, self.flag, str(folder), *self.flags]

    def start(self, folder: Path):
        return start(self.arguments(folder), script=self.script)

    def found(self, folder: Path) -> dict:
        files = sorted(file for pattern in self.results for file in folder.glob(pattern))
        return {str(file.relative_to(folder)): self.clean(file) for file in files}


def make_material(folder: Path) -> None:
    """Text, a tokenizer, encoders, pairs and a task in GLUE's form."""
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    documents = [text[start : start + 600] for text in texts for start in range(0, len(text), 600)][:400]
    tokenizer = word_tokenizer("\n".join(documents).lower(), 600, 128)
    tokenizer.save_pretrained(folder / "tokenizer")
    glue_runs.save_encoder(folder / "encoder", tokenizer)
    glue_runs.save_encoder(folder / "glue_encoder", small_tokenizer(model_input_names=["input_ids", "attention_mask"]))
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(documents)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [text.split() for text in documents if len(text.split()) > 60]
    pairs = [{"query": " ".join(text[:4]), "positive": " ".join(text[4:24])} for text in words]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    pairs = {"source": str(folder / "pairs.jsonl"), "query": "query", "positive": "positive", "instruction": "Find it."}
    (folder / "datasets.yaml").write_text(yaml.safe_dump({"train": {"pairs": pairs}}))
    # It mines and teaches.
    SentenceTransformer(str(folder / "encoder"), device="cpu").save(str(folder / "helper"))
    (folder / "documents").mkdir()
    for number, text in enumerate(words[:40]):
        sections = [f"## {' '.join(text[at : at + 3])}\n{' '.join(text[at + 3 : at + 30])}" for at in (0, 30)]
        (folder / "documents" / f"{number}.md").write_text("\n\n".join(sections))
    training = {name: value for name, value in embedding_runs.SMALL.items() if name not in ("use_cpu", "bf16")}
    (folder / "training.yaml").write_text(yaml.safe_dump(training | {"max_steps": 8, "save_steps": 4}))
    task = {"type": "Retrieval", "data": "pairs.jsonl", "columns": {"query": "query", "document": "positive"}}
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"Pairs": task}))
    task_runs.write_csv(folder / "labelled.csv", task_runs.text_rows(120))
    (folder / "glue").mkdir()
    glue_runs.write_rows({"sst2": glue_runs.make_rows()["sst2"]}, folder / "glue")


def stored_passages(file: Path) -> list:
    """Of an index, without the vectors: batches of other sizes round in another way."""
    import lancedb

    rows = lancedb.connect(file.parent).open_table("passages").to_arrow().drop(["vector"]).to_pylist()
    return sorted(map(str, rows))


def score_of(file: Path) -> float:
    return json.loads(file.read_text())["score"]


MODEL = ("model/*.safetensors", "model/*.json")


def make_commands(folder: Path) -> dict[str, Command]:
    encoder, text, helper = folder / "encoder", folder / "text.jsonl", folder / "helper"
    prepare = {"source": text, "tokenizer": folder / "tokenizer", "documents_per_shard": 40, "max_length": 64}
    dense = {"model": encoder, "datasets": folder / "datasets.yaml", "max_steps": 12, "save_steps": 3}
    dense |= {"eval_strategy": "no"}
    mined = dense | {"miner": helper, "guide": helper, "negatives": 2, "lora_rank": 2, "lora_dropout": 0.1}
    contextual = embedding_runs.SMALL | dense | {"context_size": 8, "mini_batch_size": 3, "first_model": helper}
    contextual |= {"config": ROOT / "configs" / "embeddings" / "contextual_small.yaml"}
    glue = glue_runs.SMALL | {"model": folder / "glue_encoder", "data_dir": folder / "glue", "task": "sst2"}
    ppl = {"models": f"m={encoder}", "source": text, "sample": 8, "max_documents": 60, "batch_tokens": 64}
    index = {"model": encoder, "source": text, "id_column": "id", "write_every": 4, "device": "cpu"}
    mteb = {"model": helper, "name": "m", "local_tasks": folder / "tasks.yaml"}
    retrieval = {"documents": folder / "documents", "model": encoder, "training": folder / "training.yaml"}
    retrieval |= {"held_out": 0.2, "negatives": 2}
    distil = {"teacher": helper, "texts": text, "passages": 60, "hidden_size": 12, "num_attention_heads": 2}
    distil |= {"intermediate_size": 24, "per_device_train_batch_size": 8, "num_train_epochs": 1, "save_steps": 3}
    distil |= {"use_cpu": True}
    changes = {"max_steps": 24, "save_steps": 4, "logging_steps": 5, "dataloader_num_workers": 1}
    pretrain = small_flags(folder / "prepared", Path("unused"), **changes)[2:]
    labelled = task_runs.flags(Path("unused"), folder / "glue_encoder", folder / "labelled.csv", eval_steps=4)[2:]
    return {
        "prepare_data": Command("prepare_data", to_flags(prepare), ("*.arrow", "tokenizer/*")),
        "workers": Command("prepare_data", to_flags(prepare | {"workers": 2}), ("*.arrow", "manifest.json")),
        "pretrain": Command("pretrain", pretrain, MODEL),
        "padded": Command("pretrain", [*pretrain, "--layout", "padded"], MODEL),
        "finetune_embeddings": Command("finetune_embeddings", embedding_runs.to_flags("dense", dense), MODEL),
        "sparse": Command("train_sparse_encoder", embedding_runs.to_flags("sparse", dense), MODEL),
        "reranker": Command("train_reranker", embedding_runs.to_flags("reranker", dense), MODEL),
        "mined": Command("finetune_embeddings", embedding_runs.to_flags("dense", mined), MODEL),
        "train_contextual": Command("train_contextual", to_flags(contextual), MODEL),
        "distil": Command("distil", to_flags(distil), MODEL),
        "run_classification": Command("run_classification", labelled, MODEL),
        "run_glue": Command("run_glue", to_flags(glue), ("*/*/*.json", "*/*/*/model/*.safetensors")),
        "run_mteb": Command("run_mteb", to_flags(mteb), ("m/*.json",), clean=score_of),
        "pseudo_perplexity": Command("pseudo_perplexity", to_flags(ppl | {"device": "cpu"}), ("*/*/*.jsonl",)),
        "semantic_search": Command(
            "semantic_search", to_flags(index), ("passages.lance",), flag="--index", clean=stored_passages
        ),
        "retrieval_from_documents": Command(
            "retrieval_from_documents", to_flags(retrieval), ("report.json", "*/model/*.safetensors")
        ),
    }


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    return folder


def run_to_the_end(command: Command, folder: Path) -> dict:
    process = command.start(folder)
    assert process.end() == [0], process.output[-3000:]
    return command.found(folder)


COMMANDS = list(make_commands(Path("unused")))


def command_with_data(material: Path, name: str) -> Command:
    """A command, after the data that it reads were prepared."""
    if name in ("pretrain", "padded") and not (material / "prepared").exists():
        run_to_the_end(make_commands(material)["prepare_data"], material / "prepared" / "train")
    return make_commands(material)[name]


@pytest.mark.parametrize(
    "name", [name if name == "pretrain" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_killed_twice_it_ends_with_the_same_bits(material, tmp_path, name):
    command = command_with_data(material, name)
    began = time.monotonic()
    expected = run_to_the_end(command, tmp_path / "whole")
    seconds, draw = time.monotonic() - began, random.Random(name)
    assert expected
    for _ in range(2):
        process = command.start(tmp_path / "run")
        time.sleep(seconds * draw.uniform(0.3, 0.9))
        # It may be through already.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.end()
    assert run_to_the_end(command, tmp_path / "run") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_of_two_at_once_one_runs(material, tmp_path, name):
    command = command_with_data(material, name)
    processes = [command.start(tmp_path / "run") for _ in range(2)]
    assert sorted(code for process in processes for code in process.end()) == [0, 1]
    assert "is being written by" in "".join(process.output for process in processes)
    assert command.found(tmp_path / "run")

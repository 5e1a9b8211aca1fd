"""Of two commands at once that write one folder, one runs; and killed, the same command ends with the same bits."""

import contextlib
import json
import random
import time
from pathlib import Path

import pytest
import yaml
from sentence_transformers import CrossEncoder, SentenceTransformer

from neobert_hf.common.fingerprints import file_checksum
from tests.helpers import embedding_runs, glue_runs, task_runs
from tests.helpers.examples import to_flags
from tests.helpers.models import save_encoder
from tests.helpers.pretraining_runs import small_flags, start
from tests.helpers.small_tokenizer import small_tokenizer, word_tokenizer


@pytest.fixture(scope="module")
def material(corpus, tmp_path_factory) -> Path:
    """Encoders, pairs, documents and tasks."""
    folder = tmp_path_factory.mktemp("material")
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    save_encoder(folder / "encoder", word_tokenizer("\n".join(texts).lower(), 600, 128))
    save_encoder(folder / "glue_encoder", small_tokenizer())
    # It mines and teaches.
    SentenceTransformer(str(folder / "encoder"), device="cpu").save(str(folder / "helper"))
    CrossEncoder(str(folder / "encoder"), num_labels=1, device="cpu").save(str(folder / "reranker"))
    words = [text.split() for text in texts if len(text.split()) > 60]
    pairs = [{"query": " ".join(text[:4]), "positive": " ".join(text[4:24])} for text in words]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "documents").mkdir()
    for number, text in enumerate(words[:40]):
        sections = [f"## {' '.join(text[at : at + 3])}\n{' '.join(text[at + 3 : at + 30])}" for at in (0, 30)]
        (folder / "documents" / f"{number}.md").write_text("\n\n".join(sections))
    training = {name: value for name, value in embedding_runs.SMALL.items() if name not in ("use_cpu", "bf16")}
    (folder / "training.yaml").write_text(yaml.safe_dump(training | {"max_steps": 8, "save_steps": 4}))
    task = {"type": "Retrieval", "data": "pairs.jsonl", "columns": {"query": "query", "document": "positive"}}
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"Pairs": task}))
    task_runs.write_csv(folder / "labelled.csv", task_runs.text_rows(120))
    glue_runs.write_rows(folder / "glue")
    return folder


def flags_of(corpus: Path, material: Path) -> dict[str, list[str]]:
    """The flags of each script, without `--output_dir`."""
    encoder, helper, text = material / "encoder", material / "helper", corpus / "train.jsonl"
    prepare = {"source": text, "tokenizer": corpus / "tokenizer", "documents_per_shard": 40}
    corpora = {"source": text, "rows_per_part": 16}
    changes = {"max_steps": 24, "save_steps": 4, "logging_steps": 5, "dataloader_num_workers": 1}
    # A tenth of the queries is held out, and a checkpoint stands between two logs.
    pairs = {"model": encoder, "pairs": material / "pairs.jsonl", "save_steps": 3, "logging_steps": 2}
    mined = pairs | {"miner": helper, "guide": helper, "negatives": 2, "lora_rank": 2, "lora_dropout": 0.1}
    scored = pairs | {"miner": helper, "negatives": 2, "teacher": material / "reranker"}
    contextual = pairs | {"context_size": 8, "mini_batch_size": 3, "first_model": helper}
    retrieval = {"documents": material / "documents", "model": encoder, "training": material / "training.yaml"}
    distil = {"teacher": helper, "texts": text, "passages": 60, "hidden_size": 12, "num_attention_heads": 2}
    distil |= {"intermediate_size": 24, "per_device_train_batch_size": 8, "num_train_epochs": 1, "save_steps": 3}
    glue = {"model": material / "glue_encoder", "data_dir": material / "glue", "task": "sst2"}
    labelled = {"model": material / "glue_encoder", "data": material / "labelled.csv", "eval_steps": 4}
    return {
        "prepare_data": to_flags(prepare),
        "deduplicate": to_flags(corpora | {"bands": 4, "rows_per_band": 4}),
        "embed": to_flags(corpora | {"model": helper, "batch_size": 2}),
        "pretrain": small_flags(corpus, Path("unused"), **changes)[2:],
        "finetune_embeddings": embedding_runs.to_flags("dense", mined),
        "train_reranker": embedding_runs.to_flags("reranker", scored),
        "train_contextual": embedding_runs.to_flags("contextual", contextual),
        "retrieval_from_documents": to_flags(retrieval | {"held_out": 0.2}),
        "distil": to_flags(distil | {"use_cpu": True}),
        "run_classification": to_flags(task_runs.SMALL | labelled),
        "run_glue": to_flags(glue_runs.SMALL | glue),
        "run_mteb": to_flags({"model": helper, "name": "m", "local_tasks": material / "tasks.yaml"}),
    }


# What a command must write in the same way; the others write a model, of which every file counts.
RESULTS = {
    "finetune_embeddings": ["model/**/*", "log.json"],
    "train_reranker": ["model/**/*", "log.json"],
    "train_contextual": ["model/**/*", "log.json"],
    "distil": ["model/**/*", "log.json"],
    "run_classification": ["model/**/*", "report.*"],
    "prepare_data": ["*.arrow", "manifest.json"],
    "deduplicate": ["texts/*.parquet"],
    "embed": ["*.parquet"],
    "retrieval_from_documents": ["report.json", "*/model/*.safetensors", "half/*.safetensors"],
    "run_glue": ["*/*/*.json", "*/*/*/model/*.safetensors"],
    "run_mteb": ["report.md"],
}


@pytest.mark.parametrize(
    "script",
    [
        script if script == "pretrain" else pytest.param(script, marks=pytest.mark.slow)
        for script in flags_of(Path(), Path())
    ],
)
def test_of_two_at_once_one_runs_and_killed_twice_it_ends_with_the_same_bits(prepared, material, tmp_path, script):
    def begin(folder: Path):
        # The folder comes first, as the tests of pretraining expect it.
        return start(["--output_dir", str(folder), *flags_of(prepared, material)[script]], script=script)

    def found(folder: Path) -> dict[str, str]:
        files = [file for pattern in RESULTS.get(script, ["model/**/*"]) for file in folder.glob(pattern)]
        return {str(file.relative_to(folder)): file_checksum(file) for file in files if file.is_file()}

    began = time.monotonic()
    both = [begin(tmp_path / "whole") for _ in range(2)]
    assert sorted(code for process in both for code in process.end()) == [0, 1], [each.output[-3000:] for each in both]
    assert "is being written by" in "".join(process.output for process in both)
    seconds, draw = time.monotonic() - began, random.Random(script)
    for _ in range(2):
        process = begin(tmp_path / "run")
        time.sleep(seconds * draw.uniform(0.3, 0.9))
        # It may be through already.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.end()
    begin(tmp_path / "run").finish()
    assert found(tmp_path / "run") == found(tmp_path / "whole") != {}

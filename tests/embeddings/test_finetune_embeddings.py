"""examples/finetune_embeddings.py on small data: what it trains, that it resumes, and what it refuses."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, Value
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch.nn import functional as F
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.embeddings.batches import ContrastiveCollator
from neobert_hf.embeddings.datasets import load_pairs, most_negatives, read_descriptions
from neobert_hf.embeddings.trainers import EmbeddingArguments, build_encoder, build_loss
from neobert_hf.training.run_checkpoints import COMPLETE, CheckpointError, complete_checkpoints
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import ENCODERS, save_other_encoder


finetune_embeddings = load_example("finetune_embeddings")


SMALL = {
    "max_length": 48,
    "max_steps": 12,
    "warmup_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 8,
    "seed": 0,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_steps": 3,
    "report_to": "none",
}


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return AutoTokenizer.from_pretrained(prepared / "tokenizer")


@pytest.fixture(scope="module")
def encoder(prepared, tokenizer, tmp_path_factory) -> Path:
    """With dropout, so that a resume has to restore its generator."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = NeoBERTConfig(
        vocab_size=len(tokenizer),
        max_length=64,
        dropout=0.1,
        decoder_init_range=0.2,
        embedding_init_range=1.0,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    NeoBERTForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(prepared, tmp_path_factory) -> Path:
    """A Parquet file of triplets, some without a negative, JSON lines of pairs, nested rows, and their description."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = (prepared / "train.jsonl").read_text().splitlines()
    words = [text.split() for line in lines if len((text := json.loads(line)["text"]).split()) > 60]
    rows = [
        {"question": " ".join(w[:4]), "answer": " ".join(w[4:24]), "wrong": " ".join(words[i - 1][4:24])}
        for i, w in enumerate(words)
    ]
    triplets = [row | {"wrong": None} if i % 3 == 0 else row for i, row in enumerate(rows[:200])]
    Dataset.from_list(triplets).to_parquet(folder / "triplets.parquet")
    pairs = [{"title": row["question"], "body": row["answer"]} for row in rows[200:280]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    nested = [
        {"set": {"query": row["question"], "pos": [row["answer"], "x"], "neg": [row["wrong"]] * (i % 3)}}
        for i, row in enumerate(rows[280:330])
    ]
    Dataset.from_list(nested).to_parquet(folder / "nested.parquet")
    Dataset.from_list(rows[330:360]).to_parquet(folder / "test.parquet")
    sts = [{"a": row["question"], "b": row["answer"][:40], "score": i / 20} for i, row in enumerate(rows[360:380])]
    Dataset.from_list(sts).to_parquet(folder / "sts.parquet")
    description = {
        "train": {
            "triplets": {
                "source": str(folder / "triplets.parquet"),
                "query": "question",
                "positive": "answer",
                "negatives": "wrong",
                "instruction": "Find the answer.",
            },
            "pairs": {
                "source": str(folder / "pairs.jsonl"),
                "query": "title",
                "positive": "body",
                "instruction": "Find the text.",
            },
            "nested": {
                "source": str(folder / "nested.parquet"),
                "query": "set.query",
                "positive": "set.pos.0",
                "negatives": "set.neg.*",
                "instruction": "",
            },
        },
        "evaluation": {
            "retrieval": {
                "source": str(folder / "test.parquet"),
                "query": "question",
                "positive": "answer",
                "instruction": "Find the answer.",
            },
            "sts": {"source": str(folder / "sts.parquet"), "query": "a", "positive": "b", "instruction": "Similar?"},
        },
    }
    (folder / "datasets.yaml").write_text(yaml.safe_dump(description, sort_keys=False))
    return folder


@pytest.fixture
def flags(data, encoder, tmp_path):
    """The command line of a run in tmp_path / "run", with changes."""

    def build(**changes) -> list[str]:
        settings = {"output_dir": tmp_path / "run", "model": encoder, "datasets": data / "datasets.yaml"}
        return [
            word
            for name, value in (settings | SMALL | changes).items()
            if value is not None
            for word in (f"--{name}", *str(value).split())
        ]

    return build


def run(flags: list[str]) -> list[dict]:
    finetune_embeddings.main(flags)
    return json.loads((Path(flags[1]) / "log.json").read_text())


def losses_of(log: list[dict]) -> list[float]:
    return [entry["loss"] for entry in log if "loss" in entry]


def assert_same_weights(first: Path, second: Path) -> None:
    first, second = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_run_leaves_an_embedding_model_a_card_and_numbers(flags, tmp_path, capsys):
    log = run(flags(eval_strategy="steps", eval_steps=6, max_steps=18, report_to="tensorboard"))
    losses = losses_of(log)
    assert len(losses) == 18 and sum(losses[-5:]) < sum(losses[:5]) - 1
    evaluations = [entry for entry in log if "eval_retrieval_cosine_ndcg@10" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12, 18]
    for entry in evaluations:
        assert 0 <= entry["eval_retrieval_cosine_ndcg@10"] <= 1 and -1 <= entry["eval_sts_spearman_cosine"] <= 1
    output = tmp_path / "run"
    model = SentenceTransformer(str(output / "model"))
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    assert model[1].pooling_mode == "mean" and model.similarity_fn_name == "cosine" and model.max_seq_length == 48
    vectors = model.encode(["some text", "another"])
    again = SentenceTransformer(str(output / "checkpoint-18")).encode(["some text", "another"])
    assert vectors.shape == (2, 32) and (vectors == again).all()
    card = (output / "model" / "README.md").read_text()
    for text in ("MultipleNegativesRankingLoss", "triplets", "pairs", "nested", "Find the answer.", "ndcg@10"):
        assert text in card, text
    assert not list(output.glob("*.partial")) and list(output.rglob("events.out.tfevents.*"))
    assert "triplets" in capsys.readouterr().out


def start(flags: list[str], *launcher: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*(launcher or [sys.executable]), str(ROOT / "examples" / "finetune_embeddings.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
    )


def test_killed_and_resumed_ends_with_the_same_bits(flags, tmp_path):
    changes = {"max_steps": 60, "save_steps": 5}
    run(flags(**changes, output_dir=tmp_path / "whole"))
    process = start(flags(**changes))
    while process.poll() is None and not complete_checkpoints(tmp_path / "run"):
        time.sleep(0.02)
    # At any moment: in the middle of a step or of saving.
    time.sleep(random.Random(0).random() / 2)
    assert process.poll() is None, process.communicate()[0][-3000:]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    at = complete_checkpoints(tmp_path / "run")[-1].name
    assert at != "checkpoint-60"
    process = start(flags(**changes))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]
    assert f"{at}\n" in output and "resuming from" in output
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    logs = [losses_of(json.loads((tmp_path / name / "log.json").read_text())) for name in ("run", "whole")]
    assert logs[0] == logs[1] and len(logs[0]) == 60


def test_sigterm_saves_stops_and_the_same_command_goes_on(flags, tmp_path):
    changes = {"max_steps": 60, "save_steps": 20}
    run(flags(**changes, output_dir=tmp_path / "whole"))

    def stop():
        for _ in range(6000):
            if complete_checkpoints(tmp_path / "run"):
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SystemExit) as stopped:
        run(flags(**changes))
    thread.join()
    assert stopped.value.code == 143
    last = complete_checkpoints(tmp_path / "run")[-1]
    assert last.name not in ("checkpoint-20", "checkpoint-40", "checkpoint-60")
    run(flags(**changes))
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def test_two_processes_train_as_one_with_twice_the_micro_batches(flags, encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "encoder")
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    # Processes draw dropout from generators of their own.
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config | {"dropout": 0.0}))
    changes = {"model": tmp_path / "encoder", "max_steps": 6, "save_steps": 6}
    run(flags(**changes, gradient_accumulation_steps=2, output_dir=tmp_path / "one"))
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file"]
    launcher += [str(ROOT / "configs" / "accelerate" / "cpu_ddp.yaml"), "--num_processes", "2"]
    process = start(flags(**changes), *launcher, "--main_process_port", "0")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "2 x cpu" in output, output[-4000:]
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "run"))
    start_ = load_file(encoder / "model.safetensors")
    for name, tensor in one.items():
        moved = (tensor - start_[f"model.{name}"]).norm()
        # Rounding in another order, over 6 steps.
        assert (tensor - two[name]).norm() < 1e-3 * moved, name


def interrupted(flags, tmp_path, step: int = 6) -> Path:
    """A run that stopped after this step, in the middle of its way."""
    run(flags())
    for folder in complete_checkpoints(tmp_path / "run"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    shutil.move(tmp_path / "run" / "model", tmp_path / "expected" / "model")
    return tmp_path / "run" / f"checkpoint-{step}"


def test_half_written_checkpoints_are_never_picked_up(flags, tmp_path):
    checkpoint = interrupted(lambda: flags(save_total_limit=4), tmp_path)
    half = checkpoint.with_name("checkpoint-9")
    shutil.copytree(checkpoint, half)
    (half / COMPLETE).unlink()
    (half / "model.safetensors").write_bytes(b"half")
    run(flags(save_total_limit=4))
    assert_same_weights(tmp_path / "run", tmp_path / "expected")
    # Once more: nothing is left to train, and the model is the same.
    shutil.rmtree(tmp_path / "run" / "model")
    run(flags(save_total_limit=4))
    assert_same_weights(tmp_path / "run", tmp_path / "expected")


def test_other_settings_data_or_a_lost_file_are_refused_by_name(flags, data, encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "encoder")
    flags = partial(flags, model=tmp_path / "encoder")
    checkpoint = interrupted(lambda: flags(save_total_limit=4), tmp_path)
    with pytest.raises(CheckpointError, match="(?s)learning_rate: 0.005 there, 0.001 now.*temperature: 0.07"):
        run(flags(learning_rate=1e-3, temperature=0.05))
    changed = yaml.safe_load((data / "datasets.yaml").read_text())
    changed["train"]["pairs"]["instruction"] = "Another."
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
    with pytest.raises(CheckpointError, match="(?s)datasets: .*Find the text.*Another"):
        run(flags(datasets=tmp_path / "changed.yaml"))
    # Other rows, and as many, in the same file; other weights in the same folder.
    text = (data / "pairs.jsonl").read_text()
    (data / "pairs.jsonl").write_text("".join(reversed(text.splitlines(keepends=True))))
    try:
        with pytest.raises(CheckpointError, match="other settings:\n  datasets: .*\nResume"):
            run(flags())
    finally:
        (data / "pairs.jsonl").write_text(text)
    weights = load_file(encoder / "model.safetensors")
    weights["model.layer_norm.weight"] *= 2
    save_file(weights, tmp_path / "encoder" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="other settings:\n  weights: .*\nResume"):
        run(flags())
    shutil.copytree(encoder, tmp_path / "encoder", dirs_exist_ok=True)
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="optimizer.pt is missing"):
        run(flags())


def batch_and_model(data, encoder):
    descriptions = {one.name: one for one in read_descriptions(str(data / "datasets.yaml"))[0]}
    rows = load_pairs(descriptions["triplets"]).select(range(6))
    model = build_encoder(str(encoder), 48).eval()
    return rows, model


def info_nce(model, queries: list[str], documents: list[str], temperature: float) -> float:
    """Section 5.2.1, from texts."""
    queries, documents = (torch.tensor(model.encode(texts)).double() for texts in (queries, documents))
    scores = F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T / temperature
    return -scores.log_softmax(1).diagonal().mean().item()


def loss_of(loss, model, rows, prompt: str) -> torch.Tensor:
    collator = ContrastiveCollator(preprocess_fn=model.preprocess, prompts={"triplets": {"query": prompt}})
    batch = collator([row | {"dataset_name": "triplets"} for row in rows])
    features = [
        {key.removeprefix(f"{column}_"): value for key, value in batch.items() if key.startswith(f"{column}_")}
        for column in ("query", "positive", "hard_negative")
        if f"{column}_input_ids" in batch
    ]
    return loss(features, None)


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_the_loss_is_the_papers_over_all_documents_and_hard_negatives(data, encoder, mini_batch_size):
    rows, model = batch_and_model(data, encoder)
    # Negatives of this batch are positives of it, too, and would be left out.
    assert [len(row["negatives"]) for row in rows] == [0, 1, 1, 0, 1, 1]
    rows = [row | {"negatives": [f"{text} indeed" for text in row["negatives"]]} for row in rows]
    negatives = [text for row in rows for text in row["negatives"]]
    queries = [f"Find the answer. {row['query']}" for row in rows]
    expected = info_nce(model, queries, [row["positive"] for row in rows] + negatives, 0.07)
    loss = build_loss(model, 0.07, mini_batch_size, [])
    with torch.enable_grad():
        value = loss_of(loss, model, rows, "Find the answer. ")
    # Measured: 3e-7 of 5, float32 against float64.
    assert value.item() == pytest.approx(expected, abs=1e-5)
    without = info_nce(model, [row["query"] for row in rows], [row["positive"] for row in rows] + negatives, 0.07)
    assert abs(without - expected) > 1e-3


def test_the_cached_loss_has_the_same_gradients(data, encoder):
    gradients = []
    for mini_batch_size in (None, 2):
        rows, model = batch_and_model(data, encoder)
        loss_of(build_loss(model, 0.07, mini_batch_size, [16]), model, rows, "").backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        # Sums in another order, in float32.
        assert (gradient - gradients[1][name]).norm() < 1e-4 * gradient.norm(), name


def test_matryoshka_trains_the_prefixes_as_well(flags, data, encoder, tmp_path):
    rows, model = batch_and_model(data, encoder)
    rows = [row | {"negatives": []} for row in rows]
    queries, documents = [row["query"] for row in rows], [row["positive"] for row in rows]

    class Prefix:
        def encode(self, texts):
            return model.encode(texts)[:, :8]

    expected = info_nce(model, queries, documents, 0.07) + info_nce(Prefix(), queries, documents, 0.07)
    loss = loss_of(build_loss(model, 0.07, None, [8]), model, rows, "")
    assert loss.item() == pytest.approx(expected, abs=1e-4)
    run(flags(matryoshka_dims="8 16", max_steps=2))
    small = SentenceTransformer(str(tmp_path / "run" / "model"), truncate_dim=8)
    assert small.encode("text").shape == (8,)


@pytest.mark.parametrize("name", ENCODERS)
def test_it_works_for_other_encoders(flags, tokenizer, tmp_path, name):
    save_other_encoder(name, tmp_path / name, tokenizer)
    log = run(flags(model=tmp_path / name, max_steps=6, save_steps=6))
    assert all(map(math.isfinite, losses_of(log)))
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    before = load_file(tmp_path / name / "model.safetensors")
    assert any(not torch.equal(stored[key], before[key].float()) for key in stored if key in before)


def edited(data, tmp_path, change) -> Path:
    description = yaml.safe_load((data / "datasets.yaml").read_text())
    change(description)
    (tmp_path / "edited.yaml").write_text(yaml.safe_dump(description, sort_keys=False))
    return tmp_path / "edited.yaml"


def write(tmp_path, rows: list[dict]) -> str:
    file = tmp_path / "bad.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


ROW = {"title": "a", "body": "b"}

BAD_ROWS = [
    ([ROW, ROW | {"body": None}], {}, "row 1 has no positive .body is empty.*skip_incomplete"),
    ([ROW | {"title": " "}], {}, "row 0 has no query"),
    ([ROW | {"body": 7}], {}, "'body' holds int 7, not text"),
    ([ROW | {"neg": None}] * 2, {"negatives": "neg"}, "no row has one. Leave `negatives` out"),
    ([ROW | {"neg": [3]}], {"negatives": "neg.*"}, "holds int 3, not text"),
    ([ROW | {"neg": ["n"]}], {"negatives": "neg.text"}, "'neg.text' does not lead to a text"),
    ([ROW | {"body": None}], {"skip_incomplete": True}, "none of its 1 rows is left"),
    ([ROW] * 20, {}, "pairs has 20 rows and not 8 of them without a text in common"),
    ([ROW], {}, "pairs has 1 rows and not 8"),
]


@pytest.mark.parametrize("rows, keys, message", BAD_ROWS)
def test_bad_rows_are_refused_before_training(flags, data, tmp_path, rows, keys, message):
    source = write(tmp_path, rows)
    file = edited(data, tmp_path, lambda content: content["train"]["pairs"].update(keys | {"source": source}))
    with pytest.raises(ValueError, match="(?s)" + message):
        run(flags(datasets=file))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def in_parts(entry: dict, parts) -> None:
    """Move the table of an entry into `parts`, so many times, or put this there."""
    table = {key: entry.pop(key) for key in ("source", "query", "positive")}
    entry["parts"] = [table] * parts if isinstance(parts, int) else parts


BAD_DESCRIPTIONS = [
    (lambda c: c["train"]["pairs"].update(query="titel"), "has no column 'titel'; it has 'title', 'body'"),
    (lambda c: c["train"]["pairs"].update(source="nowhere/pairs.jsonl"), "matches no file"),
    (lambda c: c["train"]["pairs"].pop("instruction"), "pairs: `instruction` is missing"),
    (lambda c: c["train"].update(other={"instruction": "Find."}), "other has an instruction and no data"),
    (lambda c: c["train"]["pairs"].update(postive="body"), "no meaning for the key 'postive'; did you mean 'positive'"),
    (lambda c: c["train"]["pairs"].update(query=3), "query"),
    (lambda c: c["train"]["pairs"].pop("positive"), "positive"),
    (lambda c: c["train"].clear(), "names no training dataset"),
    (lambda c: c.update(tests={}), "unknown key 'tests'"),
    (lambda c: c["evaluation"].update(clustering={}), "not 'clustering'"),
    (lambda c: c["evaluation"]["sts"].update(c["evaluation"]["retrieval"]), "needs a column `score`"),
    (lambda c: c["evaluation"]["sts"].update(above={"score": 0.2}), "sts: scores are read from all rows of one table"),
    (lambda c: c["evaluation"]["sts"].update(skip_incomplete=True), "sts: scores are read from all rows of one table"),
    (lambda c: in_parts(c["evaluation"]["sts"], 2), "sts: scores are read from all rows of one table"),
    (lambda c: c.update(train=[c["train"]]), "`train` holds .*; it must hold one `key: value` a line"),
    (lambda c: c["train"].update(pairs=None), "dataset pairs holds None; it must hold one `key: value` a line"),
    (lambda c: c["train"]["pairs"].update(above=None), "pairs: `above` holds None; it must hold"),
    (lambda c: c["train"]["pairs"].update(above={"title": "many"}), "pairs: .*'above'"),
    (
        lambda c: c["train"]["pairs"].update(above={"title": 4}),
        "`above` needs a column of numbers; 'title' holds .*str",
    ),
    (lambda c: c["train"]["nested"].update(above={"set": 4}), "`above` needs a column of numbers; 'set' holds"),
    (lambda c: c["train"]["pairs"].update(lookups=["a"]), "pairs: `lookups` holds .'a'.; it must hold"),
    (lambda c: in_parts(c["train"]["pairs"], {"a": 1}), "pairs: `parts` holds {'a': 1}; it must hold a list"),
    (lambda c: in_parts(c["train"]["pairs"], ["a"]), "pairs, an item of `parts` holds 'a'; it must hold"),
    (lambda c: c["train"]["pairs"].update(batch_size=0), "pairs: `batch_size` is 0; it must be a whole number, 2 or m"),
    (lambda c: c["train"]["pairs"].update(batch_size="8"), "pairs: `batch_size` is '8'; it must be"),
]


@pytest.mark.parametrize("change, message", BAD_DESCRIPTIONS)
def test_bad_descriptions_are_refused_before_training(flags, data, tmp_path, change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(flags(datasets=edited(data, tmp_path, change)))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


BAD_FLAGS = [
    ({"only": "pairz"}, "no training dataset 'pairz'; did you mean 'pairs'"),
    ({"max_steps": -1}, "`max_steps` is -1"),
    ({"temperature": 0}, "`temperature` is 0"),
    ({"matryoshka_dims": "8 64"}, "the model allows 1 to 32"),
    ({"prompts": "Find"}, "instructions stand in"),
    ({"dataloader_drop_last": False}, "`dataloader_drop_last` is False; this recipe needs True"),
    ({"batch_sampler": "batch_sampler"}, "`batch_sampler` is batch_sampler; .*needs no_duplicates or no_duplicates_h"),
    ({"per_device_train_batch_size": 2}, "triplets: 4 texts .* 2 rows with up to 1 .*`per_device_.*` of 3 or more"),
    ({"per_device_train_batch_size": 1, "only": "pairs"}, "pairs: 2 texts .* up to 0 .*`per_device_.*` of 2 or more"),
    ({"temprature": 1}, "Unknown argument '--temprature'.*did you mean '--temperature'"),
]


@pytest.mark.parametrize("change, message", BAD_FLAGS)
def test_bad_settings_are_refused_before_training(flags, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(flags(**change))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "scores, message",
    [([0.0, 0.0], "every score .* is 0.0"), ([1.0, math.nan], "needs a column `score` with a number in every row")],
)
def test_scores_that_nothing_correlates_with_are_refused(flags, data, tmp_path, scores, message):
    Dataset.from_dict({"a": ["x", "y"], "b": ["y", "z"], "score": scores}).to_parquet(tmp_path / "bad.parquet")
    source = str(tmp_path / "bad.parquet")
    file = edited(data, tmp_path, lambda content: content["evaluation"]["sts"].update(source=source))
    with pytest.raises(ValueError, match=message):
        run(flags(datasets=file))


@pytest.mark.parametrize("name", ["empty.parquet", "empty.jsonl", "broken.jsonl"])
def test_files_without_rows_are_refused(flags, data, tmp_path, name):
    if name == "empty.parquet":
        Dataset.from_dict({"title": ["a"], "body": ["b"]}).select([]).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text("" if name == "empty.jsonl" else '{"title": "a", "body": "b"}\n{"title":\n')
    file = edited(data, tmp_path, lambda content: content["train"]["pairs"].update(source=str(tmp_path / name)))
    with pytest.raises(ValueError, match=f"Dataset pairs: .*{name}' is empty or cannot be read"):
        run(flags(datasets=file))


def test_rows_are_fewer_where_there_are_hard_negatives(data):
    descriptions, _ = read_descriptions(str(data / "datasets.yaml"))
    train = {one.name: load_pairs(one) for one in descriptions}
    assert {name: most_negatives(rows) for name, rows in train.items()} == {"triplets": 1, "pairs": 0, "nested": 2}
    rows = finetune_embeddings.rows_of_batches(descriptions, train, 64)
    assert rows == {"triplets": 42, "pairs": 64, "nested": 32}
    assert most_negatives(load_pairs(descriptions[2], max_negatives=1)) == 1


# A row of every shape that a dataset of the paper has on the Hub.
SHAPES = {
    "AMAZONQA": {"query": "q", "pos": ["p", "other"]},
    "CONCURRENTQA": {
        "question": "q",
        "pos_paras": [{"title": "t", "text": "p"}, {"title": "t", "text": "x"}],
        "neg_paras": [{"title": "t", "text": "n1"}, {"title": "t", "text": "n2"}],
    },
    "PAQ": {"set": ["q", "p"]},
    "QQP": {"set": {"query": "q", "pos": ["p"], "neg": ["n1", "n2"]}},
    "SENTENCECOMP": {"set": ["p", "q"]},
    "STACKOVERFLOW": {"query": "q", "positive": ["p", "x"], "negative": ["n1", "n2"]},
    "STS12": {"sentence1": "q", "sentence2": "p", "score": 4.5},
    "STSBENCHMARK": {"sentence1": "q", "sentence2": "p", "score": 4.5},
    "GOOAQ": {"question": "q", "answer": "p"} | {f"negative_{i}": f"n{i}" for i in range(1, 6)},
    "PUBMEDQA": {"anchor": "q", "positive": "p"} | {f"negative_{i}": f"n{i}" for i in range(1, 21)},
    "ALLNLI": {"anchor": "q", "positive": "p", "negative": "n1"},
    "TRIVIAQA": {"anchor": "q", "positive": "p", "negative": "n1"},
    "WIKIHOW": {"text": "q", "summary": "p"},
    "MEDMCQA": {"question": "q", "exp": "p", "subject_name": "s"},
}
NEGATIVES = {"CONCURRENTQA": 2, "QQP": 2, "STACKOVERFLOW": 2, "GOOAQ": 5, "PUBMEDQA": 20, "ALLNLI": 1, "TRIVIAQA": 1}
PAPER = ROOT / "configs" / "embeddings" / "datasets.yaml"


@pytest.mark.parametrize("name", SHAPES)
def test_the_papers_columns_give_queries_positives_and_negatives(tmp_path, name):
    (description,), _ = read_descriptions(str(PAPER), [name])
    (part,) = description.parts
    Dataset.from_list([SHAPES[name]]).to_parquet(tmp_path / "rows.parquet")
    part.source, part.subset = str(tmp_path / "rows.parquet"), None
    part.split = part.split.replace("1000000", "1")
    (row,) = load_pairs(description)
    expected = [f"n{i}" for i in range(1, NEGATIVES.get(name, 0) + 1)]
    assert row == {"query": "q", "positive": "p", "negatives": expected}


def test_scores_labels_and_lookups(tmp_path):
    sts, _ = read_descriptions(str(PAPER), ["STS12"])
    rows = [{"sentence1": f"a{score}", "sentence2": f"b{score}", "score": score} for score in (3.9, 4.0, 4.1, 5.0)]
    Dataset.from_list(rows).to_parquet(tmp_path / "sts.parquet")
    sts[0].parts[0].source = str(tmp_path / "sts.parquet")
    assert load_pairs(sts[0])["query"][:] == ["a4.1", "a5.0"]

    yahoo, _ = read_descriptions(str(PAPER), ["YAHOO_CLUST"])
    names = ClassLabel(names=["Society & Culture", "Health"])
    features = Features({"topic": names, "question_title": Value("string"), "best_answer": Value("string")})
    rows = [
        {"topic": 1, "question_title": "t", "best_answer": "b"},
        {"topic": 0, "question_title": "t", "best_answer": ""},
    ]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "yahoo.parquet")
    yahoo[0].parts[0].source = str(tmp_path / "yahoo.parquet")
    # The second row lacks its answer.
    assert load_pairs(yahoo[0])[:] == {"query": ["t b"], "positive": ["Health"], "negatives": [[]]}

    fever, _ = read_descriptions(str(PAPER), ["FEVER"])
    part = fever[0].parts[0]
    for name, rows in {
        "queries": [{"_id": "q1", "text": "claim 1"}, {"_id": "q2", "text": "claim 2"}],
        "corpus": [{"_id": "d2", "text": "text 2", "title": "t"}, {"_id": "d1", "text": "text 1", "title": "t"}],
        "qrels": [
            {"query-id": "q2", "corpus-id": "d1", "score": 1},
            {"query-id": "q1", "corpus-id": "gone", "score": 1},
        ],
    }.items():
        Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    part.source, part.subset = str(tmp_path / "qrels.parquet"), None
    for column, name in (("query-id", "queries"), ("corpus-id", "corpus")):
        part.lookups[column].source, part.lookups[column].split = str(tmp_path / f"{name}.parquet"), "train"
    assert load_pairs(fever[0])[:] == {"query": ["claim 2"], "positive": ["text 1"], "negatives": [[]]}


def test_the_papers_datasets_and_instructions_are_table_7(shared):
    paper = (shared / "paper" / "neobert_2502.19587.md").read_text()
    table = paper[paper.index("Table 7:") : paper.index("Table 8:")].splitlines()[3:]
    expected = [line.split("\t") for line in table if "\t" in line]
    descriptions, evaluation = read_descriptions(str(PAPER))
    assert len(descriptions) == 22 and set(evaluation) == {"retrieval", "sts"}
    names = [name.replace(" <sub>CLUST</sub>", "_CLUST") for name, _ in expected]
    assert [one.name for one in descriptions] == names
    assert [one.instruction for one in descriptions] == [instruction for _, instruction in expected]


def test_the_papers_settings():
    settings, arguments = finetune_embeddings.parse_config(
        finetune_embeddings.FinetuningArguments,
        EmbeddingArguments,
        args=["--config", str(ROOT / "configs/embeddings/paper.yaml"), "--model", "m", "--use_cpu", "1", "--bf16", "0"],
    )
    assert (settings.temperature, settings.alpha, arguments.max_steps) == (0.07, 0.5, 2000)
    assert (arguments.adam_beta2, arguments.weight_decay, arguments.get_warmup_steps(2000)) == (0.95, 0.01, 2000)


@pytest.mark.slow
def test_the_small_configuration_learns(shared, prepared, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = str(ROOT / "configs" / "embeddings" / "small.yaml")
    changes = ["--max_steps", "60", "--eval_steps", "30", "--save_steps", "30", "--report_to", "none", "--use_cpu", "1"]
    finetune_embeddings.main(["--config", config, "--model", str(encoder), "--output_dir", str(tmp_path), *changes])
    log = json.loads((tmp_path / "log.json").read_text())
    losses = losses_of(log)
    assert losses[-1] < losses[0] - 0.1
    assert [entry["step"] for entry in log if "eval_retrieval_cosine_ndcg@10" in entry] == [30, 60]

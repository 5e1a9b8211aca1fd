"""Every kind of Sentence Transformers model on NeoBERT: dense, sparse, late interaction and reranker.

The scripts under examples/ train each on small data: what comes out, that it loads anywhere, and what they refuse.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from sentence_transformers.util import cos_sim, quantize_embeddings
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from neobert_hf.embeddings.batches import MultiVectorCollator, RerankingCollator
from neobert_hf.embeddings.flattening import flatten_inputs
from neobert_hf.embeddings.inference import load_model
from neobert_hf.embeddings.recipe import RecipeArguments, read_data, retrieval_evaluator
from neobert_hf.embeddings.trainers import EmbeddingArguments, build_encoder
from neobert_hf.training.run_checkpoints import CheckpointError, complete_checkpoints
from tests.embeddings.test_finetune_embeddings import (  # noqa: F401  (fixtures)
    SMALL,
    assert_same_weights,
    data,
    encoder,
    losses_of,
    tokenizer,
)
from tests.helpers.examples import load_example
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import save_other_encoder


finetune_embeddings = load_example("finetune_embeddings")
train_multi_vector_encoder = load_example("train_multi_vector_encoder")
train_reranker = load_example("train_reranker")
train_sparse_encoder = load_example("train_sparse_encoder")


SCRIPTS = {
    "dense": (finetune_embeddings, "small.yaml", SentenceTransformer),
    "sparse": (train_sparse_encoder, "sparse.yaml", SparseEncoder),
    "multi_vector": (train_multi_vector_encoder, "multi_vector.yaml", MultiVectorEncoder),
    "reranker": (train_reranker, "reranker.yaml", CrossEncoder),
}
TRAINED_BY_KINDS = [kind for kind in SCRIPTS if kind != "dense"]
TEXTS = ["short", "a list of the numbers from one to ten in the order of their names", "for loops and functions", "x"]
QUERY = "how to sort a list"


def outputs_of(model, texts: list[str], **kwargs) -> torch.Tensor:
    """One row a text, whatever the kind; of a reranker its logits for one query, of token vectors all of a text."""
    if isinstance(model, CrossEncoder):
        pairs = [(QUERY, text) for text in texts]
        scores = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True, **kwargs)
        return scores.float().unsqueeze(1).cpu()
    if isinstance(model, MultiVectorEncoder):
        # Every text ends at its own length.
        return torch.cat([vectors.float().cpu() for vectors in model.encode_document(texts, **kwargs)])
    if isinstance(model, SparseEncoder):
        return model.encode(texts, convert_to_sparse_tensor=False, **kwargs).float().cpu()
    return torch.tensor(model.encode(texts, **kwargs)).float()


def flags(kind: str, data: Path, encoder: Path, output: Path, **changes) -> list[str]:  # noqa: F811
    settings = SMALL | {"model": encoder, "datasets": data / "datasets.yaml", "output_dir": output, "eval_steps": 6}
    words = ["--config", str(ROOT / "configs" / "embeddings" / SCRIPTS[kind][1])]
    for name, value in (settings | changes).items():
        words += [f"--{name}", *str(value).split()]
    return words


@pytest.fixture
def train(data, encoder, tmp_path):  # noqa: F811
    """Run the script of a kind in tmp_path / "run", with changes."""

    def run(kind: str, **changes) -> Path:
        output = Path(changes.pop("output_dir", tmp_path / "run"))
        SCRIPTS[kind][0].main(flags(kind, data, encoder, output, **changes))
        return output

    return run


@pytest.fixture(scope="module")
def trained(data, encoder, tmp_path_factory) -> dict[str, Path]:  # noqa: F811
    """The output folder of each kind's script."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind, (script, *_) in SCRIPTS.items():
        script.main(flags(kind, data, encoder, folder / kind))
    return {kind: folder / kind for kind in SCRIPTS}


def load(kind: str, trained: dict[str, Path], **kwargs):
    return SCRIPTS[kind][2](str(trained[kind] / "model"), device="cpu", **kwargs)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_leaves_a_complete_model_that_has_learned(trained, kind):
    log = json.loads((trained[kind] / "log.json").read_text())
    losses = losses_of(log)
    assert len(losses) == 12 and all(map(math.isfinite, losses))
    assert [entry["step"] for entry in log if "eval_runtime" in entry] == [6, 12]
    if kind == "sparse":
        assert all(log[11][f"{side}_regularizer_loss"] > 0 for side in ("query", "document"))
    if kind == "reranker":
        # A new head scores near 0, and the right document weighs as much as the 4 wrong ones.
        assert losses[0] == pytest.approx(8 / 5 * math.log(2), abs=0.02)
    else:
        # A reranker needs more than 12 steps.
        assert losses[-1] < losses[0]
    arguments = torch.load(trained[kind] / "checkpoint-12" / "training_args.bin", weights_only=False)
    prompts = {"triplets": "Find the answer. ", "pairs": "Find the text. ", "nested": ""}
    if kind != "reranker":
        prompts = {name: {"query": prompt} if prompt else {} for name, prompt in prompts.items()}
    assert arguments.prompts == prompts
    folder = trained[kind] / "model"
    modules = json.loads((folder / "modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (folder / name).stat().st_size > 0, name
    stored = load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in stored.values())


EVALUATORS = {"sparse": SparseInformationRetrievalEvaluator, "multi_vector": MultiVectorInformationRetrievalEvaluator}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_saved_model_scores_as_the_trained_one_did(trained, data, kind):  # noqa: F811
    settings = RecipeArguments("unused", str(data / "datasets.yaml"))
    rows = read_data(settings, EmbeddingArguments("unused", bf16=False, use_cpu=True))
    if kind == "reranker":
        evaluator = train_reranker.reranking_evaluator(rows)
        assert all(sample["query"].startswith("Find the answer. ") for sample in evaluator.samples)
    else:
        evaluator = retrieval_evaluator(rows, *([EVALUATORS[kind]] if kind in EVALUATORS else []))
        assert evaluator.query_prompt == "Find the answer. "
    logged = [entry for entry in json.loads((trained[kind] / "log.json").read_text()) if "eval_runtime" in entry][-1]
    metrics = evaluator(load(kind, trained))
    assert any("ndcg@10" in name for name in metrics)
    for name, value in metrics.items():
        assert logged[f"eval_{name}"] == pytest.approx(value, abs=1e-6), name


FRESH_PROCESS = """
import sys, torch, neobert_hf
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from transformers.utils import logging
_, texts, query, target, *folders = sys.argv
texts = texts.split("|")
dense, sparse, multi_vector, reranker = (
    cls(folder, device="cpu")
    for cls, folder in zip((SentenceTransformer, SparseEncoder, MultiVectorEncoder, CrossEncoder), folders)
)
torch.set_num_threads(1)
torch.save({
    "dense": torch.tensor(dense.encode(texts)),
    "sparse": sparse.encode(texts, convert_to_sparse_tensor=False),
    "multi_vector": torch.cat(multi_vector.encode_document(texts)),
    "reranker": reranker.predict(
        [(query, text) for text in texts], activation_fn=torch.nn.Identity(), convert_to_tensor=True
    ).unsqueeze(1),
}, target)
"""


def test_all_kinds_load_in_a_fresh_process_with_the_same_outputs(trained, tmp_path):
    expected = {}
    for kind in SCRIPTS:
        model = load(kind, trained)
        expected[kind] = outputs_of(model, TEXTS)
        # Once more through save_pretrained, as a user would hand it on.
        model.save_pretrained(str(tmp_path / kind))
    folders = [str(tmp_path / kind) for kind in SCRIPTS]
    command = [sys.executable, "-c", FRESH_PROCESS, "|".join(TEXTS), QUERY, str(tmp_path / "outputs.pt"), *folders]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = torch.load(tmp_path / "outputs.pt")
    for kind in SCRIPTS:
        assert torch.equal(found[kind], expected[kind]), kind


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no Apple GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_flattened_inputs_give_the_same_outputs_and_compute_no_padding(trained, kind, device):
    model = load(kind, trained).to(device)
    pairs = [(QUERY, text) if kind == "reranker" else text for text in TEXTS]
    real = sum(len(ids) for ids in model.tokenizer(pairs)["input_ids"])
    seen = []
    backbone = model[0].model if kind == "dense" or kind == "multi_vector" else model[0].model.model
    backbone.transformer_encoder[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].shape[:2]))
    if kind == "sparse":
        model[0].model.decoder.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[:2]))
    padded = outputs_of(model, TEXTS)
    # The layers strip the padding of padded batches; the decoder gets it back.
    assert seen[0] == (1, real) and (kind != "sparse" or seen[1].numel() > real)
    seen.clear()
    flatten_inputs(model)
    assert "cu_seq_lens_q" in model.preprocess(TEXTS if kind != "reranker" else pairs)
    flattened = outputs_of(model, TEXTS)
    assert seen and all(shape == (1, real) for shape in seen)
    # Float32, sums in another order. Measured on a CPU: 1e-6.
    assert (flattened - padded).abs().max() < (1e-5 if device == "cpu" else 1e-3) * padded.abs().max()
    model[0].unpad_inputs = False
    assert torch.equal(outputs_of(model, TEXTS), padded)


def test_flattened_inputs_are_refused_where_they_would_cost_more(trained, tokenizer, tmp_path):  # noqa: F811
    model = load("dense", trained, model_kwargs={"attn_implementation": "eager"})
    with pytest.raises(ValueError, match="Attention 'eager' would compute a mask.*'sdpa' or a flash attention"):
        flatten_inputs(model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="need a NeoBERT model; the first module holds BertModel"):
        flatten_inputs(SentenceTransformer(str(tmp_path), device="cpu"))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_prompt_is_text_before_the_query(trained, kind, flat):
    model = load(kind, trained)
    if flat:
        flatten_inputs(model)
    prompt = "Find the answer. "
    with_prompt = outputs_of(model, TEXTS, prompt=prompt)
    if kind == "reranker":
        pairs = [(prompt + QUERY, text) for text in TEXTS]
        expected = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True).unsqueeze(1)
    else:
        expected = outputs_of(model, [prompt + text for text in TEXTS])
    without = outputs_of(model, TEXTS)
    assert torch.equal(with_prompt, expected)
    assert without.shape != expected.shape or (without - expected).abs().max() > 1e-3


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_16_bit_models_stay_finite_and_close(trained, tmp_path, kind, dtype, flat):
    shutil.copytree(trained[kind] / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    if kind in ("dense", "multi_vector"):
        # Sums over the tokens of a text exceed the largest float16, 65,504; the published model's states reach 130.
        name = next(name for name in weights if name.endswith("layer_norm.weight"))
        weights[name] = weights[name] * 3_000
        save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    cls, folder = SCRIPTS[kind][2], str(tmp_path / "model")
    texts = [*TEXTS, " ".join(TEXTS * 4)]
    expected = outputs_of(cls(folder, device="cpu"), texts)
    model = cls(folder, device="cpu", model_kwargs={"dtype": dtype})
    if flat:
        flatten_inputs(model)
    found = outputs_of(model, texts)
    assert found.isfinite().all() and found.shape == expected.shape
    # Relative to the whole output; bfloat16 has 8 bits.
    assert (found - expected).norm() < (0.01 if dtype == torch.float16 else 0.05) * expected.norm()


def test_dense_embeddings_can_be_cut_and_quantised(trained, data):  # noqa: F811
    model = load("dense", trained)
    rows = Dataset.from_parquet(str(data / "test.parquet"))
    queries, documents = model.encode(rows["question"][:]), model.encode(rows["answer"][:])
    cut = load("dense", trained, truncate_dim=8).encode(rows["question"][:])
    assert np.array_equal(cut, queries[:, :8])
    ranges = np.vstack([queries, documents])
    int8 = [quantize_embeddings(part, "int8", calibration_embeddings=ranges) for part in (queries, documents)]
    assert all(part.dtype == np.int8 and part.shape[1] == 32 for part in int8)
    for part, original in zip(int8, (queries, documents)):
        low, high = ranges.min(0), ranges.max(0)
        restored = (part.astype(np.float32) + 128) * (high - low) / 255 + low
        # A step, as values are cut off and not rounded.
        assert (np.abs(restored - original) <= 1.01 * (high - low) / 255).all()
    binary = quantize_embeddings(documents, "ubinary")
    assert binary.shape == (len(documents), 4) and np.array_equal(np.unpackbits(binary, axis=1), documents > 0)
    assert np.array_equal(model.encode(rows["answer"][:], precision="ubinary"), binary)
    # Bits that differ, against the angle.
    distances = (np.unpackbits(quantize_embeddings(queries, "ubinary"), axis=1)[:, None] != (documents > 0)).sum(2)
    cosines = cos_sim(queries, documents).numpy()
    assert np.corrcoef(distances.ravel(), cosines.ravel())[0, 1] < -0.7


def test_sparse_vectors_can_be_limited_to_their_largest_weights(trained):
    model = load("sparse", trained)
    full, few = (outputs_of(model, TEXTS, max_active_dims=limit) for limit in (None, 10))
    assert ((few > 0).sum(1) <= 10).all()
    assert torch.equal(few.topk(10).values, full.topk(10).values)


def test_token_vectors_can_be_quantised(trained):
    vectors = load("multi_vector", trained).encode_document(TEXTS, convert_to_numpy=True)
    assert vectors[0].shape[1] == 128 and np.allclose(np.linalg.norm(vectors[1], axis=1), 1, atol=1e-5)
    ranges = np.vstack(vectors)
    for text in vectors:
        assert quantize_embeddings(text, "int8", calibration_embeddings=ranges).shape == text.shape
        assert quantize_embeddings(text, "ubinary").shape == (len(text), 16)


def test_a_roberta_reads_no_more_tokens_than_it_has_positions_for(tokenizer, tmp_path):  # noqa: F811
    save_other_encoder("roberta", tmp_path / "roberta", tokenizer)
    path = str(tmp_path / "roberta")
    for model in (
        build_encoder(path, 1024),
        load_model(path, torch.float32, "cpu", None, None),
        train_multi_vector_encoder.build_multi_vector_encoder(path, 1024),
    ):
        assert model.max_seq_length == 23
        assert outputs_of(model, ["and " * 60]).isfinite().all()


# SPLADE


def test_splade_is_the_maximum_of_log_saturated_mlm_logits(encoder):  # noqa: F811
    model = train_sparse_encoder.build_sparse_encoder(str(encoder), 48).to("cpu").eval()
    assert "cu_seq_lens_q" in model.preprocess(TEXTS)
    mlm = NeoBERTForMaskedLM.from_pretrained(encoder).eval()
    for text, found in zip(TEXTS, outputs_of(model, TEXTS)):
        with torch.no_grad():
            logits = mlm(**model.tokenizer(text, return_tensors="pt")).logits[0]
        expected = torch.log1p(F.relu(logits)).amax(0)
        # Measured: 5e-7 of 4.
        assert torch.allclose(found, expected, atol=1e-5) and (found > 0.1).any()


@pytest.mark.parametrize("sparse_prediction", [True, False])
def test_sparse_prediction_of_pretraining_changes_nothing(encoder, tmp_path, sparse_prediction):  # noqa: F811
    shutil.copytree(encoder, tmp_path / "model")
    config = json.loads((encoder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"sparse_prediction": sparse_prediction}))
    found = outputs_of(train_sparse_encoder.build_sparse_encoder(str(tmp_path / "model"), 48).to("cpu"), TEXTS)
    expected = outputs_of(train_sparse_encoder.build_sparse_encoder(str(encoder), 48).to("cpu"), TEXTS)
    assert torch.equal(found, expected)
    assert found.shape == (len(TEXTS), config["vocab_size"])


def test_a_backbone_without_its_mlm_head_is_no_sparse_encoder(train, encoder, tokenizer, trained, tmp_path):  # noqa: F811
    NeoBERTModel.from_pretrained(encoder).save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    for model in (tmp_path / "backbone", trained["dense"] / "model"):
        with pytest.raises(ValueError, match="not hold a NeoBERTForMaskedLM.*missing: decoder.bias, decoder.weight"):
            train("sparse", model=model)
    # Transformers gives others a random one.
    save_other_encoder("bert", tmp_path / "bert", tokenizer)
    with pytest.raises(ValueError, match="has no trained MLM head: `architectures` .* is .'BertModel'., and no name"):
        train("sparse", model=tmp_path / "bert")
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    train_sparse_encoder.build_sparse_encoder(str(tmp_path / "bert"), 48)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


# Training data


ROWS = [
    {"query": f"q{number}", "positive": f"p{number}", "negatives": negatives, "dataset_name": "d"}
    for number, negatives in enumerate((["n0", "n1"], ["p0", "n2", "n3"], ["n4", "n5", "n6"]))
]


def test_late_interaction_gets_as_many_negatives_as_every_row_has():
    def show(texts, prompt, task):
        """The texts instead of tokens."""
        return {"texts": texts, "prompt": prompt, "called": task}

    batch = MultiVectorCollator(show, prompts={"d": {"query": "Find. "}})(ROWS)
    texts = {name.removesuffix("_texts"): value for name, value in batch.items() if name.endswith("_texts")}
    assert texts == {
        "query": ["q0", "q1", "q2"],
        "positive": ["p0", "p1", "p2"],
        "negative_0": ["n0", "n2", "n4"],
        "negative_1": ["n1", "n3", "n5"],
    }
    assert batch["query_prompt"] == "Find. " and batch["positive_prompt"] is None
    assert (batch["query_called"], batch["positive_called"], batch["negative_1_called"]) == ("query", *2 * ["document"])
    batch = MultiVectorCollator(show)([*ROWS, ROWS[0] | {"negatives": []}])
    assert not any(name.startswith("negative") for name in batch)


def test_a_reranker_gets_hard_negatives_first_and_then_other_rows_documents():
    batch = RerankingCollator(None, prompts={"d": "Find. "}, negatives=3)([*ROWS[:2], ROWS[2] | {"negatives": []}])
    assert batch.pop("prompt") == "Find. " and batch.pop("dataset_name") == "d"
    assert batch.pop("label").tolist() == [1, 0, 0, 0] * 2 + [1, 0, 0]
    assert batch == {
        "query": ["q0"] * 4 + ["q1"] * 4 + ["q2"] * 3,
        "document": ["p0", "n0", "n1", "p1", "p1", "p0", "n2", "n3", "p2", "p0", "p1"],
    }


def test_mined_negatives_belong_to_their_queries_and_are_mined_once(trained, data, tmp_path):  # noqa: F811
    rows = Dataset.from_parquet(str(data / "test.parquet"))
    # Queries that stand in several places, between others.
    pairs = [{"query": row["question"], "positive": row["answer"], "negatives": []} for row in rows]
    pairs = [*pairs, *({**row, "positive": f"also {row['positive']}"} for row in pairs[:10])]
    shutil.copytree(trained["dense"] / "model", tmp_path / "miner")
    settings = train_reranker.RerankerArguments("m", "d", negatives=3, miner=str(tmp_path / "miner"))
    mined = train_reranker.mine(Dataset.from_list(pairs), "Find. ", settings, tmp_path / "mined")
    model = SentenceTransformer(settings.miner, device="cpu")
    assert mined["query"][:] == [row["query"] for row in pairs] and any(mined["negatives"][:])
    for row, original in zip(mined, pairs):
        assert row["positive"] == original["positive"] and len(row["negatives"]) <= 3
        if not row["negatives"]:
            continue
        right = {other["positive"] for other in pairs if other["query"] == row["query"]}
        assert not right & set(row["negatives"])
        query = model.encode("Find. " + row["query"], normalize_embeddings=True)
        scores = {text: float(query @ model.encode(text, normalize_embeddings=True)) for text in row["negatives"]}
        best = max(float(query @ model.encode(text, normalize_embeddings=True)) for text in right)
        assert max(scores.values()) < best - 0.05 * abs(best) + 1e-5
    shutil.rmtree(tmp_path / "miner")
    again = train_reranker.mine(Dataset.from_list(pairs), "Find. ", settings, tmp_path / "mined")
    assert again[:] == mined[:] and len(list((tmp_path / "mined").iterdir())) == 1


def test_a_reranker_trains_on_mined_negatives(train, trained, tmp_path):
    train("reranker", miner=trained["dense"] / "model", only="pairs", max_steps=2, negatives=3)
    (file,) = (tmp_path / "run" / "mined").iterdir()
    assert sum(map(len, Dataset.from_parquet(str(file))["negatives"])) > 0
    assert not (tmp_path / "run" / "model").with_suffix(".partial").exists()


def test_a_new_head_is_said_to_be_new(train, trained, capsys):
    train("reranker", max_steps=1)
    assert "with a new classification head" in capsys.readouterr().out
    train("reranker", max_steps=1, model=trained["reranker"] / "model", output_dir=trained["reranker"].parent / "more")
    assert "with its own classification head" in capsys.readouterr().out


# Interruptions


@pytest.mark.parametrize("kind", TRAINED_BY_KINDS)
def test_a_resumed_run_ends_with_the_same_bits(train, trained, tmp_path, kind):
    shutil.copytree(trained[kind], tmp_path / "run")
    for folder in complete_checkpoints(tmp_path / "run"):
        if int(folder.name.split("-")[1]) > 9:
            shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "run" / "model")
    train(kind)
    assert_same_weights(tmp_path / "run", trained[kind])
    # Once more: nothing is left to train, and the model is the same, with all of its modules.
    shutil.rmtree(tmp_path / "run" / "model")
    train(kind)
    assert_same_weights(tmp_path / "run", trained[kind])
    found, expected = (outputs_of(load(kind, {kind: path}), TEXTS) for path in (tmp_path / "run", trained[kind]))
    assert torch.equal(found, expected)


def test_a_killed_sparse_run_ends_with_the_same_bits(train, data, encoder, tmp_path):  # noqa: F811
    changes = {"max_steps": 40, "save_steps": 5, "eval_strategy": "no"}
    train("sparse", **changes, output_dir=tmp_path / "whole")
    words = flags("sparse", data, encoder, tmp_path / "run", **changes)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "train_sparse_encoder.py"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"},
    )
    while process.poll() is None and not complete_checkpoints(tmp_path / "run"):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0][-3000:]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert complete_checkpoints(tmp_path / "run")[-1].name != "checkpoint-40"
    train("sparse", **changes)
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


# Bad input


BAD_SETTINGS = [
    ("reranker", {"negatives": 0}, "`negatives` is 0; batches of 8 rows allow 1 to 7"),
    ("reranker", {"negatives": 8}, "`negatives` is 8; batches of 8 rows allow 1 to 7"),
    ("sparse", {"temperature": 0.1}, "Unknown argument '--temperature'"),
    ("multi_vector", {"prompts": "Find"}, "instructions stand in"),
    ("sparse", {"only": "pairz"}, "no training dataset 'pairz'; did you mean 'pairs'"),
    ("multi_vector", {"max_steps": -1}, "`max_steps` is -1"),
]


@pytest.mark.parametrize("kind, change, message", BAD_SETTINGS)
def test_bad_settings_are_refused_before_training(train, tmp_path, kind, change, message):
    with pytest.raises(ValueError, match=message):
        train(kind, **change)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_classifier_of_several_classes_is_no_reranker(train, encoder, tokenizer, tmp_path):  # noqa: F811
    NeoBERTForSequenceClassification.from_pretrained(encoder, num_labels=3).save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ValueError, match="expects a model with 1 output label, but got a model with 3"):
        train("reranker", model=tmp_path / "classifier")


def test_a_run_does_not_go_on_from_another_kinds_checkpoint(train, trained, tmp_path):
    shutil.copytree(trained["sparse"], tmp_path / "run")
    with pytest.raises(CheckpointError, match="(?s)other settings.*query_weight: 5e-05 there, None now"):
        train("multi_vector")

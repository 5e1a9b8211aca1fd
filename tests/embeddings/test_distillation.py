"""What a teacher says is learned: the losses in numbers, its results stored once, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn import functional as F

from neobert_hf.common.results import ResultError
from neobert_hf.embeddings import distillation
from neobert_hf.embeddings.arguments import DenseArguments
from neobert_hf.embeddings.batches import DistillationCollator
from neobert_hf.embeddings.distillation import (
    DistillationLoss,
    Teacher,
    add_teacher,
    comparable_rows,
    principal_axes,
)
from neobert_hf.embeddings.inference import kind_of
from neobert_hf.embeddings.models import build_encoder
from neobert_hf.embeddings.recipe import prepare_run
from neobert_hf.training.run_checkpoints import CheckpointError
from tests.embeddings.test_resuming import interrupted
from tests.helpers.embedding_runs import cut_short, losses_of, run, to_flags


PROMPT = "Find the answer. "


@pytest.fixture(scope="module")
def teachers(trained, tmp_path_factory) -> dict[str, str]:
    """An embedding model and a reranker of their own, which tests may change."""
    folder = tmp_path_factory.mktemp("teachers")
    for kind in ("dense", "reranker"):
        shutil.copytree(trained[kind] / "model", folder / kind)
    return {kind: str(folder / kind) for kind in ("dense", "reranker")}


@pytest.fixture
def taught(settings, monkeypatch):
    """What a run has in its training data once the teacher has spoken, in files of 30 rows."""
    monkeypatch.setattr(distillation, "PART_ROWS", 30)

    def teach(**changes) -> tuple[Dataset, object]:
        flags = to_flags("dense", settings(only="triplets", **changes))
        with prepare_run(DenseArguments, flags) as prepared:
            model = build_encoder(prepared.source, 48)
            answers = add_teacher(prepared, model)
            return prepared.data.train["triplets"], answers

    return teach


def rows_with(labels) -> list[dict]:
    texts = [f"{word} and some more words" for word in "alpha beta gamma delta".split()]
    return [
        {
            "query": text[:5],
            "positive": text,
            "negatives": [texts[number - 1], texts[number - 2]],
            "label": label,
            "dataset_name": "a",
        }
        for number, (text, label) in enumerate(zip(texts, labels))
    ]


def loss_of(encoder, rows: list[dict], unit: str, projection=None, **settings) -> torch.Tensor:
    collator = DistillationCollator(preprocess_fn=encoder.preprocess, prompts={"a": {"query": PROMPT}})
    batch = collator(rows)
    columns = ["query", "positive"] + [f"negative_{number}" for number in range(len(rows[0]["negatives"]))]
    features = [
        {key.removeprefix(f"{column}_"): value for key, value in batch.items() if key.startswith(f"{column}_")}
        for column in columns
    ]
    arguments = DenseArguments("m", "d", teacher="t", **settings)
    return DistillationLoss(encoder, arguments, unit, projection)(features, batch["label"])


def student_scores(encoder, rows: list[dict], temperature: float) -> torch.Tensor:
    """(rows, documents), in float64 from the embeddings of texts."""
    queries = torch.tensor(encoder.encode([PROMPT + row["query"] for row in rows])).double()
    scores = []
    for query, row in zip(queries, rows):
        documents = torch.tensor(encoder.encode([row["positive"], *row["negatives"]])).double()
        scores.append(F.cosine_similarity(query[None], documents) / temperature)
    return torch.stack(scores)


def in_batch(encoder, rows: list[dict], temperature: float) -> float:
    """InfoNCE of queries and right documents."""
    queries = F.normalize(torch.tensor(encoder.encode([PROMPT + row["query"] for row in rows])).double())
    documents = F.normalize(torch.tensor(encoder.encode([row["positive"] for row in rows])).double())
    return -(queries @ documents.T / temperature).log_softmax(1).diagonal().mean().item()


@pytest.mark.parametrize("unit, temperature", [("cosine", 0.07), ("logit", 1.0)])
def test_margins_and_probabilities_are_those_of_the_teacher(encoder, unit, temperature):
    labels = torch.randn(4, 3)
    rows, model = rows_with(labels.tolist()), build_encoder(str(encoder), 48).eval()
    ours, theirs = student_scores(model, rows, 0.07), labels.double() / temperature
    margins = [scores[:, :1] - scores[:, 1:] for scores in (ours, theirs)]
    expected = (margins[0] - margins[1]).square().mean().item()
    assert loss_of(model, rows, unit, distillation="margin_mse").item() == pytest.approx(expected, rel=1e-5)
    kl = (theirs.softmax(1) * (theirs.log_softmax(1) - ours.log_softmax(1))).sum(1).mean().item()
    assert loss_of(model, rows, unit, distillation="kl").item() == pytest.approx(kl, rel=1e-5)
    both = loss_of(model, rows, unit, distillation="kl", contrastive_weight=0.2).item()
    assert both == pytest.approx(kl + 0.2 * in_batch(model, rows, 0.07), rel=1e-5)
    softer = labels.double() / 3
    kl = (softer.softmax(1) * (softer.log_softmax(1) - ours.log_softmax(1))).sum(1).mean().item()
    value = loss_of(model, rows, unit, distillation="kl", teacher_temperature=3)
    assert value.item() == pytest.approx(kl, rel=1e-5)
    value.backward()
    assert all(weight.grad.abs().sum() > 0 for name, weight in model.named_parameters() if "qkv" in name)


def test_embeddings_are_those_of_the_teacher_in_its_widest_directions(encoder):
    # In 40 of 48 directions next to nothing.
    basis, _ = torch.linalg.qr(torch.randn(48, 48))
    labels = (torch.randn(4, 2, 48) * torch.tensor([1.0] * 8 + [1e-4] * 40)) @ basis
    rows = [row | {"negatives": []} for row in rows_with(labels.tolist())]
    axes = principal_axes([Dataset.from_dict({"label": part.tolist()}) for part in labels.split(2)], 48, 32)
    projected = labels @ axes
    products = [vectors.flatten(0, 1) @ vectors.flatten(0, 1).T for vectors in (labels, projected)]
    assert torch.allclose(*products, atol=1e-5) and torch.allclose(axes.T @ axes, torch.eye(32), atol=1e-5)
    model = build_encoder(str(encoder), 48).eval()
    queries = torch.tensor(model.encode([PROMPT + row["query"] for row in rows]))
    documents = torch.tensor(model.encode([row["positive"] for row in rows]))
    expected = (torch.stack([queries, documents], 1) - projected).square().mean().item()
    assert loss_of(model, rows, "embedding", axes, distillation="mse").item() == pytest.approx(expected, rel=1e-5)
    rows = [row | {"label": label} for row, label in zip(rows, projected.tolist())]
    assert loss_of(model, rows, "embedding", distillation="mse").item() == pytest.approx(expected, rel=1e-5)


def test_a_teacher_reads_each_text_once(teachers, monkeypatch):
    """Of several rows, and in several files: a hard negative is the right document of another row."""
    teacher = Teacher(teachers["dense"], False, torch.device("cpu"))
    rows = Dataset.from_list(
        [{"query": f"q{n}", "positive": f"d{n}", "negatives": [f"d{(n + 1) % 6}"]} for n in range(6)]
    )
    alone = [teacher.read(rows.select([number]), ["", ""])[0] for number in range(6)]
    seen, encode = [], teacher.model.encode
    monkeypatch.setattr(teacher.model, "encode", lambda texts, **more: (seen.extend(texts), encode(texts, **more))[1])
    teacher.known.clear()
    found = teacher.read(rows.select(range(3)), ["", "Page: "]) + teacher.read(rows.select(range(3, 6)), ["", "Page: "])
    assert sorted(seen) == sorted([f"d{n}" for n in range(6)] + [f"q{n}" for n in range(6)])
    assert not np.allclose(found, alone, atol=1e-3)
    assert np.allclose(teacher.read(rows, ["", ""]), alone, atol=1e-5)
    monkeypatch.setattr(distillation, "KEPT_TEXTS", 2)
    assert np.allclose(teacher.read(rows, ["", ""]), alone, atol=1e-5) and not teacher.known[""]


def test_rows_are_filled_up_with_documents_of_others(data):
    pairs = [
        {"query": f"q{number}", "positive": f"p{number}", "negatives": ["n1", "n2", "n3"][: number % 4]}
        for number in range(12)
    ]
    rows = comparable_rows("a", Dataset.from_list(pairs), embeddings=False)
    for row, before in zip(rows, pairs):
        assert (
            len({row["positive"], *row["negatives"]}) == 4
            and row["negatives"][: len(before["negatives"])] == before["negatives"]
        )
    assert rows[:] == comparable_rows("a", Dataset.from_list(pairs), embeddings=False)[:]
    assert not any(comparable_rows("a", Dataset.from_list(pairs), embeddings=True)["negatives"])
    with pytest.raises(ValueError, match="Dataset a has 6 different documents, too few to give every row 3 others"):
        comparable_rows("a", Dataset.from_list(pairs[:6]), embeddings=False)


def test_the_teacher_reads_with_its_own_prompts(teachers, taught):
    rows, answers = taught(teacher=teachers["dense"], distillation="kl")
    assert (answers.unit, answers.width) == ("cosine", None)
    teacher = SentenceTransformer(teachers["dense"], device="cpu")
    row = rows[31]
    query = teacher.encode(PROMPT + row["query"])
    documents = teacher.encode([row["positive"], *row["negatives"]])
    assert row["label"] == pytest.approx(teacher.similarity(query, documents)[0].tolist(), abs=1e-6)
    assert abs(teacher.similarity(teacher.encode(row["query"]), documents)[0, 0] - row["label"][0]) > 1e-4

    rows, answers = taught(teacher=teachers["reranker"], distillation="margin_mse")
    assert answers.unit == "logit" and max(map(abs, sum(rows["label"][:], []))) > 0
    pairs = [(PROMPT + row["query"], text) for text in (row["positive"], *row["negatives"])]
    logits = CrossEncoder(teachers["reranker"], device="cpu").predict(
        pairs, prompt="", activation_fn=torch.nn.Identity()
    )
    assert rows[31]["label"] == pytest.approx(logits.tolist(), abs=1e-6)

    rows, answers = taught(teacher=teachers["dense"], distillation="mse")
    assert (answers.unit, answers.width) == ("embedding", 32) and np.array(rows["label"][:]).shape == (200, 2, 32)
    assert rows[31]["label"][0] == pytest.approx(query.tolist(), abs=1e-6)


def test_results_are_stored_and_read_once(teachers, taught, edit, tmp_path, monkeypatch, capsys):
    changes = {"teacher": teachers["reranker"], "distillation": "kl", "teacher_dir": tmp_path / "shared"}
    rows, _ = taught(**changes)
    (folder,) = (tmp_path / "shared").iterdir()
    parts = sorted(folder.glob("part-*"))
    times = {part: part.stat().st_mtime_ns for part in parts}
    assert len(parts) == 7 and "teacher: triplets, 200 of 200 rows" in capsys.readouterr().out
    # Killed before the last part.
    parts[-1].unlink()
    again, _ = taught(**changes)
    assert again[:] == rows[:] and "30 of 200" not in capsys.readouterr().out
    assert {part: part.stat().st_mtime_ns for part in parts[:-1]} == {part: times[part] for part in parts[:-1]}
    assert sorted(file.name for file in folder.iterdir()) == ["answers.parquet", *(part.name for part in parts)]
    # Another run takes them, and needs no teacher.
    with monkeypatch.context() as patch:
        patch.delattr(distillation, "load_trained_reranker")
        other, _ = taught(**changes | {"distillation": "margin_mse"}, output_dir=tmp_path / "other")
    assert other[:] == rows[:]
    # Neither other prompts nor other rows are what the teacher has read.
    for number, change in enumerate(({"instruction": "Another."}, {"split": "train[:100]"})):
        taught(**changes, datasets=edit(lambda content, change=change: content["train"]["triplets"].update(change)))
        assert len(list((tmp_path / "shared").iterdir())) == 2 + number


def change_weights(folder: str) -> None:
    weights = load_file(f"{folder}/model.safetensors")
    save_file({name: weight.flip(0) for name, weight in weights.items()}, f"{folder}/model.safetensors")


def test_another_teacher_speaks_anew_and_not_to_a_run_that_has_begun(teachers, taught, settings, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(teachers["dense"], teacher)
    changes = {"only": "triplets", "teacher": teacher, "distillation": "margin_mse", "eval_strategy": "no"}
    changes["max_steps"] = 6
    losses = losses_of(run("dense", settings(**changes, save_steps=3)))
    assert losses[-1] < losses[0]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "DistillationLoss" in card and "MarginMSELoss" in card
    (folder,) = (tmp_path / "run" / "teacher").iterdir()
    interrupted(tmp_path / "run", tmp_path / "lost", step=3)
    shutil.rmtree(tmp_path / "lost" / "teacher" / folder.name)
    with pytest.raises(CheckpointError, match="began with results of its teacher, and .* no longer holds all of them"):
        run("dense", settings(**changes, output_dir=tmp_path / "lost"))
    for name in ("part-00000.parquet", "answers.parquet"):
        shutil.copytree(folder, tmp_path / "lost" / "teacher" / folder.name)
        cut_short(tmp_path / "lost" / "teacher" / folder.name / name)
        with pytest.raises(ResultError, match=f"{name} cannot be read"):
            run("dense", settings(**changes, output_dir=tmp_path / "lost"))
        shutil.rmtree(tmp_path / "lost" / "teacher" / folder.name)
    change_weights(str(teacher))
    with pytest.raises(CheckpointError, match="teacher_fingerprint: .* there, .* now"):
        run("dense", settings(**changes))
    shared = {"teacher": str(teacher), "distillation": "margin_mse", "teacher_dir": tmp_path / "run" / "teacher"}
    rows, _ = taught(**shared, output_dir=tmp_path / "other")
    assert len(list((tmp_path / "run" / "teacher").iterdir())) == 2
    before = Dataset.from_parquet(str(folder / "part-00000.parquet"))
    assert before["label"][:] != rows["label"][:]


def test_embeddings_and_prefixes_are_learned(teachers, settings, tmp_path):
    """From pairs without negatives, beside the contrastive loss; and scores for prefixes of the embeddings."""
    teacher = {"teacher": teachers["dense"], "eval_strategy": "no", "max_steps": 4, "save_steps": 4}
    log = run("dense", settings(**teacher, distillation="mse", contrastive_weight=0.1, only="pairs"))
    assert np.isfinite(losses_of(log)).all()
    output = tmp_path / "prefixes"
    scores = {"distillation": "kl", "matryoshka_dims": "8 16", "only": "triplets nested"}
    assert np.isfinite(losses_of(run("dense", settings(**teacher, **scores, output_dir=output)))).all()
    assert SentenceTransformer(str(output / "model"), truncate_dim=8).encode("text").shape == (8,)


REFUSED = [
    ({"distillation": "kl"}, "`teacher` is None and `distillation` is 'kl': set both"),
    ({"contrastive_weight": 0.2}, "`contrastive_weight` is 0.2 without `teacher`"),
    ({"teacher": "T", "distillation": "cosine"}, "`distillation` is 'cosine'; it must be one of margin_mse, kl, mse"),
    ({"teacher": "T", "distillation": "kl", "guide": "g"}, "`guide` is 'g' and `distillation` is kl: leave one"),
    ({"teacher": "T", "distillation": "kl", "mini_batch_size": 2}, "`mini_batch_size` is 2 and .* losses do not"),
    ({"teacher": "T", "distillation": "mse", "matryoshka_dims": 8}, "`matryoshka_dims` is .8. and .* a prefix of"),
    ({"teacher": "T", "distillation": "mse", "miner": "m", "negatives": 2}, "`miner` is 'm' and `distillation` is mse"),
    ({"teacher": "T", "distillation": "kl", "matryoshka_dims": 64, "only": "triplets"}, "the model allows 1 to 32"),
    ({"teacher": "T", "distillation": "kl", "only": "pairs"}, "Dataset pairs has no hard negatives, .* Set `miner`"),
    ({"teacher": "reranker", "distillation": "mse"}, "is a reranker, which has no embeddings: set `distillation` to"),
    (
        {"teacher": "encoder", "distillation": "kl"},
        "is an encoder without a trained pooling or head; it must be an emb",
    ),
    ({"teacher": "sparse", "distillation": "kl"}, "which is SparseEncoder; it must be an embedding model"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_makes_no_sense_is_refused_before_the_teacher_reads(
    teachers, encoder, settings, tmp_path, change, message
):
    places = {"T": teachers["dense"], "encoder": encoder, "reranker": teachers["reranker"], "sparse": tmp_path}
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    change = change | {"teacher": places[change["teacher"]]} if "teacher" in change else change
    with pytest.raises(ValueError, match=message):
        run("dense", settings(**change))
    assert not list(tmp_path.rglob("part-*"))


def test_a_narrow_teacher_cannot_teach_embeddings(teachers, settings, tmp_path):
    teacher = tmp_path / "narrow"
    shutil.copytree(teachers["dense"], teacher)
    config = json.loads((teacher / "config_sentence_transformers.json").read_text())
    (teacher / "config_sentence_transformers.json").write_text(json.dumps(config | {"truncate_dim": 16}))
    message = "have 16 numbers, and those of the model to train have 32: mse needs a teacher"
    with pytest.raises(ValueError, match=message):
        run("dense", settings(teacher=teacher, distillation="mse", only="pairs"))


def test_models_of_earlier_versions_are_known_by_their_files(teachers, tmp_path):
    for kind, expected in (("dense", "SentenceTransformer"), ("reranker", "CrossEncoder")):
        shutil.copytree(teachers[kind], tmp_path / kind)
        (tmp_path / kind / "config_sentence_transformers.json").unlink()
        if kind == "reranker":
            (tmp_path / kind / "modules.json").unlink()
        assert kind_of(str(tmp_path / kind)) == expected

"""The recipes for one's own tasks on small data: what they train, report, save, and that a resume changes no bit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value, get_dataset_split_names, load_dataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, pipeline

from neobert_hf.common.run import SettingsMismatch
from neobert_hf.tasks import texts
from neobert_hf.training.fine_tuning import FineTuningArguments, load_for_task
from tests.helpers.examples import load_example
from tests.helpers.models import save_encoder
from tests.helpers.other_encoders import ENCODERS, save_other_encoder
from tests.helpers.pretraining_runs import assert_same_weights, interrupted_behind, weights
from tests.helpers.small_tokenizer import small_tokenizer
from tests.helpers.task_runs import (
    SMALL,
    asked_rows,
    flags,
    numbered_rows,
    tagged_rows,
    task_of_rows,
    text_rows,
    write_csv,
    write_json_lines,
    write_squad,
)


classify, tag, answer = map(load_example, ("run_classification", "run_token_classification", "run_question_answering"))
regress = load_example("run_regression")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"), small_tokenizer())


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    rows = text_rows(200)
    rows[5]["description"] = "a, quoted | text"
    return write_csv(tmp_path_factory.mktemp("labelled") / "rows.csv", rows)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory) -> Path:
    """Parquet whose tags are numbers with their names, as the dataset that the shipped configuration names."""
    folder, names = tmp_path_factory.mktemp("tagged"), ClassLabel(names=["B-LOC", "O", "B-PER"])
    features = Features({"tokens": List(Value("string")), "ner_tags": List(names)})
    for split, size in {"train": 120, "validation": 30, "test": 20}.items():
        rows = tagged_rows(size // 2, seed=size) + tagged_rows(size // 2, seed=size + 1, length=8)
        rows = [{"tokens": row["tokens"], "ner_tags": names.str2int(row["tags"])} for row in rows]
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    for seed, (name, number) in enumerate({"train": 200, "dev": 30}.items()):
        write_squad(folder / f"{name}.json", asked_rows(number, seed, none=0.3, length=16))
    return folder


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def card_of(folder: Path, kind: str, title: str) -> dict[tuple[str, str], float]:
    """What the model's card says of its scores; nothing in it is of this machine, and the model is of that kind."""
    card = ModelCard.load(folder / "model" / "README.md")
    assert str(folder) not in card.content and f"# {title}" in card.text.splitlines()
    assert "license" in card.text and "rows chose its weights" in card.text
    # The program in it runs.
    (program,) = re.findall("```python\n(.*?)```", card.text, re.DOTALL)
    exec(program.replace("path or id of this model", str(folder / "model")), {})
    assert {result.task_type for result in card.data.eval_results} == {kind} == {card.data.pipeline_tag}
    return {(result.dataset_split, result.metric_type): result.metric_value for result in card.data.eval_results}


def test_accumulated_batches_train_as_one_large_batch(encoder, tmp_path):
    """Also if the last batch of an epoch is smaller, and if rows have different numbers of labels."""
    rows = [row for length in (2, 5, 9) for row in tagged_rows(15, seed=length, length=length)]
    data = write_json_lines(tmp_path / "rows.jsonl", rows)
    plain = shutil.copytree(encoder, tmp_path / "encoder")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"dropout": 0.0}))
    # Adam would make much of what float32 rounds.
    changes = {"classifier_dropout": 0, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 100.0, "eval_steps": 5}
    for size, steps in ((8, 1), (2, 4)):
        batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        tag.main(flags(tmp_path / str(size), plain, data, **changes, **batches))
    other = weights(tmp_path / "2")
    for name, weight in weights(tmp_path / "8").items():
        assert torch.allclose(weight, other[name], atol=1e-5), name


def test_classes_of_a_csv_file(encoder, labelled, tmp_path, capsys):
    classify.main(flags(tmp_path / "run", encoder, labelled))
    assert "20 of 200 rows are held out" in capsys.readouterr().out
    report, text = report_of(tmp_path / "run"), (tmp_path / "run" / "report.md").read_text()
    scores = report["scores"]["validation"]
    assert scores["macro_f1"] > 0.8 and card_of(tmp_path / "run", "text-classification", "A classifier of texts") == {
        ("validation", name): scores[name] for name in ("accuracy", "macro_f1")
    }
    # The sections are the first words of the texts, so that a bag of words knows them all.
    assert "classes a text has: mail, net." in (tmp_path / "run" / "model" / "README.md").read_text()
    assert report["baselines"]["validation"]["accuracy"] == 1.0 and "| validation | 20 | TF-IDF" in text
    assert re.search(r"^ +mail +1\.000", text, re.MULTILINE)
    found = pipeline("text-classification", str(tmp_path / "run" / "model"), device="cpu")("net x y")
    assert found[0]["label"] == "net"
    # Read by itself, the tokenizer does not cut texts at the length of training.
    assert Tokenizer.from_file(str(tmp_path / "run" / "model" / "tokenizer.json")).truncation is None


def test_numbers_of_texts(encoder, tmp_path, capsys):
    """Also large ones: the saved model gives them as they are in the data."""
    data = write_csv(tmp_path / "rows.csv", numbered_rows(200))
    changes = {"learning_rate": 1e-2, "num_train_epochs": 4}
    result = regress.main(flags(tmp_path / "run", encoder, data, **changes))
    scores, baseline = result.scores["validation"], result.baseline["validation"]
    assert scores["mae"] < 100 and scores["pearson"] > 0.99 and scores.keys() == baseline.keys()
    of_card = card_of(tmp_path / "run", "text-classification", "Numbers estimated from texts")
    assert of_card[("validation", "mae")] == scores["mae"]
    assert f"| {scores['mae']:.4g} |" in capsys.readouterr().out
    of_the_saved = pipeline("text-classification", str(result.model), device="cpu")(["mail x y", "net x y"])
    found = [one["score"] for one in of_the_saved]
    assert found == pytest.approx([1000.5, 3000.25], abs=200)
    evaluations = report_of(tmp_path / "run")["evaluations"]
    best = min(evaluations, key=lambda each: each["rmse"])
    assert best["step"] == report_of(tmp_path / "run")["best_step"]
    assert scores["rmse"] == pytest.approx(best["rmse"], rel=1e-4)


@pytest.mark.parametrize(
    "recipe, rows, length",
    [
        (classify, text_rows(40), 0),
        (classify, text_rows(40), 2),
        (classify, [{"text1": f"a {row}", "text2": "b", "label": "yn"[row % 2]} for row in range(40)], 4),
        (regress, numbered_rows(40), 2),
        (tag, tagged_rows(40), 2),
        (answer, asked_rows(40), 2),
    ],
)
def test_a_length_that_leaves_nothing_of_a_text_is_refused(encoder, tmp_path, recipe, rows, length):
    data = write_json_lines(tmp_path / "rows.jsonl", rows)
    changes = {"max_length": length} | ({"stride": 0} if recipe is answer else {})
    with pytest.raises(ValueError, match=f"`max_length` is {length}"):
        recipe.main(flags(tmp_path / "run", encoder, data, **changes))


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_every_head_gets_the_scale_of_the_numbers(tmp_path, name):
    save_other_encoder(name, tmp_path, small_tokenizer())
    task = task_of_rows("numbers", train=numbered_rows(8), validation=numbered_rows(8, seed=1))
    options = {"labels": task.labels, "problem": task.problem}
    model, tokenizer = load_for_task(str(tmp_path), AutoModelForSequenceClassification, **options)
    inputs = tokenizer(["a b c"], return_tensors="pt")
    before = model.eval()(**inputs).logits.numpy()
    task.finish(model)
    found = task.predict(task.tables["train"], None, before)
    assert model(**inputs).logits.numpy()[:, 0] == pytest.approx(found, rel=1e-5)


def test_a_trained_model_is_trained_on_other_labels(encoder, labelled, tmp_path, capsys):
    """Its head has other outputs: the encoder is kept, and the head is new."""
    trained = classify.main(flags(tmp_path / "first", encoder, labelled, max_steps=2)).model
    rows = [{"text": row["text"], "label": "abc"[number % 3]} for number, row in enumerate(numbered_rows(30))]
    settings = SMALL | {"learning_rate": 0, "max_steps": 1, "data": rows}
    found = classify(output_dir=tmp_path / "second", model=trained, **settings).model
    assert f"{trained} has a head for other labels" in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, found))
    assert after["classifier.weight"].shape[0] == 3
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("model."))


def test_balanced_weights_let_a_rare_class_count_as_much_as_a_common_one(encoder, tmp_path):
    """Where texts tell nothing, a model learns how common classes are, or with weights that they are equally so."""
    texts = [row["description"].split(" ", 1)[1] * 2 for row in text_rows(300)]
    rows = [{"text": f"{text} {number}", "label": "yn"[number % 10 < 9]} for number, text in enumerate(texts)]
    data, shares = write_json_lines(tmp_path / "rows.jsonl", rows), {}
    for weights_ in (None, "balanced"):
        changes = {"num_train_epochs": 3, "eval_steps": 102, "class_weights": weights_}
        result = classify.main(flags(tmp_path / str(weights_), encoder, data, **changes))
        # The metric that is first chooses the checkpoint.
        assert next(iter(result.scores["validation"])) == ("macro_f1" if weights_ else "accuracy")
        classifier = pipeline("text-classification", str(result.model), device="cpu", top_k=None)
        found = [{one["label"]: one["score"] for one in each} for each in classifier([row["text"] for row in rows])]
        shares[weights_] = sum(each["y"] for each in found) / len(found)
    assert shares[None] < 0.25 and 0.35 < shares["balanced"] < 0.65


def test_the_baseline_of_many_classes_takes_no_more_memory(monkeypatch):
    rows = [{"text": f"word{row} of {row % 20}", "label": f"class {row % 20}"} for row in range(200)]
    task = task_of_rows("classes", train=rows)
    monkeypatch.setattr(texts, "MOST_WEIGHTS", 1000)
    assert task.linear_model[-1].coef_.shape == (20, 50)
    assert task.metrics(task.tables["validation"], task.baseline(task.tables["validation"]))["accuracy"] > 0.9


def test_few_steps_make_few_checkpoints():
    """Of 72 steps in ten epochs: an evaluation, and so a checkpoint, every ten, and not every step."""
    for rows, every in ((7 * 32, 10), (30 * 32, 15), (5_000 * 32, 500)):
        arguments = FineTuningArguments("runs", use_cpu=True).planned(rows)
        assert arguments.eval_steps == arguments.save_steps == every


def test_the_end_says_where_the_model_is_and_why_training_stopped(encoder, labelled, tmp_path, capsys):
    # So slow that no evaluation is better than the first.
    changes = {"max_steps": 20, "eval_steps": 2, "learning_rate": 1e-9, "early_stopping_patience": 2}
    result = classify.main(flags(tmp_path / "run", encoder, labelled, **changes))
    last = capsys.readouterr().out.strip().splitlines()[-2]
    assert str(result.model) in last and "step 2;" in last and "step 6 of 20" in last and "2 evaluations" in last


def test_several_classes_of_a_pair_of_texts(encoder, tmp_path, capsys):
    """One class follows from the first text and one from the second, so both are read."""
    names = {"mail": "three", "net": "five"}
    rows = [
        {
            "premise": first["description"],
            "hypothesis": f"{names[second['section']][0]} x",
            "labels": [first["section"], names[second["section"]]],
        }
        for first, second in zip(text_rows(160), text_rows(160, seed=1))
    ]
    data = write_json_lines(tmp_path / "rows.jsonl", rows)
    changes = {"learning_rate": 1e-2, "num_train_epochs": 3, "pooling": "mean"}
    classify.main(flags(tmp_path / "run", encoder, data, **changes))
    assert "'premise' and 'hypothesis', labels in 'labels'; multi_label_classification" in capsys.readouterr().out
    assert report_of(tmp_path / "run")["scores"]["validation"]["macro_f1"] > 0.9
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert list(config["label2id"]) == ["five", "mail", "net", "three"] and config["classifier_pooling"] == "mean"
    assert config["problem_type"] == "multi_label_classification"


def test_tags_of_a_dataset_of_the_hub(encoder, tagged, tmp_path, monkeypatch, capsys):
    """With a tokenizer that pads on the left, and a limit larger than the model's, which the report then names."""
    left = shutil.copytree(encoder, tmp_path / "left")
    file = left / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": "left"}))

    def from_the_hub(read):
        return lambda source, *arguments, **options: read(str(tagged), *arguments, **options)

    monkeypatch.setattr("neobert_hf.data.sources.load_dataset", from_the_hub(load_dataset))
    monkeypatch.setattr("neobert_hf.tasks.rows.get_dataset_split_names", from_the_hub(get_dataset_split_names))
    tag.main(flags(tmp_path / "run", left, "me/tags", max_length=1000))
    printed = capsys.readouterr().out
    assert "120 train, 30 validation, 20 test rows" in printed and "tags in 'ner_tags'" in printed
    report, text = report_of(tmp_path / "run"), (tmp_path / "run" / "report.md").read_text()
    scores, names = report["scores"], ("f1", "precision", "recall", "accuracy")
    assert scores["validation"]["f1"] > 0.9 and scores["test"]["f1"] > 0.9
    assert re.search(r"^ +LOC +[01]\.", text, re.MULTILINE)
    assert card_of(tmp_path / "run", "token-classification", "Tags of words") == {
        (split, name): scores[split][name] for split in ("validation", "test") for name in names
    }
    # The tag is the first letter's, and some of the words of two letters are seen in training.
    assert 0.5 < report["baselines"]["test"]["accuracy"] <= 1
    assert report["identity"]["max_length"] == 64


def test_answers_with_windows_and_none(encoder, asked, tmp_path):
    # Windows of 16 tokens, of which the text takes 11.
    changes = {"stride": 4, "max_length": 16, "learning_rate": 1e-2, "eval_steps": 60}
    answer.main(flags(tmp_path, encoder, asked, **changes))
    scores = report_of(tmp_path)["scores"]["validation"]
    assert scores["answer_f1"] > 0.7 and scores["no_answer_f1"] > 0.7
    names = ("f1", "exact_match", "answer_f1", "no_answer_f1")
    assert card_of(tmp_path, "question-answering", "Answers found in texts") == {
        ("validation", name): scores[name] for name in names
    }
    baseline = report_of(tmp_path)["baselines"]["validation"]
    assert baseline.keys() == scores.keys() and baseline["no_answer_f1"] == 0.0


def test_an_interrupted_run_goes_on_to_the_same_bits(encoder, labelled, tmp_path, monkeypatch):
    """Also if data and model have moved meanwhile; with relative paths, with adapters, and if it stops early."""
    changes = {"max_steps": 60, "eval_steps": 2, "lora_rank": 2, "lora_dropout": 0.1, "learning_rate": 1e-2}
    changes |= {"early_stopping_patience": 2}
    classify.main(flags(tmp_path / "whole", encoder, labelled, **changes))
    evaluations, best = (report_of(tmp_path / "whole")[name] for name in ("evaluations", "best_step"))
    assert 2 < len(evaluations) < 30 and evaluations[-3]["step"] == best
    with interrupted_behind(f"checkpoint-{best + 2}"):
        classify.main(flags(tmp_path / "run", encoder, labelled, **changes))
    shutil.copytree(encoder, tmp_path / "moved")
    shutil.copy(labelled, tmp_path / "renamed.csv")
    monkeypatch.chdir(tmp_path)
    # The second time the run is finished, and not trained again.
    for _ in range(2):
        classify.main(flags(tmp_path / "run", Path("moved"), Path("renamed.csv"), **changes))
        assert report_of(tmp_path / "whole") == report_of(tmp_path / "run")
        assert_same_weights(tmp_path / "whole", tmp_path / "run")
    # Adapters are merged: what is left is a plain model.
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert weights(tmp_path / "run").keys() == model.state_dict().keys()
    with pytest.raises(SettingsMismatch, match="max_length: 32 there, 16 now"):
        classify.main(flags(tmp_path / "run", Path("moved"), Path("renamed.csv"), **changes | {"max_length": 16}))


@pytest.mark.parametrize(
    "name", [name if name == "gte" else pytest.param(name, marks=pytest.mark.slow) for name in ENCODERS]
)
def test_other_encoders_are_saved_as_they_were_at_their_best(labelled, tagged, asked, tmp_path, name):
    """Tensors of GTE and NomicBERT have other names in files: Transformers' Trainer would not load the best ones."""
    save_other_encoder(name, tmp_path / name, small_tokenizer())
    runs = {"classes": (classify, labelled), "tags": (tag, tagged), "answers": (answer, asked)}
    if name in ("gte", "nomicbert"):
        del runs["answers"]  # They have no head for answers.
    # So slow that every evaluation is as good as the first, which is then the best, and the weights go on changing.
    changes = {"max_steps": 2, "eval_steps": 1, "learning_rate": 1e-6, "warmup_steps": 0}
    for part, (example, rows) in runs.items():
        run = tmp_path / part
        example.main(flags(run, tmp_path / name, rows, **changes | ({"stride": 4} if part == "answers" else {})))
        folders = (run / "checkpoint-1", run / "checkpoint-2", run / "model")
        best, last, saved = (load_file(folder / "model.safetensors") for folder in folders)
        assert report_of(run)["best_step"] == 1 and (run / "report.md").is_file()
        assert all(torch.equal(weight, best[key]) for key, weight in saved.items())
        assert not all(torch.equal(weight, last[key]) for key, weight in saved.items())

"""The recipes for one's own tasks on small data: what they train, report, save, and that a resume changes no bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, pipeline

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.hub.card import settings_of_run
from tests.helpers.examples import load_example
from tests.helpers.hub_server import HubServer, Repository
from tests.helpers.models import ROOT
from tests.helpers.other_encoders import ENCODERS, save_other_encoder
from tests.helpers.pretraining_runs import interrupted_behind
from tests.helpers.task_runs import (
    asked_rows,
    flags,
    tagged_rows,
    text_rows,
    write_csv,
    write_json_lines,
    write_squad,
)


classify, tag, answer = map(load_example, ("run_classification", "run_token_classification", "run_question_answering"))


def numbered_rows(count: int) -> list[dict]:
    return [row | {"section": str(number / count)} for number, row in enumerate(text_rows(count))]


FEW = {"max_steps": 6, "eval_steps": 2}


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def card_of(folder: Path, kind: str) -> dict[tuple[str, str], float]:
    """What the model's card says of its scores; nothing in it is of this machine, and the model is of that kind."""
    card = ModelCard.load(folder / "model" / "README.md")
    assert str(folder) not in card.content and f"# {kind}" in card.text
    assert {result.task_type for result in card.data.eval_results} == {kind} == {card.data.pipeline_tag}
    settings = settings_of_run(folder / "model")
    assert settings["learning_rate"] == report_of(folder)["settings"]["learning_rate"]
    return {(result.dataset_split, result.metric_type): result.metric_value for result in card.data.eval_results}


@pytest.mark.parametrize("task", ["classes", "numbers", "tags", "answers"])
def test_accumulated_batches_train_as_one_large_batch(encoder, task, tmp_path):
    """Also if the last batch of an epoch is smaller, and if rows have different numbers of labels."""
    recipe, data = {
        "classes": (classify, lambda: write_csv(tmp_path / "rows.csv", text_rows(45))),
        "numbers": (classify, lambda: write_csv(tmp_path / "rows.csv", numbered_rows(45))),
        "tags": (tag, lambda: write_json_lines(tmp_path / "rows.jsonl", tagged_rows(45))),
        "answers": (answer, lambda: write_squad(tmp_path / "rows.json", asked_rows(40))),
    }[task]
    data, weights, plain = data(), [], shutil.copytree(encoder, tmp_path / "encoder")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"dropout": 0.0}))
    for size, steps in ((8, 1), (2, 4)):
        output = tmp_path / str(size)
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "classifier_dropout": 0}
        # Adam would make much of what float32 rounds.
        changes |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 100.0}
        changes |= {"stride": 4} if task == "answers" else {}
        recipe.main(flags(output, plain, data, num_train_epochs=2, eval_steps=5, **changes))
        weights.append(load_file(output / "model" / "model.safetensors"))
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-5), name


def test_classes_of_a_csv_file(encoder, tmp_path, capsys):
    rows = text_rows(200)
    rows[5]["description"] = "a, quoted | text"
    data = write_csv(tmp_path / "rows.csv", rows)
    classify.main(flags(tmp_path / "run", encoder, data, class_weights=True, layer_decay=0.9))
    printed, text = capsys.readouterr().out, (tmp_path / "run" / "report.md").read_text()
    assert "text description, label section; single_label_classification" in printed
    assert "20 of 200 rows are held out" in printed
    assert report_of(tmp_path / "run")["scores"]["validation"]["macro_f1"] > 0.8
    assert "| mail |" in text and "GLUE" not in text and "NeoBERT" not in text
    assert (tmp_path / "run" / "confusion_validation.png").stat().st_size > 5_000
    found = pipeline("text-classification", str(tmp_path / "run" / "model"), device="cpu")("net x y")
    assert found[0]["label"] == "net"
    card = ModelCard.load(tmp_path / "run" / "model" / "README.md")
    assert card.data.eval_results[0].metric_type == "macro_f1" and str(tmp_path) not in card.content
    # What it cannot go on from, or would write over.
    trained = tmp_path / "run" / "model"
    with pytest.raises(ValueError, match="`model` is .*run/model', .* another `output_dir`"):
        classify.main(flags(tmp_path / "run", trained, data))
    with pytest.raises(ValueError, match="`data` is .*rows.csv', .* another `output_dir`"):
        classify.main(flags(data, encoder, data))
    labels = len({row["section"] for row in rows})
    more = [{"text": f"a {number}", "label": str(number % (labels + 1))} for number in range(40)]
    message = f"has a head for {labels} labels, but the data have {labels + 1}. Start from the encoder"
    with pytest.raises(ValueError, match=message):
        classify.main(flags(tmp_path / "other", trained, write_csv(tmp_path / "more.csv", more)))
    with pytest.raises(SettingsMismatch, match="class_weights: True there, False now"):
        classify.main(flags(tmp_path / "run", encoder, data, class_weights=False))


def test_the_head_may_read_the_mean_of_the_states(encoder, tokenizer, tmp_path):
    data = write_csv(tmp_path / "rows.csv", text_rows(40))
    classify.main(flags(tmp_path / "run", encoder, data, pooling="mean", num_train_epochs=1))
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["classifier_pooling"] == "mean"
    # Another recipe for the weights: not to be gone on with.
    with pytest.raises(SettingsMismatch, match="pooling"):
        classify.main(flags(tmp_path / "run", encoder, data, num_train_epochs=1))
    with pytest.raises(ValueError, match="`pooling` is 'max'; it must be cls or mean"):
        classify.main(flags(tmp_path / "run", encoder, data, pooling="max"))
    save_other_encoder("bert", tmp_path / "bert", tokenizer)
    with pytest.raises(ValueError, match="has no `classifier_pooling`, so it cannot be 'mean'"):
        classify.main(flags(tmp_path / "other", tmp_path / "bert", data, pooling="mean"))


def test_several_classes_a_row_and_numbers(encoder, tmp_path, capsys):
    rows = [{"text": row["description"], "tags": f"{row['section']};all"} for row in text_rows(80)]
    data = write_csv(tmp_path / "several.tsv", rows)
    options = {"label_column": "tags", "label_separator": ";", "class_weights": True, "num_train_epochs": 3}
    classify.main(flags(tmp_path / "several", encoder, data, **options))
    assert "multi_label_classification" in capsys.readouterr().out
    config = json.loads((tmp_path / "several" / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification" and list(config["label2id"]) == ["all", "mail", "net"]
    assert report_of(tmp_path / "several")["scores"]["validation"]["micro_f1"] > 0.8
    rows = [{"text": row["description"], "score": 0.5 + (row["section"] == "net")} for row in text_rows(80)]
    data = write_json_lines(tmp_path / "numbers.jsonl", rows)
    classify.main(flags(tmp_path / "numbers", encoder, data, num_train_epochs=3, validation_share=0.3))
    assert "label score; regression" in capsys.readouterr().out
    assert report_of(tmp_path / "numbers")["scores"]["validation"]["pearson"] > 0.8
    assert "worst errors" in (tmp_path / "numbers" / "report.md").read_text()


def test_tags_and_a_test_split(encoder, tagged, tmp_path, capsys):
    tag.main(flags(tmp_path, encoder, tagged))
    scores, text = report_of(tmp_path)["scores"], (tmp_path / "report.md").read_text()
    assert scores["validation"]["f1"] > 0.9 and scores["test"]["f1"] > 0.9 and "| LOC |" in text
    assert card_of(tmp_path, "token-classification") == {
        (split, name): scores[split][name]
        for split in ("validation", "test")
        for name in ("f1", "precision", "recall", "accuracy")
    }
    assert "120 train, 30 validation, 20 test rows" in capsys.readouterr().out
    rows = [row | {"tags": [name[-1] for name in row["tags"]]} for row in tagged_rows(60)]
    tag.main(flags(tmp_path / "plain", encoder, write_json_lines(tmp_path / "plain.jsonl", rows)))
    scores = report_of(tmp_path / "plain")["scores"]["validation"]
    assert list(scores) == ["accuracy", "score"] and scores["accuracy"] > 0.8


def test_scores_do_not_depend_on_the_side_of_padding(encoder, tagged, tmp_path):
    """Nor on a limit of the model that is smaller than the setting, which is what the report then says."""
    scores = []
    for side in ("right", "left"):
        model = shutil.copytree(encoder, tmp_path / f"{side}_model")
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"padding_side": side}))
        tag.main(flags(tmp_path / side, model, tagged, max_length=1000, **FEW))
        scores.append(report_of(tmp_path / side)["scores"])
        assert report_of(tmp_path / side)["settings"]["max_length"] == 64
    assert scores[0] == scores[1]


def test_answers_with_windows_and_none(encoder, asked, tmp_path):
    # Windows of 16 tokens, of which the text takes 11.
    changes = {"stride": 4, "max_length": 16, "num_train_epochs": 2, "learning_rate": 1e-2, "eval_steps": 60}
    answer.main(flags(tmp_path, encoder, asked, **changes))
    scores = report_of(tmp_path)["scores"]["validation"]
    assert scores["answer_f1"] > 0.7 and scores["no_answer_f1"] > 0.7
    names = ("f1", "exact_match", "answer_f1", "no_answer_f1")
    assert card_of(tmp_path, "question-answering") == {("validation", name): scores[name] for name in names}
    best = json.loads((tmp_path / "answers_validation.json").read_text())
    assert len(best) == 30 and all("" in [each["text"] for each in row["best"]] for row in best)


def test_splits_may_have_other_metrics(encoder, tmp_path):
    """F1 of questions without an answer, only where there are some. Once the run ended without a report."""
    for split, none, seed in (("train", 0.3, 0), ("dev", 0.3, 1), ("test", 0.0, 2)):
        write_squad(tmp_path / "data" / f"{split}.json", asked_rows(40, seed, none=none))
    answer.main(flags(tmp_path / "run", encoder, tmp_path / "data", stride=4, max_steps=2, eval_steps=1))
    head, _, *rows = [line for line in (tmp_path / "run" / "report.md").read_text().splitlines() if line[:2] == "| "][
        :4
    ]
    cells = {row.split(" | ")[0]: dict(zip(head.split(" | "), row.split(" | "))) for row in rows}
    assert cells["| test"]["no_answer_f1"] == "-" != cells["| validation"]["no_answer_f1"]


def test_evaluation_in_bfloat16_does_not_round_what_adapters_are_merged_into(encoder, tmp_path):
    data, models = write_csv(tmp_path / "rows.csv", text_rows(60)), []
    for bf16 in (False, True):
        output = tmp_path / str(bf16)
        classify.main(flags(output, encoder, data, lora_rank=2, max_steps=2, eval_steps=2, bf16_full_eval=bf16))
        models.append(load_file(output / "model" / "model.safetensors"))
    assert all(torch.equal(models[1][name], weight) for name, weight in models[0].items())


def test_questions_that_all_have_answers(encoder, tmp_path):
    """SQuAD v1 has no `is_impossible`: none is never said, and no score is of questions without an answer."""
    for seed, (name, number) in enumerate({"train": 200, "dev": 30}.items()):
        write_squad(tmp_path / "data" / f"{name}.json", asked_rows(number, seed), version=1)
    assert "is_impossible" not in (tmp_path / "data" / "train.json").read_text()
    answer.main(flags(tmp_path / "run", encoder, tmp_path / "data", stride=4, learning_rate=1e-2))
    scores = report_of(tmp_path / "run")["scores"]["validation"]
    assert scores["f1"] > 0.7 and not any("no_answer" in name for name in scores)
    best = json.loads((tmp_path / "run" / "answers_validation.json").read_text())
    assert len(best) == 30 and not any(each["text"] == "" for row in best for each in row["best"])


def test_lists_of_classes_of_pairs_of_texts(encoder, tmp_path, capsys):
    """One class follows from the first text and one from the second, so both are read."""
    rows = [
        {"premise": first["description"], "hypothesis": f"{number} x", "labels": [first["section"], names[number]]}
        for names in [{3: "three", 5: "five"}]
        for first, second in zip(text_rows(160), text_rows(160, seed=1))
        for number in [3 if second["section"] == "mail" else 5]
    ]
    data = write_json_lines(tmp_path / "rows.jsonl", rows)
    classify.main(flags(tmp_path / "run", encoder, data, learning_rate=1e-2, num_train_epochs=3))
    assert "text premise and hypothesis, label labels; multi_label_classification" in capsys.readouterr().out
    assert report_of(tmp_path / "run")["scores"]["validation"]["macro_f1"] > 0.9
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert list(config["label2id"]) == ["five", "mail", "net", "three"]


@pytest.mark.slow
def test_tags_of_a_dataset_of_the_hub(encoder, tmp_path):
    """Parquet whose tags are numbers with their names, as the dataset that the shipped configuration names."""
    names = ClassLabel(names=["B-LOC", "O", "B-PER"])
    features = Features({"tokens": List(Value("string")), "ner_tags": List(names), "pos_tags": List(Value("int64"))})
    files = {}
    for seed, (split, number) in enumerate({"train": 120, "validation": 30, "test": 20}.items()):
        rows = [
            {"tokens": row["tokens"], "ner_tags": names.str2int(row["tags"]), "pos_tags": [0] * len(row["tags"])}
            for row in tagged_rows(number, seed)
        ]
        Dataset.from_list(rows, features=features).to_parquet(tmp_path / "part.parquet")
        files[f"data/{split}-00000-of-00001.parquet"] = (tmp_path / "part.parquet").read_bytes()
    with HubServer() as hub:
        hub.repositories["me/tags"] = Repository(private=False)
        hub.repositories["me/tags"].commit("main", files)
        changes = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        changes |= {"HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, ROOT / "examples" / "run_token_classification.py"]
        command += flags(tmp_path / "run", encoder, "me/tags")
        done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    assert "120 train, 30 validation, 20 test rows" in done.stdout and "tags ner_tags" in done.stdout
    scores = report_of(tmp_path / "run")["scores"]
    assert scores["validation"]["f1"] > 0.9 and scores["test"]["f1"] > 0.9


def same_run(first: Path, second: Path) -> bool:
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (first, second)]
    equal = [torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()]
    return all(equal) and report_of(first) == report_of(second)


RUNS = {
    "layers": {"layer_decay": 0.8, "class_weights": True},
    "lora": {"lora_rank": 2, "lora_dropout": 0.1, "learning_rate": 1e-2},
}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_to_the_same_bits(encoder, tmp_path, monkeypatch, name):
    """Also if data and model have moved meanwhile, and their paths are relative."""
    data = write_csv(tmp_path / "rows.csv", text_rows(100))
    changes = FEW | RUNS[name]
    classify.main(flags(tmp_path / "whole", encoder, data, **changes))

    with interrupted_behind("checkpoint-4"):
        classify.main(flags(tmp_path / "run", encoder, data, **changes))
    shutil.copytree(encoder, tmp_path / "moved")
    data.rename(tmp_path / "renamed.csv")
    monkeypatch.chdir(tmp_path)
    encoder, data = Path("moved"), Path("renamed.csv")
    classify.main(flags(tmp_path / "run", encoder, data, **changes))
    assert same_run(tmp_path / "whole", tmp_path / "run")
    # Adapters are merged: what is left is a plain model.
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert stored.keys() == model.state_dict().keys()
    # A finished run is not trained again; other settings are refused.
    classify.main(flags(tmp_path / "run", encoder, data, **changes))
    assert same_run(tmp_path / "whole", tmp_path / "run")
    with pytest.raises(SettingsMismatch, match="max_length: 32 there, 16 now"):
        classify.main(flags(tmp_path / "run", encoder, data, **changes | {"max_length": 16}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_other_encoders(tokenizer, tagged, asked, tmp_path, name, monkeypatch):
    save_other_encoder(name, tmp_path / name, tokenizer)
    data = write_csv(tmp_path / "rows.csv", text_rows(60))
    for part, example, rows in (("c", classify, data), ("t", tag, tagged), ("a", answer, asked)):
        changes = FEW | {"stride": 4} if part == "a" else FEW
        if name in ("gte", "nomicbert") and part == "a":
            with pytest.raises(ValueError, match="There is no AutoModelForQuestionAnswering for .*use another"):
                example.main(flags(tmp_path / part, tmp_path / name, rows, **changes))
            continue
        example.main(flags(tmp_path / part, tmp_path / name, rows, **changes))
        assert (tmp_path / part / "report.md").is_file()

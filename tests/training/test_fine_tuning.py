"""What all fine-tuning shares: its length, loading of checkpoints, what is saved, what is refused."""

import random

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification, DataCollatorWithPadding

from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer
from tests.helpers.glue_runs import save_encoder
from tests.helpers.other_encoders import save_other_encoder
from tests.helpers.small_tokenizer import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer(model_max_length=64, model_input_names=["input_ids", "attention_mask"])


def classifier(name: str, tokenizer, folder) -> AutoModelForSequenceClassification:
    if name == "neobert":
        save_encoder(folder, tokenizer)
    else:
        save_other_encoder(name, folder, tokenizer)
    config = AutoConfig.from_pretrained(folder, num_labels=2)
    return AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)


def build(model, tokenizer, folder, rows, **changes) -> FineTuningTrainer:
    options = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "num_train_epochs": 1, "use_cpu": True}
    return FineTuningTrainer(
        model,
        FineTuningArguments(str(folder), **options | changes).planned(len(rows)),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=lambda found: {"score": 0.0},
        settings={},
    )


@pytest.fixture(scope="module")
def rows(tokenizer) -> Dataset:
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abc", k=draw.randrange(1, 20))) for _ in range(24)]
    return Dataset.from_list([{**tokenizer(text), "label": number % 2} for number, text in enumerate(texts)])


def test_an_epoch_is_a_pass_over_the_rows_with_any_accumulation(rows, tmp_path):
    for batch, accumulated, steps in ((4, 1, 18), (4, 4, 6), (5, 1, 15), (5, 2, 9)):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "use_cpu": True}
        arguments = FineTuningArguments(str(tmp_path), num_train_epochs=3, **options)
        assert arguments.planned(len(rows)).max_steps == steps


@pytest.mark.parametrize("name", ["nomicbert", "gte"])
def test_checkpoints_of_models_whose_files_have_other_names_are_loaded(name, tokenizer, rows, tmp_path):
    """Transformers' own way leaves them as they are, with a warning."""
    model = classifier(name, tokenizer, tmp_path / "model")
    trainer = build(model, tokenizer, tmp_path / "run", rows, max_steps=1)
    trainer.train_to_the_end(None)
    trained = {key: weight.clone() for key, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    trainer.state.best_global_step = 1
    trainer.load_best()
    assert all(torch.equal(weight, trained[key]) for key, weight in model.state_dict().items())


def test_a_saved_tokenizer_does_not_cut(tokenizer, rows, tmp_path):
    """That of a classifier would cut texts at the length of training wherever the file is read by itself."""
    tokenizer("a b c", truncation=True, max_length=4, padding="max_length")
    trainer = build(classifier("neobert", tokenizer, tmp_path / "model"), tokenizer, tmp_path / "run", rows)
    trainer.save_whole(tmp_path / "saved")
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert saved.truncation is None and saved.padding is None
    assert len(saved.encode("a b " * 50).ids) > 50

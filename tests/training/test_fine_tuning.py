"""What all fine-tuning shares: rates by layer, the order of evaluations, loading of checkpoints, what is refused."""

import multiprocessing
import random

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertModel,
)

from neobert_hf import NeoBERTForMaskedLM
from neobert_hf.training.fine_tuning import FineTuningArguments, FineTuningTrainer, layer_factors
from neobert_hf.training.starting_points import StartingPoint, build_model, task_config
from tests.helpers.glue_runs import save_encoder
from tests.helpers.models import small_model
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


@pytest.mark.parametrize("name", ["neobert", "bert", "modernbert", "deberta_v3"])
def test_rates_fall_from_the_head_to_the_embeddings(name, tokenizer, tmp_path):
    model = classifier(name, tokenizer, tmp_path)
    factors = {key: layer_factors(model, 0.5)[weight] for key, weight in model.named_parameters()}
    # Two blocks: the head 1, the blocks 1/2 and 1/4, the embeddings 1/8.
    assert set(factors.values()) == {1.0, 0.5, 0.25, 0.125}
    for key, factor in factors.items():
        if "classifier" in key or "dense.weight" == key:
            assert factor == 1.0, key
        elif "word_embeddings" in key or key == "model.encoder.weight" or "tok_embeddings" in key:
            assert factor == 0.125, key
    assert {factor for key, factor in factors.items() if ".0." in key} == {0.25}


def build(model, tokenizer, folder, rows, pin_memory: bool = False, **changes) -> FineTuningTrainer:
    options = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "num_train_epochs": 1, "use_cpu": True}
    arguments = FineTuningArguments(str(folder), **options | changes).planned(len(rows))
    # `use_cpu` has switched it off.
    arguments.dataloader_pin_memory = pin_memory
    return FineTuningTrainer(
        model,
        arguments,
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


def test_accumulated_batches_are_one_step_of_a_larger_batch(tokenizer, rows, tmp_path):
    found = []
    for batch, accumulated in ((8, 1), (2, 4)):
        model = classifier("neobert", tokenizer, tmp_path / "model")
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
        trainer = build(model, tokenizer, tmp_path / f"run{batch}", rows, max_steps=1, optim="sgd", **options)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainer.train_to_the_end(None)
        found.append(model.state_dict())
    assert all(torch.allclose(weight, found[1][name], atol=1e-6) for name, weight in found[0].items())


def test_the_optimizer_has_them(tokenizer, rows, tmp_path):
    model = classifier("neobert", tokenizer, tmp_path / "model")
    trainer = build(model, tokenizer, tmp_path / "run", rows, layer_decay=0.5)
    optimizer = trainer.create_optimizer()
    rates = {weight: group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert {name: rates[weight] for name, weight in model.named_parameters()} == {
        name: 1e-2 * layer_factors(model, 0.5)[weight] for name, weight in model.named_parameters()
    }
    decays = {weight: group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert decays[model.classifier.weight] == 0.01 and decays[model.classifier.bias] == 0.0


def test_scores_are_in_the_order_of_rows_whatever_batches_training_has(tokenizer, rows, tmp_path):
    model = classifier("neobert", tokenizer, tmp_path / "model").eval()
    trainer = build(model, tokenizer, tmp_path / "run", rows, train_sampling_strategy="group_by_length")
    found = torch.tensor(trainer.predict(rows).predictions)
    with torch.no_grad():
        expected = [model(torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-4)


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


def test_tied_weights_are_not_said_to_be_missing(tokenizer, rows, tmp_path, caplog):
    """A checkpoint holds them once; "missing keys" would read as weights that were made up."""
    model = small_model(NeoBERTForMaskedLM, vocab_size=len(tokenizer), tie_word_embeddings=True)
    trainer = build(model, tokenizer, tmp_path / "run", rows)
    trainer.save_model(str(tmp_path / "saved"))
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert "missing keys" not in caplog.text


@pytest.mark.parametrize("changes", [{"lora_alpha": 2.0}, {"max_steps": 0}, {"eval_steps": 1.5}, {"save_steps": 7}])
def test_bad_settings(tmp_path, changes):
    with pytest.raises(ValueError, match=f"`{next(iter(changes))}`"):
        FineTuningArguments(str(tmp_path), use_cpu=True, **changes).planned(80)


def test_a_saved_tokenizer_does_not_cut(tokenizer, rows, tmp_path):
    """That of a classifier cut texts at the length of training wherever the file was read by itself."""
    tokenizer("a b c", truncation=True, max_length=4, padding="max_length")
    trainer = build(classifier("neobert", tokenizer, tmp_path / "model"), tokenizer, tmp_path / "run", rows)
    trainer.save_whole(tmp_path / "saved")
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert saved.truncation is None and saved.padding is None
    assert len(saved.encode("a b " * 50).ids) > 50


def test_a_head_for_other_labels_is_refused(tokenizer, tmp_path):
    """Only their number was compared once."""
    classifier("bert", tokenizer, tmp_path / "encoder").save_pretrained(tmp_path / "unnamed")
    model = classifier("bert", tokenizer, tmp_path / "encoder")
    model.config.id2label = {0: "a", 1: "b"}
    model.save_pretrained(tmp_path / "named")
    for name, labels in (("named", "ab"), ("unnamed", "xy"), ("encoder", "xy")):
        start = StartingPoint(str(tmp_path / name))
        build_model(start, AutoModelForSequenceClassification, task_config(start, list(labels), None, 0.1))
    start = StartingPoint(str(tmp_path / "named"))
    for labels, message in (("ba", "label 0 is 'a' there and 'b' in"), ("ac", "label 1 is 'b' there and 'c' in")):
        with pytest.raises(ValueError, match=f"{message} the data. Start from the encoder"):
            build_model(start, AutoModelForSequenceClassification, task_config(start, list(labels), None, 0.1))


def test_a_head_without_a_dropout_of_its_own_is_said(tokenizer, tmp_path, capsys):
    """The setting was stored and not used."""
    save_other_encoder("bert", tmp_path / "bert", tokenizer)
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_heads=2, n_layers=1, hidden_dim=48)
    DistilBertModel(config).save_pretrained(tmp_path / "distilbert")
    for name, auto_class, dropout, said in (
        ("bert", AutoModelForSequenceClassification, 0.25, False),
        ("bert", AutoModelForQuestionAnswering, 0.25, True),
        ("bert", AutoModelForQuestionAnswering, 0.0, False),
        ("distilbert", AutoModelForQuestionAnswering, 0.25, False),
        ("distilbert", AutoModelForTokenClassification, 0.25, True),
        ("distilbert", AutoModelForTokenClassification, 0.1, False),
    ):
        start = StartingPoint(str(tmp_path / name))
        model = build_model(start, auto_class, task_config(start, None, None, dropout))
        assert (
            f"`classifier_dropout` {dropout} is not used: {type(model).__name__} has" in capsys.readouterr().out
        ) == said


def test_workers_outlive_a_signal_to_the_whole_group(tokenizer, rows, tmp_path):
    """Launchers send SIGTERM to the data loader's workers as well, and the run needs them until it has saved."""
    rows = rows.select([number % len(rows) for number in range(80)])
    model = classifier("neobert", tokenizer, tmp_path / "model")
    trainer = build(model, tokenizer, tmp_path / "run", rows, dataloader_num_workers=1, dataloader_prefetch_factor=1)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        batches = iter(loader)
        next(batches)
        (worker,) = multiprocessing.active_children()
        worker.terminate()
        assert 1 + len(list(batches)) == len(loader)

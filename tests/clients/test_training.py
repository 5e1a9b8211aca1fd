"""What trains a model, wholly or in part."""

import math

import pytest
import torch

from neobert_hf import NeoBERTForSequenceClassification
from tests.clients.plain import TEXTS, logits, same, tokens


LABELS = torch.tensor([0, 1, 0, 1])


def loss_falls(losses: list[float]) -> bool:
    return losses[-1] < 0.8 * losses[0]


TARGETS = {"target_modules": ["qkv", "wo", "w12", "w3"]}
METHODS = {
    "LoRA": ("LoraConfig", TARGETS),
    "DoRA": ("LoraConfig", TARGETS | {"use_dora": True}),
    "IA3": ("IA3Config", TARGETS | {"feedforward_modules": ["w3"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4}),
}


@pytest.mark.clients("peft")
@pytest.mark.parametrize("method", METHODS)
def test_peft(method, classifier):
    """Every trained parameter has a gradient, the loss of sorting four texts falls, and the base stays as it was."""
    import peft

    config, options = METHODS[method]
    settings = getattr(peft, config)(task_type="SEQ_CLS", modules_to_save=["dense", "classifier"], **options)
    base = NeoBERTForSequenceClassification.from_pretrained(classifier)
    before = base.model.transformer_encoder[0].qkv.weight.clone()
    model = peft.get_peft_model(base, settings).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**tokens(classifier), labels=LABELS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss_falls(losses)
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in trained)
    block = base.model.transformer_encoder[0]
    assert torch.equal(getattr(block.qkv, "base_layer", block.qkv).weight, before)


@pytest.fixture
def arguments(tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    settings |= {"save_strategy": "no", "learning_rate": 3e-3, "per_device_train_batch_size": 4, "logging_steps": 1}
    return settings


def logged(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.clients("trl")
def test_reward_trainer(checkpoint, arguments):
    """The loss for preferring chosen texts over rejected ones falls."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    folder = checkpoint(NeoBERTForSequenceClassification, num_labels=1)
    pairs = Dataset.from_dict({"chosen": TEXTS[:2] * 4, "rejected": TEXTS[2:] * 4})
    model = NeoBERTForSequenceClassification.from_pretrained(folder)
    settings = RewardConfig(**arguments, num_train_epochs=4, max_length=32, bf16=False, gradient_checkpointing=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.sep_token
    trainer = RewardTrainer(model, settings, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    assert loss_falls(logged(trainer))


@pytest.mark.clients("setfit")
def test_setfit(encoder, tmp_path):
    """After contrastive training it predicts the classes of the training texts."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(encoder)
    options = {"max_steps": 4, "batch_size": 4, "report_to": "none", "save_strategy": "no"}
    settings = TrainingArguments(output_dir=str(tmp_path), **options)
    rows = Dataset.from_dict({"text": TEXTS, "label": LABELS.tolist()})
    Trainer(model=model, args=settings, train_dataset=rows).train()
    assert model.predict(TEXTS).tolist() == LABELS.tolist()


@pytest.mark.clients("sentence-transformers")
def test_sentence_transformers_trainer(encoder, arguments):
    """The contrastive loss with in-batch negatives falls."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(encoder, device="cpu")
    pairs = Dataset.from_dict({"anchor": TEXTS, "positive": ["mat", "animal", "number", "movement"]})
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, Arguments(**arguments, num_train_epochs=6), pairs, loss=loss)
    trainer.train()
    assert loss_falls(logged(trainer))


@pytest.mark.clients("optuna")
def test_hyperparameter_search(classifier, arguments):
    """Of two learning rates, it selects the one with which the model can learn in two steps."""
    from optuna.samplers import GridSampler
    from transformers import Trainer, TrainingArguments

    rates = {"learning_rate": [1e-6, 1e-3]}
    inputs = tokens(classifier)
    rows = [{"labels": label} | {name: inputs[name][row] for name in inputs} for row, label in enumerate(LABELS)]

    def build():
        return NeoBERTForSequenceClassification.from_pretrained(classifier)

    def space(trial):
        return {name: trial.suggest_categorical(name, values) for name, values in rates.items()}

    settings = TrainingArguments(**arguments, num_train_epochs=2, eval_strategy="epoch")
    trainer = Trainer(args=settings, train_dataset=rows, eval_dataset=rows, model_init=build)
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=GridSampler(rates))
    assert best.hyperparameters == {"learning_rate": 1e-3}


@pytest.mark.clients("accelerate")
def test_accelerator(classifier):
    """A prepared model's loss falls, and its first loss is that of the plain model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = NeoBERTForSequenceClassification.from_pretrained(classifier)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    losses = []
    for _ in range(8):
        loss = model(**tokens(classifier), labels=LABELS).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert loss_falls(losses)
    assert math.isclose(losses[0], torch.nn.functional.cross_entropy(logits(classifier), LABELS), rel_tol=1e-4)


@pytest.mark.clients("simpletransformers")
def test_simpletransformers(classifier, tmp_path):
    """The logits of `predict` are the plain ones."""
    from simpletransformers.classification import ClassificationModel

    options = {"use_multiprocessing": False, "output_dir": str(tmp_path), "cache_dir": str(tmp_path)}
    model = ClassificationModel("auto", classifier, use_cuda=False, args=options)
    _, got = model.predict(TEXTS)
    assert same(got, logits(classifier))

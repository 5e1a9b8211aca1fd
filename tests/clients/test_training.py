"""What trains a model, wholly or in part."""

import math

import pytest
import torch

from neobert_hf import NeoBERTForSequenceClassification
from tests.clients.plain import TEXTS, logits, same, tokens


LABELS = torch.tensor([0, 1, 0, 1])


def loss_falls(losses: list[float]) -> bool:
    return losses[-1] < 0.8 * losses[0]


def peft_learns(folder: str, settings) -> None:
    """Every trained parameter has a gradient, the loss of sorting four texts falls, and the base stays as it was."""
    from peft import get_peft_model

    base = NeoBERTForSequenceClassification.from_pretrained(folder)
    before = base.model.transformer_encoder[0].qkv.weight.clone()
    model = get_peft_model(base, settings).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**tokens(folder), labels=LABELS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss_falls(losses)
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in trained)
    block = base.model.transformer_encoder[0]
    assert torch.equal(getattr(block.qkv, "base_layer", block.qkv).weight, before)


@pytest.mark.clients("peft")
def test_lora(classifier):
    """Every parameter of the adapter gets a gradient, the loss falls, and the base model is unchanged."""
    from peft import LoraConfig

    settings = LoraConfig(
        task_type="SEQ_CLS", modules_to_save=["dense", "classifier"], target_modules=["qkv", "wo", "w12", "w3"]
    )  # in the table
    peft_learns(classifier, settings)


@pytest.mark.clients("peft")
def test_dora(classifier):
    """Every parameter of the adapter gets a gradient, the loss falls, and the base model is unchanged."""
    from peft import LoraConfig

    settings = LoraConfig(
        task_type="SEQ_CLS",
        modules_to_save=["dense", "classifier"],
        target_modules=["qkv", "wo", "w12", "w3"],
        use_dora=True,
    )  # in the table
    peft_learns(classifier, settings)


@pytest.mark.clients("peft")
def test_ia3(classifier):
    """Every parameter of the adapter gets a gradient, the loss falls, and the base model is unchanged."""
    from peft import IA3Config

    settings = IA3Config(
        task_type="SEQ_CLS",
        modules_to_save=["dense", "classifier"],
        target_modules=["qkv", "wo", "w12", "w3"],
        feedforward_modules=["w3"],
    )  # in the table
    peft_learns(classifier, settings)


@pytest.mark.clients("peft")
def test_prompt_tuning(classifier):
    """Every parameter of the prompt gets a gradient, the loss falls, and the base model is unchanged."""
    from peft import PromptTuningConfig

    settings = PromptTuningConfig(
        task_type="SEQ_CLS", modules_to_save=["dense", "classifier"], num_virtual_tokens=4
    )  # in the table
    peft_learns(classifier, settings)


@pytest.mark.clients("peft")
def test_p_tuning(classifier):
    """Every parameter of the prompt gets a gradient, the loss falls, and the base model is unchanged."""
    from peft import PromptEncoderConfig

    settings = PromptEncoderConfig(
        task_type="SEQ_CLS", modules_to_save=["dense", "classifier"], num_virtual_tokens=4
    )  # in the table
    peft_learns(classifier, settings)


@pytest.mark.clients("peft", fails=True)
def test_prefix_tuning(classifier):
    """`PrefixTuningConfig` needs a model that takes `past_key_values`; an encoder has none, and PEFT says so."""
    from peft import PrefixTuningConfig, get_peft_model

    base = NeoBERTForSequenceClassification.from_pretrained(classifier)
    settings = PrefixTuningConfig(
        task_type="SEQ_CLS", num_virtual_tokens=4, num_layers=2, token_dim=64, num_attention_heads=4
    )
    model = get_peft_model(base, settings)
    with pytest.raises(ValueError, match="does not support past key values"):
        model(**tokens(classifier))


@pytest.fixture
def arguments(tmp_path):
    return dict(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=3e-3,
        per_device_train_batch_size=4,
        logging_steps=1,
    )


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
    trainer = RewardTrainer(model, settings, train_dataset=pairs, processing_class=tokenizer)  # in the table
    trainer.train()
    assert loss_falls(logged(trainer))


@pytest.mark.clients("setfit")
def test_setfit(encoder, tmp_path):
    """After contrastive training it predicts the classes of the training texts."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(encoder)
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, batch_size=4, report_to="none", save_strategy="no"
    )
    rows = Dataset.from_dict({"text": TEXTS, "label": LABELS.tolist()})
    Trainer(model=model, args=settings, train_dataset=rows).train()  # in the table
    assert model.predict(TEXTS).tolist() == LABELS.tolist()


@pytest.mark.clients("sentence-transformers")
def test_sentence_transformers_trainer(encoder, arguments):
    """The contrastive loss with in-batch negatives falls."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(encoder, device="cpu")
    settings = SentenceTransformerTrainingArguments(**arguments, num_train_epochs=6)
    pairs = Dataset.from_dict({"anchor": TEXTS, "positive": ["mat", "animal", "number", "movement"]})
    trainer = SentenceTransformerTrainer(
        model, settings, pairs, loss=MultipleNegativesRankingLoss(model)
    )  # in the table
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
    best = trainer.hyperparameter_search(space, n_trials=2, sampler=GridSampler(rates))  # in the table
    assert best.hyperparameters == {"learning_rate": 1e-3}


@pytest.mark.clients("lightning")
def test_lightning(classifier, tmp_path):
    """The loss falls."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = NeoBERTForSequenceClassification.from_pretrained(classifier), []

        def training_step(self, batch, index):
            loss = self.model(**tokens(classifier), labels=LABELS).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader([0] * 8))  # in the table
    assert loss_falls(module.losses)


@pytest.mark.clients("skorch")
def test_skorch(classifier):
    """The loss falls from that of the plain model."""
    from skorch import NeuralNetClassifier

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = NeoBERTForSequenceClassification.from_pretrained(classifier)

        def forward(self, **inputs):
            return self.model(**inputs).logits

    net = NeuralNetClassifier(
        Module,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=1e-3,
        max_epochs=8,
        train_split=None,
        verbose=0,
    )
    net.fit(dict(tokens(classifier)), LABELS)  # in the table
    assert loss_falls([row["train_loss"] for row in net.history])


@pytest.mark.clients("accelerate")
def test_accelerator(classifier):
    """A prepared model's loss falls, and its first loss is that of the plain model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = NeoBERTForSequenceClassification.from_pretrained(classifier)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))  # in the table
    losses = []
    for _ in range(8):
        loss = model(**tokens(classifier), labels=LABELS).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert loss_falls(losses)
    assert math.isclose(losses[0], torch.nn.functional.cross_entropy(logits(classifier), LABELS), rel_tol=1e-4)


@pytest.mark.clients("datasets")
def test_datasets(classifier):
    """Texts tokenized and batched by the library give the plain logits."""
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(classifier)
    rows = Dataset.from_dict({"text": TEXTS}).map(lambda row: tokenizer(row["text"]))  # in the table
    rows = rows.remove_columns("text")
    (batch,) = torch.utils.data.DataLoader(rows, 4, collate_fn=DataCollatorWithPadding(tokenizer))
    with torch.no_grad():
        got = NeoBERTForSequenceClassification.from_pretrained(classifier).eval()(**batch).logits
    assert same(got, logits(classifier))


@pytest.mark.clients("gliner", fails=True)
def test_gliner(encoder, tmp_path):
    """`GLiNER.from_config` takes the model, but `train_model` passes Transformers 5 arguments that it no longer has."""
    from gliner import GLiNER

    rows = [{"tokenized_text": text.split(), "ner": [[1, 1, "animal"]]} for text in TEXTS]
    model = GLiNER.from_config({"model_name": encoder, "hidden_size": 64}, backbone_from_pretrained=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmup_ratio'"):
        model.train_model(rows, rows, output_dir=tmp_path)


@pytest.mark.clients("simpletransformers")
def test_simpletransformers(classifier, tmp_path):
    """The logits of `predict` are the plain ones."""
    from simpletransformers.classification import ClassificationModel

    options = {"use_multiprocessing": False, "output_dir": str(tmp_path), "cache_dir": str(tmp_path)}
    model = ClassificationModel("auto", classifier, use_cuda=False, args=options)  # in the table
    _, got = model.predict(TEXTS)
    assert same(got, logits(classifier))

"""What trains a model, wholly or in part."""

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


@pytest.mark.clients("opacus")
def test_gradients_of_each_row(classifier):
    """Those that are clipped for differential privacy are those of the rows alone, if the batch keeps its rows."""
    from opacus import GradSampleModule

    def load():
        options = {"unpad": False, "classifier_dropout": 0.0}
        return NeoBERTForSequenceClassification.from_pretrained(classifier, **options).train()

    inputs, model = tokens(classifier), GradSampleModule(load())
    model(**inputs, labels=LABELS).loss.backward()
    for row in range(len(LABELS)):
        alone = load()
        alone(**{name: values[[row]] for name, values in inputs.items()}, labels=LABELS[[row]]).loss.backward()
        for parameter, expected in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(parameter.grad_sample[row], expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.clients("trl")
def test_reward_trainer(checkpoint, tmp_path):
    """The loss for preferring chosen texts over rejected ones falls."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    folder = checkpoint(NeoBERTForSequenceClassification, num_labels=1)
    pairs = Dataset.from_dict({"chosen": TEXTS[:2] * 4, "rejected": TEXTS[2:] * 4})
    model, tokenizer = NeoBERTForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.sep_token
    options = {"save_strategy": "no", "logging_steps": 1, "bf16": False, "gradient_checkpointing": False}
    options |= {"num_train_epochs": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "max_length": 32}
    settings = RewardConfig(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, **options)
    trainer = RewardTrainer(model, settings, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    assert loss_falls([row["loss"] for row in trainer.state.log_history if "loss" in row])


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


@pytest.mark.clients("simpletransformers")
def test_simpletransformers(classifier, tmp_path):
    """The logits of `predict` are the plain ones."""
    from simpletransformers.classification import ClassificationModel

    options = {"use_multiprocessing": False, "output_dir": str(tmp_path), "cache_dir": str(tmp_path)}
    model = ClassificationModel("auto", classifier, use_cuda=False, args=options)
    _, got = model.predict(TEXTS)
    assert same(got, logits(classifier))

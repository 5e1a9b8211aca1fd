"""Promise 6: it is a Transformers model like any other."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AttentionInterface, AttentionMaskInterface, Trainer, TrainingArguments, pipeline
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification
from tests.helpers.models import packed_batch, ragged_batch, small_model
from tests.helpers.small_tokenizer import tiny_tokenizer


IDS, MASK = ragged_batch()
LABELS = torch.tensor([0, 1, 0, 1])
TASKS = ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"]


@pytest.fixture
def folder(tmp_path):
    """A model and its tokenizer, saved as a user would."""

    def save(cls, **changes):
        small_model(cls, **changes).save_pretrained(tmp_path / "model")
        tiny_tokenizer().save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.mark.parametrize("kind", ["", *(f"For{task}" for task in TASKS)])
def test_auto_classes(kind, folder):
    auto, cls = getattr(transformers, f"AutoModel{kind}"), getattr(neobert_hf, f"NeoBERT{kind or 'Model'}")
    assert type(auto.from_pretrained(folder(NeoBERTForMaskedLM))) is cls
    assert type(auto.from_config(neobert_hf.NeoBERTConfig(num_hidden_layers=1))) is cls


def test_fill_mask_and_features(folder):
    path = folder(NeoBERTForMaskedLM)
    model, tokenizer = NeoBERTForMaskedLM.from_pretrained(path).eval(), tiny_tokenizer()
    inputs = tokenizer("the cat sat on the [MASK] .", return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        logits = model(**inputs).logits[0, inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
        expected = model.model(**tokenizer("a cat", return_tensors="pt")).last_hidden_state
    answers = pipeline("fill-mask", path)("the cat sat on the [MASK] .", top_k=3)
    assert [answer["token"] for answer in answers] == logits.topk(3).indices.tolist()
    features = pipeline("feature-extraction", path)("a cat")
    assert torch.allclose(torch.tensor(features), expected, atol=1e-5)


def test_trainer_saves_what_loads(tmp_path, folder):
    """One epoch with evaluation; special tokens that the Trainer aligns must not make the config unreadable."""
    model = NeoBERTForSequenceClassification.from_pretrained(folder(NeoBERTForSequenceClassification))
    tokenizer = tiny_tokenizer()
    texts = ["the cat sat on a mat .", "a dog ran .", "the dogs sat .", "a cat ran to the mat and sat ."] * 4
    rows = [{**tokenizer(text), "labels": i % 2} for i, text in enumerate(texts)]
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "eval_strategy": "epoch"}
    options |= {"num_train_epochs": 1, "per_device_train_batch_size": 4, "use_cpu": True}
    arguments = TrainingArguments(tmp_path / "out", report_to="none", disable_tqdm=True, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(tmp_path / "final")
    trainer.model = NeoBERTForSequenceClassification.from_pretrained(tmp_path / "final").eval()
    assert abs(trainer.evaluate()["eval_loss"] - metrics["eval_loss"]) < 1e-6


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(backend, use_reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = small_model(NeoBERTForMaskedLM, backend, embedding_init_range=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*gradients))


SLOW_LAYOUTS = ("dense", "packed", "cu_seq_lens")
LORA = {"task_type": "SEQ_CLS", "target_modules": ["qkv", "wo", "w12", "w3"], "r": 4, "lora_alpha": 8}


def classifier(path, seed: int):
    """A new head on a pretrained backbone, as in fine-tuning: its random `dense` depends on the seed."""
    torch.manual_seed(seed)
    return NeoBERTForSequenceClassification.from_pretrained(path)


def train(model) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model.train()(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss.backward()
        optimizer.step()
    model.eval()


def test_lora(tmp_path, mlm_checkpoint):
    lora = LoraConfig(**LORA, modules_to_save=["dense", "classifier"])
    model = get_peft_model(classifier(mlm_checkpoint, 0), lora)
    train(model)
    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(classifier(mlm_checkpoint, 1), tmp_path).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK).logits
        assert torch.equal(reloaded(input_ids=IDS, attention_mask=MASK).logits, expected)
        assert not torch.equal(classifier(mlm_checkpoint, 0).eval()(IDS, attention_mask=MASK).logits, expected)
        merged = model.merge_and_unload()
        assert torch.allclose(merged(IDS, attention_mask=MASK).logits, expected, atol=1e-5)


def test_a_new_dense_layer_outside_the_adapter_is_said(mlm_checkpoint, caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.warning_once.cache_clear()
    train(get_peft_model(classifier(mlm_checkpoint, 0), LoraConfig(**LORA)))
    assert [record for record in caplog.records if "`dense`" in record.message]


@torch.no_grad()
def test_an_adapter_for_each_row(mlm_checkpoint):
    """`adapter_names` looks at the rows of the batch inside the model, so they are kept with `unpad=False`."""
    base = NeoBERTForMaskedLM.from_pretrained(mlm_checkpoint, unpad=False)
    model = get_peft_model(base, LoraConfig(target_modules=["qkv", "w3"], init_lora_weights=False), "first")
    model.add_adapter("second", LoraConfig(target_modules=["qkv", "w3"], init_lora_weights=False))
    names = ["first", "second", "__base__", "first"]
    found = model.eval()(input_ids=IDS, attention_mask=MASK, adapter_names=names).logits
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter():
                expected = model(input_ids=IDS, attention_mask=MASK).logits
        else:
            model.set_adapter(name)
            expected = model(input_ids=IDS, attention_mask=MASK).logits
        assert torch.allclose(found[row], expected[row], atol=1e-5), name


@torch.no_grad()
@pytest.mark.parametrize("inputs", ["padded", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
@pytest.mark.parametrize("backend, rope_type", [("sdpa", "default"), ("eager", "yarn")])
def test_compile_fullgraph(backend, rope_type, inputs):
    torch.compiler.reset()
    rope = {"rope_type": rope_type} | ({"factor": 2.0} if rope_type != "default" else {})
    model = small_model(NeoBERTForMaskedLM, backend, rope_parameters=rope, num_hidden_layers=1)
    empty_row = MASK * torch.tensor([[1], [0], [1], [1]])
    calls = {
        "dense": [{"input_ids": IDS}, {"input_ids": torch.randint(1, 100, (1, 150))}],
        # One graph serves both masks.
        "padded": [{"input_ids": IDS, "attention_mask": mask} for mask in (MASK, empty_row)],
        "packed": [{"input_ids": packed_batch()[0], "position_ids": torch.arange(31)[None] % 8}],
        "cu_seq_lens": [{"input_ids": packed_batch()[0], **packed_batch()[1]}],
    }[inputs]
    # Without code generation: what is tested is that the graph has no break and says the same.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kwargs in calls:
        assert (compiled(**kwargs).logits - model(**kwargs).logits).abs().max() <= 1e-5


@torch.no_grad()
def test_attention_functions_of_others(monkeypatch):
    """A user's own backend through Transformers' interface takes the masked layout; DeepSpeed's replaces `sdpa`."""
    called = []

    def attend(*args, **kwargs):
        called.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("my_attention", attend)
    AttentionMaskInterface.register("my_attention", sdpa_mask)
    model = small_model()
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    model.set_attn_implementation("my_attention")
    assert (model(IDS, attention_mask=MASK).last_hidden_state - expected).abs().max() <= 1e-5
    assert len(called) == 2

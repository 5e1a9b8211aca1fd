"""Promise 6: it is a Transformers model like any other."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import neobert_hf
from neobert_hf import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel
from tests.helpers.models import batch_of, ragged_batch, small_model
from tests.helpers.small_tokenizer import tiny_tokenizer


IDS, MASK = ragged_batch()
TASKS = ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"]


@pytest.fixture
def folder(mlm_checkpoint) -> str:
    """A masked language model and its tokenizer, saved as a user would."""
    tiny_tokenizer().save_pretrained(mlm_checkpoint)
    return str(mlm_checkpoint)


@pytest.mark.parametrize("kind", ["", *(f"For{task}" for task in TASKS)])
def test_auto_classes(kind, folder):
    auto, cls = getattr(transformers, f"AutoModel{kind}"), getattr(neobert_hf, f"NeoBERT{kind or 'Model'}")
    assert type(auto.from_pretrained(folder)) is cls
    assert type(auto.from_config(neobert_hf.NeoBERTConfig(num_hidden_layers=1))) is cls


def test_trainer_saves_what_loads(tmp_path, folder):
    """One epoch with evaluation; special tokens that the Trainer aligns must not make the config unreadable."""
    texts = ["the cat sat on a mat .", "a dog ran .", "the dogs sat .", "a cat ran to the mat and sat ."] * 4
    rows = [{**tiny_tokenizer()(text), "labels": i % 2} for i, text in enumerate(texts)]
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "num_train_epochs": 1}
    options |= {"per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(tmp_path / "out", **options)
    model, sets = classifier(folder, 0), {"train_dataset": rows, "eval_dataset": rows}
    trainer = Trainer(model, arguments, **sets, processing_class=tiny_tokenizer())
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(tmp_path / "final")
    trainer.model = NeoBERTForSequenceClassification.from_pretrained(tmp_path / "final").eval()
    assert abs(trainer.evaluate()["eval_loss"] - loss) < 1e-6


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_gradient_checkpointing(backend):
    gradients = []
    for checkpointing in (False, True):
        model = small_model(NeoBERTForMaskedLM, backend, embedding_init_range=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*gradients))


LORA = {"task_type": "SEQ_CLS", "target_modules": ["qkv", "wo", "w12", "w3"], "r": 4, "lora_alpha": 8}


def classifier(path, seed: int):
    """A new head on a pretrained backbone, as in fine-tuning: its random `dense` depends on the seed."""
    torch.manual_seed(seed)
    return NeoBERTForSequenceClassification.from_pretrained(path)


def train(model) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model.train()(input_ids=IDS, attention_mask=MASK, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
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


def test_prefix_tuning_is_refused(mlm_checkpoint):
    """The model has nowhere to put prefixes, so that they would train nothing."""
    model = NeoBERTModel.from_pretrained(mlm_checkpoint)
    model = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION"))
    with pytest.raises(ValueError, match="`past_key_values`"):
        model(input_ids=IDS, attention_mask=MASK)


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


# Of a second batch: of one shape with the first, but for the dense one, and with a row of padding only.
LAYOUTS = {"dense": (40,), "right": (13, 0, 1, 10), "position_ids": (1, 13, 7, 10), "cu_seq_lens": (1, 13, 7, 10)}
SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS if layout != "right"]


@torch.no_grad()
@pytest.mark.parametrize("layout", ["right", *SLOW])
@pytest.mark.parametrize("backend, rope_type", [("sdpa", "default"), ("eager", "yarn")])
def test_compile_fullgraph(backend, rope_type, layout):
    torch.compiler.reset()
    rope = {"rope_type": rope_type} | ({"factor": 2.0} if rope_type != "default" else {})
    model = small_model(NeoBERTForMaskedLM, backend, rope_parameters=rope, num_hidden_layers=1)
    # Without code generation: what is tested is that the graph has no break and says the same.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (batch_of(layout), batch_of(layout, LAYOUTS[layout])):
        assert (compiled(batch[0], **batch[1]).logits - model(batch[0], **batch[1]).logits).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torch_export(strict):
    """One graph for batches of every shape."""
    model, (ids, mask) = small_model(NeoBERTForMaskedLM), ragged_batch()
    axes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=200)}
    inputs, shapes = {"input_ids": ids, "attention_mask": mask}, {"input_ids": axes, "attention_mask": axes}
    graph = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict).module()
    for lengths in ((9, 4), (13, 7, 1, 10), (40,), (3, 3, 3)):
        ids, mask = ragged_batch(lengths, "left")
        found, expected = (run(input_ids=ids, attention_mask=mask).logits[mask.bool()] for run in (graph, model))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

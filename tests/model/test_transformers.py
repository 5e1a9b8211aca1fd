"""What a user of Transformers and its companions expects of any model."""

import copy
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline

import neobert_hf
from neobert_hf import (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from neobert_hf.modeling_neobert import NeoBERTEncoderBlock
from tests.helpers.models import CPU_BACKENDS, packed_batch, ragged_batch, small_model
from tests.helpers.small_tokenizer import tiny_tokenizer


IDS, MASK = ragged_batch()


@pytest.fixture
def folder(tmp_path):
    """A model and its tokenizer, saved as a user would."""

    def save(cls, **changes):
        small_model(cls, **changes).save_pretrained(tmp_path / "model")
        tiny_tokenizer().save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_hidden_states(backend):
    model = small_model(attn_implementation=backend)
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": MASK}):
        outputs = model(**inputs, output_hidden_states=True)
        assert len(outputs.hidden_states) == 3
        assert all(state.shape == (4, 13, 64) for state in outputs.hidden_states)
        assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
        real = inputs.get("attention_mask", torch.ones_like(IDS)).bool()
        assert torch.equal(outputs.hidden_states[0][real], model.encoder(IDS)[real])
        assert (outputs.hidden_states[1][~real] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_attentions(backend, caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.warning_once.cache_clear()
    model = small_model(attn_implementation=backend)
    expected = model(IDS, attention_mask=MASK).last_hidden_state
    for _ in range(2):
        outputs = model(IDS, attention_mask=MASK, output_attentions=True)
    warnings = [record for record in caplog.records if "output_attentions" in record.message]
    assert len(warnings) == (0 if backend == "eager" else 1)
    assert (outputs.last_hidden_state - expected).abs().max() <= 1e-5
    assert len(outputs.attentions) == 2
    for weights in outputs.attentions:
        assert weights.shape == (4, 4, 13, 13)
        for row, length in enumerate(MASK.sum(1)):
            assert torch.allclose(weights[row, :, :length].sum(-1), torch.ones(4, int(length)))
            assert (weights[row, :, :length, length:] == 0).all()
    packed_ids, packed = packed_batch()
    weights = model(packed_ids, **packed, output_attentions=True).attentions[0]
    assert (weights[0, :, :13, 13:] == 0).all() and (weights[0, :, 13:20, :13] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("cls", [NeoBERTModel, NeoBERTForMaskedLM])
def test_return_dict(cls):
    model = small_model(cls)
    expected = model(IDS, attention_mask=MASK)
    for outputs in (
        model(IDS, attention_mask=MASK, return_dict=False),
        small_model_with_return_dict_off(cls)(IDS, attention_mask=MASK),
    ):
        assert isinstance(outputs, tuple) and torch.equal(outputs[0], expected[0])


def small_model_with_return_dict_off(cls):
    model = small_model(cls)
    model.config.return_dict = False
    return model


def test_gradient_checkpointing():
    gradients = []
    for checkpointing in (False, True):
        model = small_model(NeoBERTForMaskedLM, embedding_init_range=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*gradients))


LAYOUTS = ["dense", "padded", "packed", "cu_seq_lens", "too_long"]


@torch.no_grad()
@pytest.mark.parametrize(
    "backend, rope_type, inputs",
    [
        *((backend, "default", inputs) for backend in ("sdpa", "eager") for inputs in LAYOUTS),
        # The rotary table is computed before the first block, from the positions of the layout.
        *(("sdpa", "yarn", inputs) for inputs in ("padded", "packed", "cu_seq_lens", "too_long")),
    ],
)
def test_compile_fullgraph(backend, rope_type, inputs):
    torch.compiler.reset()
    rope = {"rope_type": rope_type} | ({"factor": 2.0} if rope_type == "yarn" else {})
    model = small_model(NeoBERTForMaskedLM, backend, rope_parameters=rope, num_hidden_layers=1)
    empty_row = MASK * torch.tensor([[1], [0], [1], [1]])
    calls = {
        "dense": [{"input_ids": IDS}],
        # One graph serves both masks.
        "padded": [{"input_ids": IDS, "attention_mask": mask} for mask in (MASK, empty_row)],
        "packed": [{"input_ids": packed_batch()[0], "position_ids": torch.arange(31)[None] % 8}],
        "cu_seq_lens": [{"input_ids": packed_batch()[0], **packed_batch()[1]}],
        "too_long": [{"input_ids": torch.randint(1, 100, (1, 150))}],
    }[inputs]
    # Without code generation: what is tested is that the graph has no break and says the same.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kwargs in calls:
        assert (compiled(**kwargs).logits - model(**kwargs).logits).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("offsets", [[0, 9, 5, 31], [3, 20, 31], [0, 13, 20], [0, 31]])
def test_compiled_offsets_are_checked(offsets):
    """They fall, begin late, end early, and belong to a document that is longer than was said."""
    torch.compiler.reset()
    model = torch.compile(small_model(num_hidden_layers=1), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="cu_seq_lens_q must rise"):
        model(packed_batch()[0], cu_seq_lens_q=torch.tensor(offsets), max_length_q=30)


@torch.no_grad()
def test_compiled_classification():
    torch.compiler.reset()
    model = small_model(NeoBERTForSequenceClassification, classifier_pooling="mean", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ids, mask in (ragged_batch(side="left"), ragged_batch((5, 9, 2), side="left")):
        difference = compiled(ids, attention_mask=mask).logits - model(ids, attention_mask=mask).logits
        assert difference.abs().max() <= 1e-5


@torch.no_grad()
def test_data_parallel_replicas():
    """What nn.DataParallel makes of a model: modules whose parameters are plain attributes."""
    model = small_model(NeoBERTForMaskedLM)
    copy_ = copy.deepcopy(model)
    for module in copy_.modules():
        for name, parameter in list(module._parameters.items()):
            del module._parameters[name]
            setattr(module, name, parameter.detach() if parameter is not None else None)
    assert next(copy_.parameters(), None) is None
    assert torch.equal(copy_(IDS, attention_mask=MASK).logits, model(IDS, attention_mask=MASK).logits)


@pytest.mark.slow
def test_compile_with_inductor():
    torch.compiler.reset()
    model = small_model(NeoBERTForMaskedLM, embedding_init_range=0.3)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    expected, got = (m(IDS, attention_mask=MASK, labels=IDS).loss for m in (model, compiled))
    assert torch.allclose(got, expected, atol=1e-5)
    expected.backward()
    got.backward()
    for left, right in zip(model.parameters(), compiled.parameters()):
        assert torch.allclose(left.grad, right.grad, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_shapes(strict):
    model = small_model(NeoBERTForMaskedLM)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=200)
    shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict).module()
    for lengths in ((13, 7, 1, 10), (5, 20), (3, 3, 3), (150, 9)):
        ids, mask = ragged_batch(lengths)
        real = mask.bool()
        difference = program(input_ids=ids, attention_mask=mask).logits - model(ids, attention_mask=mask).logits
        assert difference[real].abs().max() <= 1e-5


@torch.no_grad()
def test_meta_tensors_give_shapes():
    """What tools that plan memory ask for."""
    with torch.device("meta"):
        states = NeoBERTModel(small_model().config)(torch.ones(2, 5, dtype=torch.long)).last_hidden_state
    assert states.is_meta and states.shape == (2, 5, 64)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_jit_trace(backend):
    model = small_model(attn_implementation=backend)
    model.config.return_dict = False
    traced = torch.jit.trace(model, (IDS, MASK), check_trace=False)
    other = torch.where(MASK.bool(), (IDS + 5) % 100, IDS)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert (traced(other, MASK)[0] - model(other, MASK)[0]).abs().max() <= 1e-5


def test_autocast():
    model = small_model(NeoBERTForMaskedLM, embedding_init_range=0.3).train()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(IDS, attention_mask=MASK, labels=IDS)
    assert outputs.logits.dtype == torch.bfloat16 and outputs.loss.dtype == torch.float32
    outputs.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        expected = model.eval()(IDS, attention_mask=MASK, labels=IDS).loss
    assert abs(outputs.loss - expected) < 0.05


def lora_classifier(path, seed: int):
    """A new head on a pretrained backbone, as in fine-tuning: its random `dense` depends on the seed."""
    torch.manual_seed(seed)
    return NeoBERTForSequenceClassification.from_pretrained(path)


def test_peft_lora(tmp_path, mlm_checkpoint, caplog):
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.warning_once.cache_clear()
    lora = dict(task_type="SEQ_CLS", target_modules=["qkv", "wo", "w12", "w3"], r=4, lora_alpha=8)
    peft_model = get_peft_model(
        lora_classifier(mlm_checkpoint, 0), LoraConfig(**lora, modules_to_save=["dense", "classifier"])
    )
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        peft_model.train()(input_ids=IDS, attention_mask=MASK, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        optimizer.step()
    assert not [record for record in caplog.records if "`dense` is frozen" in record.message]
    peft_model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(lora_classifier(mlm_checkpoint, 1), tmp_path)
    with torch.no_grad():
        got, expected = (m.eval()(input_ids=IDS, attention_mask=MASK).logits for m in (reloaded, peft_model))
        assert torch.equal(got, expected)
        assert not torch.equal(got, lora_classifier(mlm_checkpoint, 0).eval()(IDS, attention_mask=MASK).logits)
        merged = peft_model.merge_and_unload()
        assert torch.allclose(merged(IDS, attention_mask=MASK).logits, expected, atol=1e-5)

    # PEFT's own choice leaves the new `dense` out of the adapter: that is said while training.
    peft_model = get_peft_model(lora_classifier(mlm_checkpoint, 0), LoraConfig(**lora))
    peft_model.train()(input_ids=IDS, attention_mask=MASK)
    assert [record for record in caplog.records if 'modules_to_save=["dense", "classifier"]' in record.message]


def test_trainer_saves_what_loads(tmp_path, folder):
    """One epoch with evaluation; special tokens that the Trainer aligns must not make the config unreadable."""
    model = NeoBERTForSequenceClassification.from_pretrained(folder(NeoBERTForSequenceClassification))
    tokenizer = tiny_tokenizer()
    texts = ["the cat sat on a mat .", "a dog ran .", "the dogs sat .", "a cat ran to the mat and sat ."] * 4
    rows = [{**tokenizer(text), "labels": i % 2} for i, text in enumerate(texts)]
    arguments = TrainingArguments(
        tmp_path / "out",
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(tmp_path / "final")
    reloaded = NeoBERTForSequenceClassification.from_pretrained(tmp_path / "final")
    trainer.model = reloaded.eval()
    assert abs(trainer.evaluate()["eval_loss"] - metrics["eval_loss"]) < 1e-6


def test_pipelines(folder):
    path = folder(NeoBERTForMaskedLM)
    fill = pipeline("fill-mask", path)
    answers = fill("the cat sat on the [MASK] .", top_k=3)
    model, tokenizer = NeoBERTForMaskedLM.from_pretrained(path).eval(), tiny_tokenizer()
    inputs = tokenizer("the cat sat on the [MASK] .", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
    assert [answer["token"] for answer in answers] == logits.topk(3).indices.tolist()
    features = pipeline("feature-extraction", path)("a cat")
    with torch.no_grad():
        expected = model.model(**tokenizer("a cat", return_tensors="pt")).last_hidden_state
    assert torch.allclose(torch.tensor(features), expected, atol=1e-5)


@pytest.mark.parametrize(
    "task, cls",
    [
        ("text-classification", NeoBERTForSequenceClassification),
        ("token-classification", NeoBERTForTokenClassification),
    ],
)
def test_classification_pipelines(task, cls, folder):
    answers = pipeline(task, folder(cls, num_labels=3))(["the cat sat", "a dog ran to the mat"])
    scores = [token["score"] for answer in answers for token in (answer if isinstance(answer, list) else [answer])]
    assert len(answers) == 2 and all(1 / 3 <= score <= 1 for score in scores)


def test_tokenizer_emits_ids_and_mask_only(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder(NeoBERTModel))
    assert set(tokenizer("the cat", return_tensors="pt")) == {"input_ids", "attention_mask"}
    assert tokenizer("the cat")["input_ids"] == [2, 5, 6, 3]


def test_sentence_transformer(folder):
    encoder = SentenceTransformer(folder(NeoBERTForMaskedLM), device="cpu")
    texts = ["the cat sat on a mat .", "a dog", "the dogs ran to the cat ."]
    together, alone = encoder.encode(texts), torch.stack([torch.tensor(encoder.encode(text)) for text in texts])
    assert together.shape == (3, 64) and torch.allclose(torch.tensor(together), alone, atol=1e-5)
    assert encoder.max_seq_length == 64


def test_sentence_transformer_flattened_inputs(folder):
    """What it does where a flash kernel is installed: one row, cu_seq_lens, positions and seq_idx."""
    encoder = SentenceTransformer(folder(NeoBERTForMaskedLM), device="cpu")
    texts = ["the cat sat on a mat .", "a dog", "the dogs ran to the cat ."]
    expected = encoder.encode(texts)
    module = encoder[0]
    module.can_flatten_inputs = True
    module.data_collator = transformers.DataCollatorWithFlattening(
        return_seq_idx=True, return_flash_attn_kwargs=True, return_position_ids=True
    )
    module._flatten_position_offset = 0
    assert "cu_seq_lens_q" in encoder.preprocess(texts)
    assert torch.allclose(torch.tensor(encoder.encode(texts)), torch.tensor(expected), atol=1e-5)


def test_fsdp_and_device_map_class_names_exist():
    assert [cls for cls in NeoBERTModel._no_split_modules] == [NeoBERTEncoderBlock.__name__]
    modules = dict(small_model().named_modules())
    for name in neobert_hf.NeoBERTConfig.base_model_fsdp_plan:
        assert name.replace("*", "0") in modules


def test_device_map_with_offload(folder, tmp_path):
    path = folder(NeoBERTForMaskedLM)
    device_map = {
        "model.encoder": "cpu",
        "model.transformer_encoder.0": "cpu",
        "model.transformer_encoder.1": "disk",
        "model.layer_norm": "cpu",
        "decoder": "cpu",
    }
    model = NeoBERTForMaskedLM.from_pretrained(path, device_map=device_map, offload_folder=tmp_path / "offload")
    # With gradients, as in blocks whose weights come and go, the modules run one by one.
    expected = small_model(NeoBERTForMaskedLM)(IDS, attention_mask=MASK).logits
    with torch.no_grad():
        assert torch.equal(model(IDS, attention_mask=MASK).logits, expected)


def test_copies_and_pickles():
    model = small_model(NeoBERTForMaskedLM)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(IDS, attention_mask=MASK).logits, expected)


def test_registered_attention_functions_run():
    """A user's own backend through Transformers' interface takes the masked layout."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("my_attention", sdpa_attention_forward)
    AttentionMaskInterface.register("my_attention", sdpa_mask)
    model = small_model()
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK).last_hidden_state
        model.set_attn_implementation("my_attention")
        assert (model(IDS, attention_mask=MASK).last_hidden_state - expected).abs().max() <= 1e-5


def test_attention_without_a_mask_function_is_refused():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("maskless", sdpa_attention_forward)
    model = small_model()
    model.set_attn_implementation("maskless")
    assert model(IDS).last_hidden_state.isfinite().all()
    packed_ids, packed = packed_batch()
    for kwargs in ({"input_ids": IDS, "attention_mask": MASK}, {"input_ids": packed_ids, **packed}):
        with pytest.raises(ValueError, match="'maskless' has no mask function"):
            model(**kwargs)

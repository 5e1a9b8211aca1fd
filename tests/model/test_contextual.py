"""Promises 2, 5 and 10: the two-stage model as written out without package code, in every layout, saved and loaded."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from neobert_hf import NeoBERTContextualConfig, NeoBERTContextualModel
from tests.helpers.models import batch_of, ragged_batch, small_config
from tests.helpers.plain_neobert import plain_hidden_states


LENGTHS = (13, 7, 3, 10)
SIZE = 5


def contextual_config(**changes) -> NeoBERTContextualConfig:
    sizes = small_config().to_diff_dict() | {"context_size": SIZE, "context_dropout": 0.2} | changes
    return NeoBERTContextualConfig(**{name: value for name, value in sizes.items() if name != "model_type"})


def contextual_model(backend: str = "sdpa", **changes) -> NeoBERTContextualModel:
    torch.manual_seed(1)
    return NeoBERTContextualModel._from_config(contextual_config(**changes), attn_implementation=backend).eval()


@pytest.fixture
def context() -> torch.Tensor:
    return torch.randn(SIZE, 64, generator=torch.Generator().manual_seed(3))


def part(model: NeoBERTContextualModel, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a part of the model, in float32."""
    state = {key: tensor.float() for key, tensor in model.state_dict().items()}
    return {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}


def plain_embedding(model, ids: torch.Tensor, context=None, prompt_length: int = 0) -> torch.Tensor:
    """Of one text, from the tensors of the model, without package code."""
    if context is None:
        pooled = plain_hidden_states(part(model, "first_stage"), model.config, ids).mean(0)
        head = part(model, "first_head")
        hidden = F.gelu(head["0.weight"] @ pooled + head["0.bias"])
        return head["2.weight"] @ hidden + head["2.bias"]
    prefix = torch.cat((context.float(), part(model, "soft_prompts")["weight"]))
    positions = torch.arange(len(ids)) + model.config.text_position
    states = plain_hidden_states(part(model, "second_stage"), model.config, ids, positions, prefix)
    pooled = states[prompt_length:].mean(0)
    head = part(model, "second_head")
    hidden = (head["0.weight"] @ pooled + head["0.bias"]).clamp(min=0)
    return pooled + head["2.weight"] @ hidden + head["2.bias"]


def expected_of(model, ids: torch.Tensor, documents, context=None, prompt_lengths=(0, 0, 0, 0)) -> torch.Tensor:
    texts = [ids[row, columns] for row, columns in documents]
    return torch.stack([plain_embedding(model, text, context, k) for text, k in zip(texts, prompt_lengths)])


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("text_position", [0, SIZE])
@pytest.mark.parametrize("stage", ["first", "second", "null"])
def test_as_written_out_in_every_layout(backend, text_position, stage, context):
    model = contextual_model(backend, text_position=text_position)
    given = {"first": None, "second": context, "null": context[:0]}[stage]
    read = part(model, "null_context")["weight"].expand(SIZE, -1) if stage == "null" else given
    for layout in ("dense", "right", "left"):
        ids, kwargs, documents = batch_of(layout, LENGTHS)
        found = model(ids, **kwargs, dataset_embeddings=given).pooler_output
        assert found.dtype == torch.float32
        assert (found - expected_of(model, ids, documents, read)).abs().max() <= 1e-5, layout


@torch.no_grad()
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_prompt_is_read_and_not_pooled(side, context):
    model, (ids, kwargs, documents) = contextual_model(), batch_of(side, LENGTHS)

    def embed(prompt_length, **given) -> torch.Tensor:
        return model(ids, **kwargs, **given, prompt_length=prompt_length).pooler_output

    for given, lengths in ((2, [2] * 4), (torch.tensor([2]), [2] * 4), (torch.tensor([1, 0, 2, 2]), [1, 0, 2, 2])):
        expected = expected_of(model, ids, documents, context, lengths)
        assert (embed(given, dataset_embeddings=context) - expected).abs().max() <= 1e-5
    # The first stage pools it, as the reference code does.
    assert torch.equal(embed(2), embed(None))
    # A text that is nothing but its prompt has no mean, and no wrong one.
    assert embed(3, dataset_embeddings=context).isnan().all(1).tolist() == [False, False, True, False]


def test_context_dropout_replaces_vectors_in_training_only(context):
    model = contextual_model(context_dropout=0.5)
    rows = 200
    prefix = model.build_prefix(context, rows)
    assert prefix.shape == (1, SIZE + 8, 64)
    assert torch.equal(prefix[0], torch.cat((context, model.soft_prompts.weight)))
    model.train()
    prefix = model.build_prefix(context, rows)[:, :SIZE]
    kept, null = ((prefix == other).all(-1) for other in (context, model.null_context.weight))
    assert (kept ^ null).all() and abs(null.float().mean() - 0.5) < 0.06
    # Drawn for each text and each vector.
    assert 0.2 < null.float().mean(1).std() < 0.26 and (null.float().mean(0) - 0.5).abs().max() < 0.15
    prefix.sum().backward()
    assert model.null_context.weight.grad.unique().item() == null.sum()


@torch.no_grad()
def test_saved_and_loaded_with_its_code(tmp_path, monkeypatch, context):
    model = contextual_model(text_position=SIZE)
    ids, mask = ragged_batch(LENGTHS)
    expected = model(ids, attention_mask=mask, dataset_embeddings=context).pooler_output
    model.save_pretrained(tmp_path)
    assert (tmp_path / "contextual_neobert.py").is_file() and (tmp_path / "modeling_neobert.py").is_file()
    loaded = AutoModel.from_pretrained(tmp_path)
    config = loaded.config
    assert (config.context_size, config.context_dropout, config.soft_prompts, config.text_position) == (5, 0.2, 8, 5)
    assert torch.equal(loaded(ids, attention_mask=mask, dataset_embeddings=context).pooler_output, expected)
    # Without the package, from the code in the folder.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    foreign = get_class_from_dynamic_module("contextual_neobert.NeoBERTContextualModel", str(tmp_path))
    assert foreign.__module__.startswith("transformers_modules.")
    loaded = foreign.from_pretrained(tmp_path)
    assert type(loaded.config).__module__ == foreign.__module__
    assert torch.equal(loaded(ids, attention_mask=mask, dataset_embeddings=context).pooler_output, expected)


@pytest.mark.parametrize("stage", ["first", "second"])
def test_arguments_are_checked_as_those_of_the_encoder(stage, context):
    ids, mask = ragged_batch(LENGTHS)
    model, given = contextual_model(), {"dataset_embeddings": None if stage == "first" else context}
    for error, name, arguments in (
        (TypeError, "pad_mask", {"input_ids": ids, "pad_mask": mask}),
        (ValueError, "attention_mask", {"input_ids": ids, "attention_mask": mask * 2}),
        (ValueError, "dataset_embeddings", {"input_ids": ids, "dataset_embeddings": torch.zeros(3, 64)}),
        (ValueError, "dataset_embeddings", {"input_ids": ids, "dataset_embeddings": torch.zeros(1, SIZE, 64)}),
    ):
        with pytest.raises(error, match=f"`{name}`"):
            model(**given | arguments)
    with pytest.raises(ValueError, match="`dataset_embeddings`"):  # There is no empty context without dropout.
        contextual_model(context_dropout=0.0)(ids, dataset_embeddings=context[:0])
    for name, changes in (("rope", {"rope": False}), ("context_sizes", {"context_sizes": 3})):
        with pytest.raises(ValueError, match=f"`{name}`"):
            contextual_config(**changes)


@torch.no_grad()
@pytest.mark.parametrize("stage", ["first", "second"])
def test_the_second_stage_computes_no_padding(stage, context):
    model, ids, mask = contextual_model(), *ragged_batch(LENGTHS)
    seen = []
    for block in (*model.first_stage.transformer_encoder, *model.second_stage.transformer_encoder):
        block.qkv.register_forward_hook(lambda layer, inputs, output: seen.append(output.shape[:2]))
    model(ids, attention_mask=mask, dataset_embeddings=None if stage == "first" else context)
    prefix = 0 if stage == "first" else len(LENGTHS) * (SIZE + model.config.soft_prompts)
    assert seen == [(1, sum(LENGTHS) + prefix)] * 2

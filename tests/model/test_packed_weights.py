"""`prepare_for_inference`: the same numbers from packed weights, and never those of weights that are gone."""

import copy
import gc
import os
import pickle
import platform
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

from neobert_hf import NeoBERTForMaskedLM, NeoBERTModel
from neobert_hf.cpu_neobert import PACKED_WEIGHTS, Int8Weight, PackedWeight, largest_int8_weight
from tests.helpers.models import ROOT, ragged_batch, small_model


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """How many tokens each product with packed weights had."""
    seen = []
    for kind in (PackedWeight, Int8Weight):

        def counting(weight, hidden_states, residual, plain=kind.multiply):
            if hidden_states.dim() == 3:  # Not the one that tries whether the CPU can do it.
                seen.append(hidden_states.shape[:-1].numel())
            return plain(weight, hidden_states, residual)

        monkeypatch.setattr(kind, "multiply", counting)
    return seen


@torch.no_grad()
def states(model, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(ids, attention_mask=mask).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_packed_weights_give_the_same_states(rows, products):
    model = small_model(NeoBERTModel)
    ids, mask = ragged_batch([13] if rows == 1 else [13, 7, 1, 10] * (rows // 4))
    expected = states(model, ids, mask)
    assert model.prepare_for_inference() is model
    torch.testing.assert_close(states(model, ids, mask), expected, rtol=0, atol=1e-5)
    # Four products in each of two blocks.
    assert products == [int(mask.sum())] * 8


@pytest.mark.parametrize("lengths", [[13], [13, 7, 1, 10]])
def test_packed_bfloat16_gives_the_same_states(lengths, products):
    model = small_model(NeoBERTModel).bfloat16()
    ids, mask = ragged_batch(lengths)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        with pytest.raises(RuntimeError, match="no instructions for bfloat16 .* dtype=torch.float32"):
            model.prepare_for_inference()
        return
    expected = states(model, ids, mask)
    found = states(model.prepare_for_inference(), ids, mask)
    # Two steps of bfloat16 at 4, the largest state: a product may sum in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-5)
    assert products == [int(mask.sum())] * 8


@pytest.mark.parametrize("largest", [63, None])
def test_int8_is_the_product_of_rounded_rows(largest):
    """With weights of 7 bits on any CPU, with 8 where that adds without overflow."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, 64, generator=generator) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    rows[0, 0] = 0
    weight = torch.nn.Parameter(torch.randn(96, 64, generator=generator) * 10 ** torch.linspace(-3, 3, 96)[:, None])
    found = Int8Weight.of(weight, largest).multiply(rows, None)
    of_rows, of_weight = (part.double().abs().amax(-1, keepdim=True) / 127 for part in (rows, weight.detach()))
    of_weight *= 127 / (largest or largest_int8_weight())
    whole = (rows / of_rows.clamp(min=1e-30)).round() @ (weight.detach() / of_weight).round().t()
    found_whole = (found / of_rows.clamp(min=1e-30) / of_weight.flatten()).double()
    # Sums of up to a million, in float32.
    torch.testing.assert_close(found_whole, whole, rtol=0, atol=0.5)
    assert not found[0, 0].any()
    rows[1, 2, 5] = torch.nan
    assert Int8Weight.of(weight, largest).multiply(rows, None)[1, 2].isnan().all()


def test_in_int8_no_text_depends_on_its_batch(products):
    """With one scale for a whole batch it would: the first text has an embedding fifty times as large."""
    model = small_model(NeoBERTModel)
    model.encoder.weight.data[7] *= 50
    ids, mask = ragged_batch([13, 7, 1, 10])
    ids[0, 3] = 7
    exact = states(model, ids, mask)
    model.prepare_for_inference(int8=True)
    together = states(model, ids, mask)
    assert products == [31] * 8 and not torch.equal(together, exact)
    assert torch.cosine_similarity(together, exact, dim=-1).min() > 0.99
    alone = [states(model, row[kept.bool()][None], kept[kept.bool()][None]) for row, kept in zip(ids, mask)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("change", ["optimizer", "load", "data", "new data", "deleted"])
def test_changed_weights_count(change, int8, products, caplog):
    model = small_model(NeoBERTModel).prepare_for_inference(int8)
    ids, mask = ragged_batch()
    states(model, ids, mask)
    weight = model.transformer_encoder[0].ffn.w12.weight
    if change == "optimizer":
        loss = model.train()(ids, attention_mask=mask).last_hidden_state.square().mean()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=10.0).step()
        model.eval()
    elif change == "load":
        model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    elif change == "data":
        # As PEFT merges an adapter.
        weight.data += 0.1
    elif change == "new data":
        weight.data = weight.data * 2
    else:
        model.transformer_encoder[0].ffn.w12.weight = torch.nn.Parameter(weight.detach() * 2)
    products.clear()
    found = states(model, ids, mask)
    fresh = small_model(NeoBERTModel)
    fresh.load_state_dict(model.state_dict())
    if int8:
        # A weight that has not changed is still in int8.
        fresh.prepare_for_inference(int8)
        for weight, other in zip(model.parameters(), fresh.parameters()):
            if other in PACKED_WEIGHTS and weight not in PACKED_WEIGHTS:
                del PACKED_WEIGHTS[other]
    torch.testing.assert_close(found, states(fresh, ids, mask), rtol=0, atol=1e-5)
    assert sum(weight in PACKED_WEIGHTS for weight in model.parameters()) < 8
    products.clear()
    found, expected = (states(one.prepare_for_inference(int8), ids, mask) for one in (model, fresh))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert len(products) == 16


def test_a_prepared_model_is_copied_pickled_saved_and_freed(tmp_path):
    model = small_model(NeoBERTForMaskedLM).prepare_for_inference()
    ids, mask = ragged_batch()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            found = other(ids, attention_mask=mask).logits[mask.bool()]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    gc.collect()
    before = len(PACKED_WEIGHTS)
    del model, other
    gc.collect()
    assert len(PACKED_WEIGHTS) == before - 8


MEMORY = """
import sys

import torch

from neobert_hf import NeoBERTConfig, NeoBERTModel


def resident() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


model = NeoBERTModel(NeoBERTConfig(num_hidden_layers=4, vocab_size=1000)).eval()
# Libraries and buffers that the first products load are no weights.
small = NeoBERTModel(NeoBERTConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=1, vocab_size=1000)).eval()
ids = torch.arange(1, 9)[None]
with torch.no_grad():
    for one in (model, small, small.prepare_for_inference(sys.argv[1] == "int8")):
        one(ids)
    before = resident()
    model.prepare_for_inference(sys.argv[1] == "int8")(ids)
    added = resident() - before
print(added / sum(4 * weight.numel() for weight in model.transformer_encoder.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind, share", [("float32", 1.0), ("int8", 0.25)])
def test_memory_that_packed_weights_take(kind, share):
    """A process of its own holds no more than a second copy of the blocks' weights and a tenth."""
    # Else glibc keeps what packing needed for a moment, in int8 up to half of the weights in a model of four layers.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEMORY, kind]
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    added = float(run.stdout)
    assert 0.9 * share < added <= share + 0.1


def test_gradients_are_those_of_the_weights():
    model, ids = small_model(NeoBERTModel), torch.tensor([[5, 6, 7]])
    model(ids).last_hidden_state.sum().backward()
    expected = model.transformer_encoder[0].qkv.weight.grad.clone()
    model.zero_grad()
    model.prepare_for_inference()(ids).last_hidden_state.sum().backward()
    assert torch.equal(model.transformer_encoder[0].qkv.weight.grad, expected)


@pytest.mark.parametrize(
    ("changes", "part"), [({"hidden_act": "gelu"}, "container.Sequential"), ({"rms_norm": False}, "LayerNorm")]
)
def test_blocks_that_would_not_use_packed_weights_are_refused(changes, part):
    """They would take memory, and a user would think that int8 costs nothing."""
    with pytest.raises(ValueError, match=f"A block holds a torch.nn.modules.*{part}, .*Merge adapters first"):
        small_model(NeoBERTModel, **changes).prepare_for_inference(int8=True)


def test_adapters_are_merged_first():
    model = get_peft_model(small_model(NeoBERTModel), LoraConfig(target_modules=["qkv"], init_lora_weights=False))
    with pytest.raises(ValueError, match="A block holds a peft.tuners.lora.layer.Linear, but packed weights"):
        model.prepare_for_inference()
    ids, mask = ragged_batch()
    merged = model.merge_and_unload().eval()
    expected = states(merged, ids, mask)
    assert torch.allclose(states(merged.prepare_for_inference(), ids, mask), expected, atol=1e-5)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an option of oneDNN for x86 CPUs")
def test_a_cpu_that_adds_in_16_bits_gets_weights_of_7_bits():
    """All states and weights are as large as they can be, so that every sum would overflow."""
    code = (
        "import torch; from neobert_hf.cpu_neobert import Int8Weight, largest_int8_weight\n"
        "ones = torch.ones(4, 256); product = Int8Weight.of(torch.nn.Parameter(ones)).multiply(ones, None)\n"
        "print(largest_int8_weight(), (product - 256).abs().max().item() < 1e-3)"
    )
    old_cpu = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=old_cpu, capture_output=True, text=True)
    assert run.stdout.split() == ["63", "True"], run.stderr


def test_a_cpu_that_adds_wrongly_is_refused(monkeypatch):
    """None is known that does so with 7 bits: here the sums of any weights are said to be 2."""
    largest_int8_weight.cache_clear()
    monkeypatch.setattr(Int8Weight, "multiply", lambda weight, states, residual: torch.full((4, 256), 2.0))
    with pytest.raises(RuntimeError, match="This CPU computes sums of int8 products wrongly: 2 instead of 256"):
        small_model(NeoBERTModel).prepare_for_inference(int8=True)


@pytest.mark.parametrize("int8", [False, True])
def test_a_batch_of_nothing_but_padding(int8):
    model = small_model(NeoBERTModel).prepare_for_inference(int8)
    ids = torch.full((2, 5), model.config.pad_token_id)
    with torch.no_grad():
        assert not model(ids, attention_mask=torch.zeros_like(ids)).last_hidden_state.any()


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match="The weights are torch.float16 on cpu; they must be torch.float32 or"):
        small_model(NeoBERTModel).half().prepare_for_inference()
    with pytest.raises(
        ValueError, match="The weights are torch.bfloat16 on cpu; they must be torch.float32 on a CPU. Lo"
    ):
        small_model(NeoBERTModel).bfloat16().prepare_for_inference(int8=True)
    with torch.inference_mode():
        model = small_model(NeoBERTModel)
    with pytest.raises(ValueError, match=r"created in torch.inference_mode\(\): load the model outside"):
        model.prepare_for_inference()


@pytest.mark.parametrize("int8", [False, True])
def test_derivatives_in_forward_mode(int8):
    """`no_grad` does not switch them off, and products with packed weights have none."""
    plain, prepared = (small_model(attn_implementation="eager") for _ in range(2))
    prepared.prepare_for_inference(int8=int8)
    states, tangent = (torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    with torch.no_grad():
        found, expected = (
            torch.func.jvp(lambda x, model=model: model(inputs_embeds=x).last_hidden_state, (states,), (tangent,))[1]
            for model in (prepared, plain)
        )
    assert expected.abs().max() > 0.1 and (found - expected).abs().max() <= 1e-5

"""Which kernel runs where `sdpa` is configured, on a GPU that is not there, with stand-ins for the kernels."""

import gpu_probe
import pytest
import throughput
import torch
from encoders import ENCODERS, build_config
from gpu_probe import attention_kernels
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from neobert_hf import NeoBERTForMaskedLM, attention_neobert
from neobert_hf.pretraining.trainer import attention_backend
from tests.helpers.models import packed_batch, ragged_batch, small_model
from tests.helpers.pretend_cuda import model_on_device, on_device, pretend_cuda, varlen_attn


CALLS = []
BATCHES = {
    "dense": {"input_ids": ragged_batch()[0]},
    "varlen": dict(zip(("input_ids", "attention_mask"), ragged_batch())),
    "varlen of packed rows": {"input_ids": packed_batch()[0], **packed_batch()[1]},
}


def dense_kernel(query, key, value, softmax_scale=None):
    CALLS.append("dense")
    states = (part.transpose(-3, -2) for part in (query, key, value))
    return F.scaled_dot_product_attention(*states, scale=softmax_scale).transpose(-3, -2)


def varlen_kernel(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None):
    """With the logarithms of the sums, as some versions return them."""
    CALLS.append("varlen")
    if query.device.type == "cuda":
        return varlen_attn(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), None
    lengths = cu_seqlens_q.diff().tolist()
    parts = [dense_kernel(*part, softmax_scale) for part in zip(*(x.split(lengths) for x in (query, key, value)))]
    return torch.cat(parts), None


@pytest.fixture
def gpu(monkeypatch):
    """A function that says what is installed: packages by name, and whether `kernels` is."""
    CALLS.clear()
    attention_neobert.find_faster_kernel.cache_clear()
    monkeypatch.setattr(attention_neobert, "FASTER_KERNELS", {})
    monkeypatch.setattr(attention_neobert, "_compare_with_torch", lambda *arguments: None)
    loaded, said = [], []

    def load(name):
        loaded.append(name)
        return (dense_kernel, varlen_kernel, None, None, None), (None, None)

    def installed(*packages, hub=False, load=load):
        matrix = {version: {"general_availability_check": lambda v=version: v in packages} for version in (2, 3, 4)}
        monkeypatch.setattr(attention_neobert, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", matrix)
        monkeypatch.setattr(attention_neobert, "is_kernels_available", lambda: hub)
        monkeypatch.setattr(attention_neobert, "lazy_import_flash_attention", load)
        monkeypatch.setattr(attention_neobert.logger, "warning_once", said.append)
        return loaded, said

    with torch.no_grad(), pretend_cuda(monkeypatch):
        yield installed
    attention_neobert.find_faster_kernel.cache_clear()
    throughput.flash_attention.cache_clear()


def run_all() -> None:
    models = [small_model(NeoBERTForMaskedLM, embedding_init_range=0.1).to(torch.bfloat16) for _ in range(2)]
    there = model_on_device(models[1])
    for name, batch in BATCHES.items():
        difference = there(**on_device(batch)).logits.host - models[0](**batch).logits
        assert difference.abs().max() <= 0.1, name


@pytest.mark.parametrize(
    ("packages", "hub", "source"),
    [
        ((2, 3, 4), False, "flash_attention_3"),
        ((4,), False, "flash_attention_4"),
        ((), True, "kernels-community/vllm-flash-attn3"),
    ],
)
def test_a_faster_kernel_takes_full_and_ragged_batches(gpu, packages, hub, source):
    loaded, said = gpu(*packages, hub=hub)
    run_all()
    assert loaded == [source] and not said
    assert CALLS == ["dense"] * 2 + ["varlen"] * 4


def test_the_slower_kernel_is_named_once(gpu):
    loaded, said = gpu(2)
    run_all()
    assert not loaded and not CALLS
    assert len(said) == 1 and "not installed: pip install neobert_hf[flash]" in said[0]


@pytest.mark.parametrize(("packages", "name"), [((3,), "FlashAttention 3"), ((2,), "FlashAttention of torch")])
def test_the_log_of_a_training_names_the_kernel(gpu, packages, name):
    gpu(*packages)
    arguments = (small_model(NeoBERTForMaskedLM), torch.device("cuda:0"), torch.bfloat16)
    assert attention_backend(*arguments, whole_rows=False) == f"sdpa, {name} over all documents"
    assert attention_backend(*arguments, whole_rows=True) == "sdpa"


@pytest.mark.parametrize(
    ("packages", "hub", "capability", "flash"),
    [
        ((2, 3, 4), False, 9, "flash_attention_3"),
        ((2, 4), False, 9, "flash_attention_4"),
        ((), True, 9, "flash_attention_3"),
        ((2, 3, 4), False, 10, "flash_attention_4"),
        ((2, 3), False, 8, "flash_attention_2"),
        ((), True, 8, "flash_attention_2"),
        ((), False, 9, None),
    ],
)
def test_the_benchmark_offers_all_encoders_the_same_kernels(gpu, monkeypatch, packages, hub, capability, flash):
    """FlashAttention 2 of torch is NeoBERT's alone: the others get the package or the kernel of the Hub for it."""
    _, said = gpu(*packages, hub=hub)
    benchmark_on_gpu(monkeypatch, packages, hub)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 0))
    assert throughput.backends(build_config("NeoBERT")) == ["sdpa"]
    for name in [name for name in ENCODERS if name != "NeoBERT"]:
        local = "flex_attention" if name.startswith("ModernBERT") else None
        expected = [found for found in (flash or local, "sdpa") if found]
        assert throughput.backends(build_config(name)) == expected, name
    kernels = attention_kernels(64)
    faster = {f"FlashAttention {flash[-1]}"} if flash not in (None, "flash_attention_2") else set()
    assert set(kernels) == {"as torch chooses", "cuDNN", "flash", "varlen"} | faster
    if faster:
        states = torch.randn(3, 2, 8, 4, 64, dtype=torch.bfloat16)
        assert torch.equal(kernels[faster.pop()](*states), dense_kernel(*states))


def benchmark_on_gpu(monkeypatch, packages: tuple[int, ...], hub: bool) -> None:
    """What throughput.py and gpu_probe.py find."""
    for module in (throughput, gpu_probe):
        monkeypatch.setattr(module, "CUDA", True)
        monkeypatch.setattr(module, "DEVICE", "cuda:0")
        monkeypatch.setattr(module, "DTYPE", torch.bfloat16)
    monkeypatch.setattr(throughput, "is_flash_attn_2_available", lambda: 2 in packages)
    monkeypatch.setattr(throughput, "is_kernels_available", lambda: hub)
    monkeypatch.setattr(throughput, "lazy_import_flash_attention", attention_neobert.lazy_import_flash_attention)
    monkeypatch.setattr(gpu_probe, "FASTER_KERNELS", attention_neobert.FASTER_KERNELS)
    throughput.flash_attention.cache_clear()


def test_a_kernel_of_the_hub_that_cannot_be_loaded_is_offered_to_nobody(gpu, monkeypatch, capsys):
    def fail(name):
        raise OSError(f"{name} is not there")

    gpu(hub=True, load=fail)
    benchmark_on_gpu(monkeypatch, (), hub=True)
    assert throughput.backends(build_config("BERT-base")) == ["sdpa"]
    assert "kernels-community/flash-attn2 is not there" in capsys.readouterr().err


def test_a_kernel_that_cannot_be_loaded_is_not_used(gpu):
    def fail(name):
        raise OSError(f"{name} is not there")

    _, said = gpu(hub=True, load=fail)
    run_all()
    assert not CALLS and len(said) == 1 and "vllm-flash-attn3 is not there" in said[0]


def test_on_other_gpus_torch_has_the_fastest(gpu, monkeypatch):
    loaded, said = gpu(3, 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    run_all()
    assert not loaded and not said and not CALLS


def test_a_wrong_kernel_is_noticed():
    """In outputs of rows, in those of documents, and in gradients."""
    cpu, compare = torch.device("cpu"), attention_neobert._compare_with_torch
    compare(dense_kernel, varlen_kernel, cpu, torch.float32, 16)

    def detached(*states, **options):
        return dense_kernel(*(part.detach() + 0 * part for part in states), **options)

    def of_one_document(query, key, value, *offsets, **options):
        return dense_kernel(query, key, value)

    def doubled(*states, **options):
        return 2 * dense_kernel(*states)

    for dense, varlen in ((doubled, varlen_kernel), (dense_kernel, of_one_document), (detached, varlen_kernel)):
        with pytest.raises(ValueError, match="differ"):
            compare(dense, varlen, cpu, torch.float32, 16)


@pytest.mark.parametrize("name", ["sdpa", "flex_attention"])
def test_a_function_in_the_place_of_transformers_own_is_called(name, monkeypatch):
    """DeepSpeed's Ulysses replaces all of them, and each process would attend to its own part of the sequence."""
    called, own = [], ALL_ATTENTION_FUNCTIONS[name]

    def counting(*args, **kwargs):
        called.append(name)
        return own(*args, **kwargs)

    model, (ids, mask) = small_model(attn_implementation=name, hidden_size=128, num_attention_heads=4), ragged_batch()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, counting)
        found = model(ids, attention_mask=mask).last_hidden_state
    assert len(called) == model.config.num_hidden_layers
    assert (found - expected)[mask.bool()].abs().max() <= 1e-5

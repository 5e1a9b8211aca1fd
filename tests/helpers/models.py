"""Small models with fixed weights, and batches of every layout."""

from pathlib import Path

import torch

from neobert_hf import NeoBERTConfig, NeoBERTModel


ROOT = Path(__file__).parent.parent.parent
# Beside the clone, or in it: to a machine with a GPU only the clone is copied.
SHARED = ROOT / "shared" if (ROOT / "shared").is_dir() else ROOT.parent / "shared"

# Varlen and masked backends that run on a CPU. Flash kernels need a GPU; flash_kernel.py has a stand-in for them.
CPU_BACKENDS = ("sdpa", "eager", "flex_attention")


def small_config(**changes) -> NeoBERTConfig:
    sizes = dict(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        # Of 32: with less, flex_attention gives NaN on a CPU (torch 2.13).
        num_attention_heads=2,
        intermediate_size=96,
        max_length=64,
        # Wide enough that attention is far from uniform and a wrong mask or rotation shows.
        embedding_init_range=1.0,
        decoder_init_range=0.2,
    )
    return NeoBERTConfig(**(sizes | changes))


def small_model(cls=NeoBERTModel, attn_implementation: str = "sdpa", **changes):
    """The same weights for the same class and sizes, whatever the backend."""
    torch.manual_seed(1)
    return cls._from_config(small_config(**changes), attn_implementation=attn_implementation).eval()


def ragged_batch(lengths=(13, 7, 1, 10), side: str = "right", vocab_size: int = 100):
    """Ids (batch, longest) and their mask; padding holds random ids, so that reading it shows."""
    generator = torch.Generator().manual_seed(2)
    longest = max(lengths)
    ids = torch.randint(1, vocab_size, (len(lengths), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        if side == "right":
            mask[row, :length] = 1
        elif side == "left":
            mask[row, longest - length :] = 1
        else:
            mask[row, torch.randperm(longest, generator=generator)[:length]] = 1
    return ids, mask


def packed_batch(lengths=(13, 7, 1, 10), vocab_size: int = 100):
    """One row of documents, with the keyword arguments that DataCollatorWithFlattening gives."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, vocab_size, (1, sum(lengths)), generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def positions_of(lengths) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)

"""Small models with fixed weights, and batches of every layout."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from neobert_hf import (
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTModel,
)
from tests.helpers.small_tokenizer import small_tokenizer


ROOT = Path(__file__).parent.parent.parent
# Beside the clone, or in it: to a machine with a GPU only the clone is copied.
SHARED = ROOT / "shared" if (ROOT / "shared").is_dir() else ROOT.parent / "shared"

# The encoder, and with each of its heads.
CLASSES = (
    NeoBERTModel,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTForQuestionAnswering,
    NeoBERTForMultipleChoice,
)
LENGTHS = (13, 7, 1, 10)


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


def save_encoder(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Path:
    """A model to fine-tune and its tokenizer; with dropout, so that a resume has to restore its generator."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48}
    config = small_config(**sizes, dropout=0.1, pad_token_id=tokenizer.pad_token_id)
    NeoBERTForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_checkpoint(folder: Path, cls=NeoBERTModel, model=None, **changes) -> Path:
    """A model, or a small one of a class, and a tokenizer of letters for 64 tokens; the folder."""
    (model or small_model(cls, **changes)).save_pretrained(folder)
    small_tokenizer(model_max_length=64).save_pretrained(folder)
    return folder


def ragged_batch(lengths=LENGTHS, side: str = "right", vocab_size: int = 100):
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


def positions_of(lengths) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def batch_of(layout: str, lengths=LENGTHS) -> tuple[torch.Tensor, dict, list[tuple[int, torch.Tensor]]]:
    """A batch in any layout: ids, the other arguments, and the row and columns of the tokens of each document.

    Args:
        layout: `dense`, the side of the padding, `cu_seq_lens` (of DataCollatorWithFlattening), `position_ids` or
            `both` of one packed row, or `packed rows`, which have padding as well.
    """
    if layout in ("cu_seq_lens", "position_ids", "both"):
        ids, positions = ragged_batch([sum(lengths)])[0], {"position_ids": positions_of(lengths)}
        offsets, longest = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)
        packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
        kwargs = {"cu_seq_lens": packed, "position_ids": positions, "both": packed | positions}[layout]
        return ids, kwargs, [(0, columns) for columns in torch.arange(sum(lengths)).split(lengths)]
    if layout == "packed rows":
        rows = (lengths[:2], lengths[2:], lengths[:1])
        ids, mask = ragged_batch([sum(row) for row in rows], "left")
        positions, documents = torch.zeros_like(ids), []
        for row, of_row in enumerate(rows):
            real = mask[row].nonzero()[:, 0]
            positions[row, real] = positions_of(of_row)[0]
            documents += [(row, columns) for columns in real.split(of_row)]
        return ids, {"attention_mask": mask, "position_ids": positions}, documents
    ids, mask = ragged_batch((max(lengths),) * 4 if layout == "dense" else lengths, layout)
    documents = [(row, mask[row].nonzero()[:, 0]) for row in range(len(ids))]
    return ids, {} if layout == "dense" else {"attention_mask": mask}, documents

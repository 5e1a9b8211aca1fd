"""Batches before the first layer and after the last: checks, unpadding, documents of a packed row, pooling.

A batch reaches the encoder in one of three layouts:

* dense: no padding, one document per row, shape (batch, length);
* varlen: real tokens only, one row (1, tokens) with the lengths of its documents. Padding was stripped here, or the
  caller packed the batch;
* masked: shape (batch, length) with a mask, for the backends that cannot do varlen (`eager`, `flex_attention`) and
  while tracing, where shapes must not depend on data.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    flash_attention_mask,
    packed_sequence_mask_function,
)
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing


logger = logging.get_logger(__name__)

# What a forward pass takes beside its named arguments.
FORWARD_KWARGS = {"output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "seq_idx"}


@dataclass
class Batch:
    """A laid-out batch; (B, S) is the caller's shape, (1, T) the varlen one.

    Args:
        tokens: ids (B, S) or (1, T), or embeddings with a last dimension `hidden_size`.
        position_ids: position of each token in its document, broadcastable to the shape of `tokens`.
        span: one more than the largest position of a real token; the length that RoPE scaling looks at.
        attention_mask: bool (B, S), True at real tokens; None where all are real or the padding is stripped.
        document_ids: int (B, S), equal within a document; None unless the masked layout has packed rows.
        cu_seq_lens: int32 (documents + 1,), token offsets of the documents; None unless varlen.
        lengths: the same as a list of document lengths; None for a kernel that takes all documents at once.
        max_length: length of the longest document.
        real_indices: int (T,), where the real tokens lie in the flattened (B, S) batch; None if nothing was stripped.
        padded_shape: (B, S).
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    span: int
    padded_shape: tuple[int, int]
    attention_mask: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    cu_seq_lens: torch.Tensor | None = None
    lengths: list[int] | None = None
    max_length: int | None = None
    real_indices: torch.Tensor | None = None

    def restore(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states in the caller's shape (B, S, hidden_size), zero at padding in every layout.

        They may lie on another device than the batch did: a `device_map` spreads the blocks.
        """
        if self.real_indices is not None:
            batch_size, length = self.padded_shape
            padded = hidden_states.new_zeros(batch_size * length, hidden_states.shape[-1])
            indices = self.real_indices.to(hidden_states.device)
            return padded.index_copy(0, indices, hidden_states[0]).view(batch_size, length, -1)
        if self.attention_mask is not None:
            return hidden_states.masked_fill(~self.attention_mask.unsqueeze(-1).to(hidden_states.device), 0.0)
        return hidden_states


def lay_out_batch(
    config,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
    max_length: int | None,
    varlen: bool,
    kernel: bool,
) -> Batch:
    """Choose the layout and move the batch into it.

    Inputs are as `check_inputs` accepts them. `varlen`: the backend takes documents laid end to end; `kernel`: all at
    once, without their lengths on the host.
    """
    tokens = input_ids if input_ids is not None else inputs_embeds
    shape, device, tracing = tuple(tokens.shape[:2]), tokens.device, is_tracing(tokens)

    mask = attention_mask.bool() if attention_mask is not None else None
    if mask is not None and not tracing and mask.all():
        mask = None

    document_ids = None
    if cu_seq_lens is not None:
        # int32 is what varlen kernels read.
        cu_seq_lens = cu_seq_lens.to(torch.int32)
        document_ids = torch.searchsorted(
            cu_seq_lens[1:], torch.arange(shape[1], device=device, dtype=torch.int32), right=True
        ).unsqueeze(0)
    elif position_ids is not None:
        document_ids = find_documents(position_ids.expand(shape), mask)
        if not tracing and not document_ids.any():
            document_ids = None
    default = position_ids is None
    if default:
        position_ids = default_positions(config, shape, device, mask, cu_seq_lens, document_ids)

    padded_or_packed = mask is not None or document_ids is not None
    if padded_or_packed and varlen and not tracing:
        return _strip(tokens, position_ids, shape, mask, document_ids, kernel)
    if tracing and padded_or_packed and config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        raise ValueError(
            f"RoPE of type {config.rope_parameters['rope_type']!r} depends on the longest document, which is not known "
            "while compiling or exporting padded or packed input: use type 'yarn' or 'linear'."
        )
    if cu_seq_lens is not None and kernel:
        if max_length is None:
            raise ValueError("Compiled packed input needs `max_length_q` (an int) beside `cu_seq_lens_q`.")
        return Batch(tokens, position_ids, max_length, shape, cu_seq_lens=cu_seq_lens, max_length=max_length)
    if tracing or (default and not padded_or_packed):
        span = shape[1]
    else:
        span = int((position_ids if mask is None else position_ids * mask).max()) + 1
    return Batch(tokens, position_ids, span, shape, attention_mask=mask, document_ids=document_ids)


def _strip(tokens, position_ids, shape, mask, document_ids, kernel) -> Batch:
    """The varlen layout: one row of real tokens, cut into documents."""
    batch_size, length = shape
    # A row's number is its document unless the row is packed; numbers only have to differ between neighbours.
    groups = torch.arange(batch_size, device=tokens.device).unsqueeze(1) * length
    groups = (groups + (document_ids if document_ids is not None else 0)).expand(shape).flatten()
    position_ids = position_ids.expand(shape).flatten()
    real_indices = None
    if mask is not None or batch_size > 1:
        tokens = tokens.flatten(0, 1)
        if mask is not None:
            real_indices = mask.flatten().nonzero().squeeze(1)
            tokens, groups, position_ids = tokens[real_indices], groups[real_indices], position_ids[real_indices]
        else:
            real_indices = torch.arange(batch_size * length, device=tokens.device)
        tokens = tokens.unsqueeze(0)

    counts = torch.unique_consecutive(groups, return_counts=True)[1]
    lengths = counts.tolist()
    return Batch(
        tokens,
        position_ids.unsqueeze(0),
        int(position_ids.max()) + 1 if lengths else 1,
        shape,
        cu_seq_lens=nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
        lengths=None if kernel else lengths,
        max_length=max(lengths, default=0),
        real_indices=real_indices,
    )


def build_mask(config, implementation: str, hidden_states: torch.Tensor, batch: Batch):
    """The mask of the masked layout in the form that the backend reads: additive, bool or a block mask.

    Raises:
        ValueError: if the backend has none. Transformers would leave the mask, or its documents, out without a word.
    """
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"Attention {implementation!r} has no mask function: register one with "
            "`transformers.AttentionMaskInterface`, or pass batches without padding and packing."
        )
    if batch.document_ids is not None and ALL_MASK_ATTENTION_FUNCTIONS[implementation] is flash_attention_mask:
        raise ValueError(
            f"While compiling, {implementation!r} keeps documents apart by `cu_seq_lens_q` only: pass it (with "
            "`max_length_q`) instead of `position_ids`."
        )
    if implementation != config._attn_implementation:
        config = copy.copy(config)
        config._attn_implementation = implementation
    same_document = None
    if batch.document_ids is not None:
        same_document = packed_sequence_mask_function(batch.document_ids)
    return create_bidirectional_mask(
        config, inputs_embeds=hidden_states, attention_mask=batch.attention_mask, and_mask_function=same_document
    )


def default_positions(config, shape, device, mask, cu_seq_lens=None, document_ids=None) -> torch.Tensor:
    """Positions from 0 in each document, (1, S) or (B, S).

    With RoPE they count columns from the row's first real token, so that a token masked out in the middle keeps its
    place; with absolute embeddings they count real tokens, as the original does.
    """
    positions = torch.arange(shape[1], device=device).unsqueeze(0)
    if cu_seq_lens is not None:
        return positions - cu_seq_lens[document_ids]
    if mask is None:
        return positions
    if config.rope:
        return (positions - mask.int().argmax(-1, keepdim=True)).clamp(min=0)
    return (mask.cumsum(-1) - 1).clamp(min=0)


def find_documents(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Number the documents of each row, (B, S): a new one begins where the positions of real tokens stop increasing.

    Raises:
        ValueError: where they stop increasing without starting again at 0. Whether that is a new document or one with
            unusual positions cannot be known.
    """
    if mask is None:
        mask = torch.ones_like(position_ids, dtype=torch.bool)
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    last_real = torch.where(mask, columns, -1).cummax(-1).values
    before = nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    previous = position_ids.gather(1, before.clamp(min=0))
    starts = mask & (before >= 0) & (position_ids <= previous)
    if is_tracing(position_ids):
        return starts.cumsum(-1)
    if (wrong := starts & (position_ids != 0)).any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"`position_ids` goes from {int(previous[row, column])} to {int(position_ids[row, column])} in row {row}, "
            f"column {column}. Within a document positions must increase; a packed row starts its next document at 0."
        )
    # A restart that only masked tokens show: a document that begins masked, or padding with made-up positions.
    zeros = (position_ids == 0).cumsum(-1)
    hidden = mask & (before >= 0) & ~starts & (zeros != zeros.gather(1, before.clamp(min=0)))
    if hidden.any():
        row, column = hidden.nonzero()[0].tolist()
        raise ValueError(
            f"`position_ids` restarts at masked tokens before row {row}, column {column}: whether a document begins "
            "there cannot be known. Strip the masked tokens, or let positions increase across them."
        )
    return starts.cumsum(-1)


def check_one_document_a_row(position_ids, attention_mask, shape: tuple[int, int]) -> None:
    """For heads with one answer a row."""
    if position_ids is None or is_tracing(position_ids):
        return
    mask = attention_mask.bool() if attention_mask is not None else None
    if find_documents(position_ids.expand(shape), mask).any():
        raise ValueError(
            "`position_ids` restarts inside a row, and this head gives one answer a row. Give each document a row; to "
            "classify the documents of one packed row pass `cu_seq_lens_q`."
        )


def check_inputs(
    config, input_ids, inputs_embeds, attention_mask, position_ids, cu_seq_lens, cu_seq_lens_k, max_length
) -> None:
    """Refuse everything that would give a wrong number or a crash deep inside.

    Values are read on the host, one synchronisation each on a GPU; while tracing or capturing, shapes and dtypes only.

    Raises:
        ValueError: naming the argument, what was found and what is allowed.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"Pass exactly one of `input_ids` and `inputs_embeds`; got {found}.")
    tokens = input_ids if input_ids is not None else inputs_embeds
    read_values = not is_tracing(tokens)
    if input_ids is not None:
        _check_integers("input_ids", input_ids, ("batch", "length"))
    elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"`inputs_embeds` has shape {tuple(inputs_embeds.shape)}, "
            f"it must be (batch, length, hidden_size={config.hidden_size})."
        )
    elif not inputs_embeds.is_floating_point():
        raise ValueError(f"`inputs_embeds` has dtype {inputs_embeds.dtype}, it must be a floating dtype.")
    shape = tuple(tokens.shape[:2])
    if read_values and 0 in shape:
        raise ValueError(f"The batch has shape {shape}: it must hold at least one row and one column.")
    if read_values and input_ids is not None:
        _check_range("input_ids", input_ids, config.vocab_size - 1)
    if attention_mask is not None:
        _check_attention_mask(attention_mask, shape, read_values)
    if position_ids is not None:
        _check_integers("position_ids", position_ids, ("batch or 1", "length"))
        if position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
            found = tuple(position_ids.shape)
            raise ValueError(f"`position_ids` has shape {found}, it must be {shape} or {(1, shape[1])}.")
        if read_values:
            _check_range("position_ids", position_ids, None)
    if cu_seq_lens is None and (cu_seq_lens_k is not None or max_length is not None):
        raise ValueError("`cu_seq_lens_k`, `max_length_q` and `max_length_k` mean nothing without `cu_seq_lens_q`.")
    if cu_seq_lens is not None:
        _check_integers("cu_seq_lens_q", cu_seq_lens, ("documents + 1",))
        if shape[0] != 1:
            raise ValueError(f"`cu_seq_lens_q` describes one packed row, the batch has {shape[0]} rows: flatten it.")
        if read_values:
            _check_cu_seq_lens(cu_seq_lens, cu_seq_lens_k, max_length, shape[1], attention_mask, position_ids)
        elif attention_mask is not None:
            raise ValueError("While compiling, `cu_seq_lens_q` excludes an `attention_mask`: leave it out.")
        else:
            lengths = cu_seq_lens.diff()
            fits = (cu_seq_lens[0] == 0) & (cu_seq_lens[-1] == shape[1]) & (lengths > 0).all()
            fits = fits if max_length is None else fits & (lengths.max() <= max_length)
            # The one way to look at values inside a graph: a failed check there is an error, too.
            torch._assert_async(fits, "cu_seq_lens_q must rise from 0 to the number of tokens, by at most max_length_q")


def check_keywords(kwargs: dict) -> None:
    """Refuse what a forward pass would swallow: a misspelt `attention_mask`, the `pad_mask` of the original code."""
    if unknown := sorted(set(kwargs) - FORWARD_KWARGS):
        raise TypeError(
            f"NeoBERT's forward pass does not know {', '.join(f'`{name}`' for name in unknown)}. Beside the named "
            f"arguments it takes {', '.join(f'`{name}`' for name in sorted(FORWARD_KWARGS))}."
        )


def check_labels(labels: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Losses flatten what they get, so labels of another shape with as many entries would pass."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"`labels` has shape {tuple(labels.shape)}, it must be {tuple(shape)}: one for each output.")


def check_answers(start_positions: torch.Tensor, end_positions: torch.Tensor) -> None:
    """Transformers' loss takes a negative position for 0."""
    for name, positions in (("start_positions", start_positions), ("end_positions", end_positions)):
        if not is_tracing(positions) and (positions < 0).any():
            raise ValueError(f"`{name}` holds {int(positions.min())}, allowed is 0 and more.")


def check_span(config, span: int) -> None:
    """Warn once where positions run past what RoPE was trained or scaled for; without RoPE there are none, an error.

    A graph cannot warn, and a comparison would fix its length: nothing is checked while tracing.
    """
    if is_tracing():
        return
    if not config.rope:
        if span > config.max_length:
            raise ValueError(
                f"A sequence of {span} tokens, but `max_position_embeddings` is {config.max_length}, and without RoPE "
                "there are no positions beyond it. Truncate the input."
            )
        return
    rope = config.rope_parameters
    trained = rope.get("original_max_position_embeddings", config.max_length)
    if span > max(config.max_length, trained * rope.get("factor", 1)):
        # The same text for every length, or `warning_once` would warn once a length.
        logger.warning_once(
            f"A sequence is longer than the {config.max_length} tokens that this model is for. Quality falls with the "
            "distance. YaRN extends a model without training; for twice the length, load it with "
            'rope_parameters={"rope_type": "yarn", "factor": 2.0}.'
        )


def _check_integers(name: str, tensor: torch.Tensor, dimensions: tuple[str, ...]) -> None:
    if tensor.ndim != len(dimensions):
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}, it must be ({', '.join(dimensions)}).")
    if tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`{name}` has dtype {tensor.dtype}, it must be torch.int64 or torch.int32.")


def _check_range(name: str, tensor: torch.Tensor, largest: int | None) -> None:
    low, high = torch.stack(tensor.aminmax()).tolist()
    if low < 0 or (largest is not None and high > largest):
        allowed = "0 and more" if largest is None else f"0 to {largest}"
        raise ValueError(f"`{name}` runs from {low} to {high}, allowed is {allowed}.")


def _check_attention_mask(attention_mask: torch.Tensor, shape: tuple[int, int], read_values: bool) -> None:
    meaning = (
        "1 at real tokens and 0 at padding. Additive masks (0 and -inf) are not accepted; to keep the documents of a "
        "packed row apart pass `cu_seq_lens_q` or restarting `position_ids`."
    )
    if tuple(attention_mask.shape) != shape:
        raise ValueError(f"`attention_mask` has shape {tuple(attention_mask.shape)}, it must be {shape}, {meaning}")
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(f"`attention_mask` has dtype {attention_mask.dtype}, it must be bool or integer, {meaning}")
    if read_values and attention_mask.dtype != torch.bool:
        low, high = torch.stack(attention_mask.aminmax()).tolist()
        if low < 0 or high > 1:
            raise ValueError(f"`attention_mask` runs from {low} to {high}, it must be {meaning}")


def _check_cu_seq_lens(cu_seq_lens, cu_seq_lens_k, max_length, length, attention_mask, position_ids) -> None:
    offsets = cu_seq_lens.tolist()
    if cu_seq_lens_k is not None and cu_seq_lens_k.tolist() != offsets:
        raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` differ; in an encoder they are the same.")
    lengths = [right - left for left, right in zip(offsets, offsets[1:])]
    if not lengths or offsets[0] != 0 or offsets[-1] != length or min(lengths) < 1:
        raise ValueError(
            f"`cu_seq_lens_q` is {offsets}: it must rise from 0 to the number of tokens ({length}) with at least one "
            "token a document."
        )
    if max_length is not None and max_length < max(lengths):
        # A varlen kernel told too small a maximum leaves the rest of the document out without an error.
        raise ValueError(f"`max_length_q` is {max_length}, but the longest document has {max(lengths)} tokens.")
    if attention_mask is not None and not attention_mask.bool().all():
        raise ValueError("`cu_seq_lens_q` excludes an `attention_mask` with padding: strip the padding.")
    if position_ids is not None:
        inside = torch.ones(length - 1, dtype=torch.bool, device=position_ids.device)
        inside[cu_seq_lens[1:-1].long() - 1] = False
        if (position_ids[0].diff()[inside] <= 0).any():
            raise ValueError("`position_ids` does not increase within every document of `cu_seq_lens_q`.")


def pool(hidden_states, pooling: str, attention_mask=None, cu_seq_lens=None) -> torch.Tensor:
    """The first real token of each sequence, wherever the padding lies, or the mean of its real tokens."""
    rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
    if cu_seq_lens is not None:
        cu_seq_lens = cu_seq_lens.long()
        if pooling == "cls":
            return hidden_states[0, cu_seq_lens[:-1]]
        lengths = cu_seq_lens.diff()
        documents = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        sums = hidden_states.new_zeros(len(lengths), hidden_states.shape[-1], dtype=torch.float32)
        sums = sums.index_add(0, documents, hidden_states[0].float())
        return (sums / lengths.unsqueeze(1)).to(hidden_states.dtype)
    if pooling == "cls":
        first = 0 if attention_mask is None else attention_mask.int().argmax(-1)
        return hidden_states[rows, first]
    if attention_mask is None:
        return hidden_states.float().mean(1).to(hidden_states.dtype)
    # Padding is zero already.
    counts = attention_mask.sum(1, keepdim=True).clamp(min=1)
    return (hidden_states.float().sum(1) / counts).to(hidden_states.dtype)

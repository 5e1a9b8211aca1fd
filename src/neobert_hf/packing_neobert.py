"""Layouts of a batch (without padding, or with several documents in one row), and pooling.

A batch reaches the encoder in one of three layouts:

* dense: no padding, one document per row, shape (batch, length);
* varlen: real tokens only, one row (1, tokens) with the lengths of its documents. Either padding was stripped here, or
  the caller packed the batch;
* masked: shape (batch, length) with a mask, for backends that do not support varlen (`eager`, `flex_attention`) and
  while tracing, where shapes must not depend on data.

If the tokens are on a GPU, masks, positions and offsets are copied to the host once, before this, and the layout is
built on the host: each time the host reads a GPU value, it waits until the GPU has finished all earlier work.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    flash_attention_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.import_utils import is_tracing

from .attention_neobert import AttentionBackend


@dataclass
class BatchInputs:
    """The tensors that a caller passes to the model, one of `input_ids` and `inputs_embeds` among them.

    Args:
        prefix_embeds: vectors to put before every row, (B or 1, P, hidden_size), all at position 0.
        text_position: position of a row's first real token after them.
        prefix_length: how many columns of tokens and mask already belong to the prefix, see `put_prefix_before`.
        require_tokens: every row must hold a real token, for heads that would otherwise return an output for padding.
        one_document: every row must hold one document, for heads with one output per row.
    """

    input_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cu_seq_lens_q: torch.Tensor | None
    cu_seq_lens_k: torch.Tensor | None
    max_length_q: int | None
    max_length_k: int | None = None
    seq_idx: torch.Tensor | None = None
    prefix_embeds: torch.Tensor | None = None
    text_position: int = 0
    prefix_length: int = 0
    require_tokens: bool = False
    one_document: bool = False

    @property
    def tokens(self) -> torch.Tensor:
        return self.input_ids if self.input_ids is not None else self.inputs_embeds

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, length)."""
        return tuple(self.tokens.shape[:2])

    @property
    def span(self) -> int:
        """One more than the largest position, if the caller passes no positions."""
        return self.text_position + self.shape[1] - self.prefix_length


@dataclass
class Batch:
    """A laid-out batch. (B, S) is the caller's shape, including the prefix if there is one; (1, T) is the varlen shape.

    Args:
        tokens: ids (B, S) or (1, T), or embeddings with a last dimension `hidden_size`.
        position_ids: position of each token in its document, broadcastable to the shape of `tokens`.
        span: one more than the largest position of a real token; the length that RoPE scaling uses.
        padded_shape: (B, S).
        attention_mask: bool (B, S), True at real tokens; None if all are real or the padding is stripped.
        document_ids: int (B, S), equal within a document; None unless the masked layout has packed rows.
        cu_seq_lens: int32 (documents + 1,), token offsets of the documents; None unless varlen. On the host if
            documents are computed one by one.
        lengths: the same as a list of document lengths; None for a kernel that takes all documents at once.
        max_length: length of the longest document.
        real_indices: int (T,), the places of the real tokens in the flattened (B, S) batch; None if nothing was
            stripped.
        prefix_length: how many of the S columns belong to the prefix.
        kept_padded: whether hidden states between the blocks are in the caller's shape.
        for_server: what a server that packed the batch passes to its attention function, under its own names.
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
    prefix_length: int = 0
    kept_padded: bool = False
    for_server: dict = field(default_factory=dict)

    def to(self, device: torch.device) -> "Batch":
        """The batch on the device of its tokens; what only the host reads stays on the host."""
        names = ["position_ids", "attention_mask", "document_ids", "real_indices"]
        if self.lengths is None:
            names.append("cu_seq_lens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in given.items()})

    def varlen_arguments(self) -> dict:
        """The arguments that describe concatenated documents to attention functions, under Transformers' names."""
        if self.cu_seq_lens is None:
            return self.for_server
        offsets = {"cu_seq_lens_q": self.cu_seq_lens, "cu_seq_lens_k": self.cu_seq_lens}
        longest = {"max_length_q": self.max_length, "max_length_k": self.max_length}
        lengths = {} if self.lengths is None else {"lengths": self.lengths}
        return offsets | longest | lengths

    def strip(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Convert hidden states from the caller's shape, (B, S, hidden_size), to the layout of the blocks."""
        if self.real_indices is None:
            return hidden_states
        indices = self.real_indices.to(hidden_states.device)
        return hidden_states.flatten(0, 1).index_select(0, indices).unsqueeze(0)

    def restore(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Convert hidden states to the caller's shape, without the prefix, and zero at padding in every layout.

        They may be on another device than the batch, since a `device_map` spreads the blocks.
        """
        if self.real_indices is not None:
            batch_size, length = self.padded_shape
            padded = hidden_states.new_zeros(batch_size * length, hidden_states.shape[-1])
            indices = self.real_indices.to(hidden_states.device)
            hidden_states = padded.index_copy(0, indices, hidden_states[0]).view(batch_size, length, -1)
        elif self.attention_mask is not None:
            hidden_states = hidden_states.masked_fill(~self.attention_mask.unsqueeze(-1).to(hidden_states.device), 0.0)
        return hidden_states[:, self.prefix_length :] if self.prefix_length else hidden_states

    def restore_outputs(self, outputs: BaseModelOutput) -> BaseModelOutput:
        """Apply `restore` to everything that is not yet in the caller's shape."""
        last, states = outputs.last_hidden_state, outputs.hidden_states
        outputs.last_hidden_state = self.restore(last)
        if states is not None:
            # If only some of them were requested, Transformers puts None in place of the others.
            done = {id(last): outputs.last_hidden_state}
            if not self.kept_padded:
                done |= {id(state): self.restore(state) for state in states if state is not None and state is not last}
            outputs.hidden_states = tuple(done.get(id(state), state) for state in states)
        return outputs


def put_prefix_before(inputs: BatchInputs, embed: Callable[[torch.Tensor], torch.Tensor]) -> BatchInputs:
    """The same batch with its prefix as the first columns of every row; unchanged if it has no prefix.

    Args:
        embed: maps ids to embeddings, since a prefix has no ids.
    """
    prefix = inputs.prefix_embeds
    if prefix is None or not prefix.shape[1]:
        return inputs
    text = embed(inputs.input_ids) if inputs.inputs_embeds is None else inputs.inputs_embeds
    embeddings = torch.cat((prefix.to(text).expand(text.shape[0], -1, -1), text), dim=1)
    mask = inputs.attention_mask
    if mask is not None:
        mask = F.pad(mask.bool(), (prefix.shape[1], 0), value=True)
    return replace(inputs, input_ids=None, inputs_embeds=embeddings, attention_mask=mask, prefix_length=prefix.shape[1])


def lay_out_batch(config, inputs: BatchInputs, backend: AttentionBackend, values_on_host: bool) -> Batch:
    """Choose the layout and bring the batch into it; `inputs` must have passed `check_inputs`.

    The batch is first described in the masked layout, which can represent every batch. If it has neither padding nor
    packed rows, this is the dense layout; otherwise it is converted to varlen if the backend supports that.

    Args:
        values_on_host: whether masks, positions and offsets are on the host, as `read_on_host` returns them. Otherwise
            shapes must not depend on values: while tracing, and for batches that `stays_on_device` allows.
    """
    mask = None if inputs.attention_mask is None else inputs.attention_mask.bool()
    if mask is not None and values_on_host and mask.all():
        mask = None
    document_ids = number_documents(inputs, mask)
    position_ids = inputs.position_ids
    if position_ids is None:
        position_ids = default_positions(config, inputs, mask, document_ids)
    elif mask is not None:
        position_ids = position_ids * mask  # At masked tokens, callers may have positions outside of any table.
    layout = {"attention_mask": mask, "document_ids": document_ids, "prefix_length": inputs.prefix_length}
    batch = Batch(inputs.tokens, position_ids, inputs.span, inputs.shape, **layout)
    ragged = mask is not None or document_ids is not None
    if not values_on_host:
        return _lay_out_unread(config, inputs, backend, batch) if ragged else batch
    if ragged and backend.takes_documents:
        batch = _strip(batch, backend)
    elif ragged or inputs.position_ids is not None:
        batch.span = int((position_ids if mask is None else position_ids * mask).max()) + 1
    return batch.to(batch.tokens.device)


def lay_out_served(config, inputs: BatchInputs, for_server: dict) -> Batch:
    """A row of tokens that a server has packed, unchanged: the server's attention function knows where texts begin.

    No value is read, not even to check it, since a server records graphs, and warms up with rows of zeros.

    Raises:
        ValueError: on arguments that the server's function would not see, and on models whose positions depend on more
            than each token's own position.
    """
    given = ["attention_mask", "cu_seq_lens_q", "seq_idx", "prefix_embeds"]
    given = [f"`{name}`" for name in given if getattr(inputs, name) is not None]
    if given or inputs.position_ids is None or inputs.shape[0] != 1:
        found = f"{', '.join(given) or 'no mask'} and {'no' if inputs.position_ids is None else 'its'} `position_ids`"
        raise ValueError(
            f"Attention {config._attn_implementation!r} got a batch of shape {inputs.shape} with {found}. It takes one "
            "row (1, tokens) with `position_ids` and nothing else: the server itself separates the texts."
        )
    if needs_longest_document(config):
        rope_type = config.rope_parameters["rope_type"]
        raise ValueError(
            f"RoPE of type {rope_type!r} depends on the longest text, which a server does not report: use type 'yarn' "
            "or 'linear'."
        )
    if not config.rope:
        raise ValueError(
            "`rope` is False: each stage of a pipeline would add the learned positions. Serve a model with RoPE."
        )
    # Only those types of RoPE use the span, and the server has limited the length, so any span will do.
    return Batch(inputs.tokens, inputs.position_ids, span=1, padded_shape=inputs.shape, for_server=for_server)


def stays_on_device(config, inputs: BatchInputs, backend: AttentionBackend) -> bool:
    """Whether a batch can be laid out without reading values: whole rows, or packed with all that a kernel needs."""
    if inputs.attention_mask is not None or inputs.position_ids is not None or inputs.seq_idx is not None:
        return False
    if inputs.cu_seq_lens_q is None:
        return True
    longest_is_given = isinstance(inputs.max_length_q, int) and not isinstance(inputs.max_length_q, bool)
    return backend.in_one_kernel and longest_is_given and not needs_longest_document(config)


def needs_longest_document(config) -> bool:
    """Whether rotary frequencies depend on the longest document of a batch."""
    return config.rope_parameters["rope_type"] in ("dynamic", "longrope")


def _lay_out_unread(config, inputs: BatchInputs, backend: AttentionBackend, batch: Batch) -> Batch:
    """The masked layout, or the caller's packed row, for cases where shapes must not depend on data."""
    if needs_longest_document(config):
        rope_type = config.rope_parameters["rope_type"]
        raise ValueError(
            f"RoPE of type {rope_type!r} depends on the longest document, which is unknown while compiling or "
            "exporting padded or packed input: use type 'yarn' or 'linear'."
        )
    if inputs.cu_seq_lens_q is None or not backend.in_one_kernel:
        return batch
    longest = inputs.max_length_q
    if longest is None:
        raise ValueError("Compiled packed input needs `max_length_q` (an int) in addition to `cu_seq_lens_q`.")
    cu_seq_lens = inputs.cu_seq_lens_q.to(torch.int32)
    return Batch(
        batch.tokens, batch.position_ids, longest, batch.padded_shape, cu_seq_lens=cu_seq_lens, max_length=longest
    )


def _strip(batch: Batch, backend: AttentionBackend) -> Batch:
    """From the masked to the varlen layout: one row of real tokens, cut into documents."""
    batch_size, length = batch.padded_shape
    tokens, host = batch.tokens, batch.position_ids.device
    # Each row is one document unless it is packed. Numbers only need to differ between neighbouring documents.
    groups = torch.arange(batch_size, device=host).unsqueeze(1) * length
    groups = groups + (0 if batch.document_ids is None else batch.document_ids)
    groups = groups.expand(batch.padded_shape).flatten()
    position_ids = batch.position_ids.expand(batch.padded_shape).flatten()
    real_indices = None
    if batch.attention_mask is not None:
        real_indices = batch.attention_mask.flatten().nonzero().squeeze(1)
        groups = groups[real_indices]
        position_ids = position_ids[real_indices]
        real_indices = real_indices.to(tokens.device, non_blocking=True)
        tokens = tokens.flatten(0, 1).index_select(0, real_indices).unsqueeze(0)
    elif batch_size > 1:
        real_indices = torch.arange(batch_size * length, device=tokens.device)
        tokens = tokens.flatten(0, 1).unsqueeze(0)

    counts = torch.unique_consecutive(groups, return_counts=True)[1]
    lengths = counts.tolist()
    return Batch(
        tokens,
        position_ids.unsqueeze(0),
        span=int(position_ids.max()) + 1 if lengths else 1,
        padded_shape=batch.padded_shape,
        # Varlen kernels need int32.
        cu_seq_lens=F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
        lengths=None if backend.in_one_kernel else lengths,
        max_length=max(lengths, default=0),
        real_indices=real_indices,
        prefix_length=batch.prefix_length,
    )


def build_mask(config, implementation: str, hidden_states: torch.Tensor, batch: Batch):
    """The mask of the masked layout in the form that the backend needs: additive, bool or a block mask.

    Raises:
        ValueError: if the backend has no mask function, or one that ignores documents. Transformers would silently
            leave out the mask, or the borders of documents.
    """
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"Attention {implementation!r} has no mask function: register one with "
            "`transformers.AttentionMaskInterface`, or pass batches without padding and packing."
        )
    if batch.document_ids is not None and ALL_MASK_ATTENTION_FUNCTIONS[implementation] is flash_attention_mask:
        raise ValueError(
            f"While compiling, {implementation!r} separates documents only by `cu_seq_lens_q`: pass it (with "
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


def default_positions(
    config, inputs: BatchInputs, mask: torch.Tensor | None, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Positions from 0 in each document, (1, S) or (B, S); a prefix is at 0, and its text begins at `text_position`.

    With RoPE, columns are counted from the row's first real token, so that a token masked out in the middle keeps its
    position. With absolute embeddings, real tokens are counted, as in the original.
    """
    length = inputs.prefix_length
    known = mask if mask is not None else document_ids if document_ids is not None else inputs.tokens
    positions = torch.arange(inputs.shape[1] - length, device=known.device).unsqueeze(0)
    if inputs.cu_seq_lens_q is not None:
        return positions - inputs.cu_seq_lens_q.to(torch.int32)[document_ids]
    if mask is not None and not config.rope:
        return (mask.cumsum(-1) - 1).clamp(min=0)
    if mask is not None:
        positions = (positions - mask[:, length:].int().argmax(-1, keepdim=True)).clamp(min=0)
    return F.pad(positions + inputs.text_position, (length, 0)) if length else positions


def number_documents(inputs: BatchInputs, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The number of each token's document in its row, (1, S) or (B, S); None if each row is one document."""
    if inputs.cu_seq_lens_q is not None:
        ends = inputs.cu_seq_lens_q[1:].to(torch.int32)
        columns = torch.arange(inputs.shape[1], device=ends.device, dtype=torch.int32)
        return torch.searchsorted(ends, columns, right=True).unsqueeze(0)
    if inputs.position_ids is None:
        return None
    document_ids = find_documents(inputs.position_ids.expand(inputs.shape), mask)
    # A graph must not depend on whether there are several documents.
    return document_ids if is_tracing(document_ids) or document_ids.any() else None


def find_documents(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Number the documents of each row, (B, S), by their positions.

    Within a document, positions increase. A token begins a new document if its position is not larger than that of the
    real token before it. Positions of masked tokens are ignored, since padding may have any values there.

    Raises:
        ValueError: if positions stop increasing without restarting at 0: this may be a new document, or one with
            unusual positions.
    """
    if mask is None:
        mask = torch.ones_like(position_ids, dtype=torch.bool)
    columns = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    # The column of the last real token up to each column, and of the last one before it; -1 if there is none.
    last_real = torch.where(mask, columns, -1).cummax(-1).values
    before = F.pad(last_real[:, :-1], (1, 0), value=-1)
    follows = mask & (before >= 0)
    before = before.clamp(min=0)
    starts = follows & (position_ids <= position_ids.gather(1, before))
    if not is_tracing(position_ids):
        _check_starts(position_ids, starts, follows, before)
    return starts.cumsum(-1)


def _check_starts(
    position_ids: torch.Tensor, starts: torch.Tensor, follows: torch.Tensor, before: torch.Tensor
) -> None:
    """Refuse positions from which the borders of documents cannot be determined.

    Args:
        starts: where a document begins after another one, bool (B, S).
        follows: real tokens that have a real token before them, bool (B, S); `before` is its column.
    """
    if (wrong := starts & (position_ids != 0)).any():
        row, column = wrong.nonzero()[0].tolist()
        previous = int(position_ids[row, before[row, column]])
        raise ValueError(
            f"`position_ids` goes from {previous} to {int(position_ids[row, column])} in row {row}, "
            f"column {column}. Within a document positions must increase; a packed row starts its next document at 0."
        )
    # A masked 0 between two real tokens whose positions increase: either a document begins there, or it is padding.
    zeros = (position_ids == 0).cumsum(-1)
    hidden = follows & ~starts & (zeros != zeros.gather(1, before))
    if hidden.any():
        row, column = hidden.nonzero()[0].tolist()
        raise ValueError(
            f"`position_ids` restarts at masked tokens before row {row}, column {column}: it is unclear whether a "
            "document begins there. Strip the masked tokens, or let positions increase across them."
        )


def hide_padding(logits: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Mask the logits (batch, length) of padding, so that a softmax runs over real tokens only."""
    return logits if attention_mask is None else logits.masked_fill(attention_mask == 0, torch.finfo(logits.dtype).min)


def pool(hidden_states, pooling: str, attention_mask=None, cu_seq_lens=None) -> torch.Tensor:
    """The hidden state of each sequence's first real token, wherever padding lies, or the mean over its real tokens."""
    if cu_seq_lens is not None:
        return _pool_documents(hidden_states[0], pooling, cu_seq_lens.long())
    if pooling == "cls":
        rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        first = 0 if attention_mask is None else attention_mask.int().argmax(-1)
        return hidden_states[rows, first]
    if attention_mask is None:
        return hidden_states.float().mean(1).to(hidden_states.dtype)
    # The hidden states of padding are zero already.
    counts = attention_mask.int().sum(1, keepdim=True).clamp(min=1)
    return (hidden_states.float().sum(1) / counts).to(hidden_states.dtype)


def _pool_documents(hidden_states: torch.Tensor, pooling: str, offsets: torch.Tensor) -> torch.Tensor:
    """The same for every document in one row, (tokens, hidden_size)."""
    if pooling == "cls":
        return hidden_states.index_select(0, offsets[:-1])
    lengths = offsets.diff()
    numbers = torch.arange(len(lengths), device=lengths.device)
    documents = torch.repeat_interleave(numbers, lengths, output_size=len(hidden_states))
    sums = hidden_states.new_zeros(len(lengths), hidden_states.shape[-1], dtype=torch.float32)
    sums = sums.index_add(0, documents, hidden_states.float())
    return (sums / lengths.unsqueeze(1)).to(hidden_states.dtype)

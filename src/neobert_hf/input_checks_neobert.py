"""Checks of what a caller passes to a forward pass: an error that names the argument, before a number comes out.

Values are read on the host, one synchronisation each on a GPU. While tracing or capturing only shapes and dtypes are.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import torch
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from .packing_neobert import BatchInputs, find_documents


logger = logging.get_logger(__name__)

# What a forward pass takes beside its named arguments.
FORWARD_KWARGS = {"output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "seq_idx"}


def check_inputs(config, inputs: BatchInputs) -> None:
    """Refuse everything that would give a wrong number or a crash deep inside.

    Raises:
        ValueError: naming the argument, what was found and what is allowed.
    """
    if (inputs.input_ids is None) == (inputs.inputs_embeds is None):
        found = "neither" if inputs.input_ids is None else "both"
        raise ValueError(f"Pass exactly one of `input_ids` and `inputs_embeds`; got {found}.")
    read_values = not is_tracing(inputs.tokens)
    _check_tokens(config, inputs, read_values)
    if inputs.attention_mask is not None:
        _check_attention_mask(inputs.attention_mask, inputs.shape, read_values)
    if inputs.position_ids is not None:
        _check_position_ids(inputs.position_ids, inputs.shape, read_values)
    if inputs.cu_seq_lens_q is not None:
        _check_packing(inputs, read_values)
    elif inputs.cu_seq_lens_k is not None or inputs.max_length_q is not None:
        raise ValueError("`cu_seq_lens_k`, `max_length_q` and `max_length_k` mean nothing without `cu_seq_lens_q`.")


def _check_tokens(config, inputs: BatchInputs, read_values: bool) -> None:
    input_ids, inputs_embeds = inputs.input_ids, inputs.inputs_embeds
    if input_ids is not None:
        _check_integers("input_ids", input_ids, ("batch", "length"))
    elif inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
        raise ValueError(
            f"`inputs_embeds` has shape {tuple(inputs_embeds.shape)}, "
            f"it must be (batch, length, hidden_size={config.hidden_size})."
        )
    elif not inputs_embeds.is_floating_point():
        raise ValueError(f"`inputs_embeds` has dtype {inputs_embeds.dtype}, it must be a floating dtype.")
    if read_values and 0 in inputs.shape:
        raise ValueError(f"The batch has shape {inputs.shape}: it must hold at least one row and one column.")
    if read_values and input_ids is not None:
        _check_range("input_ids", input_ids, config.vocab_size - 1)


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


def _check_position_ids(position_ids: torch.Tensor, shape: tuple[int, int], read_values: bool) -> None:
    _check_integers("position_ids", position_ids, ("batch or 1", "length"))
    if position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        found = tuple(position_ids.shape)
        raise ValueError(f"`position_ids` has shape {found}, it must be {shape} or {(1, shape[1])}.")
    if read_values:
        _check_range("position_ids", position_ids, None)


def _check_packing(inputs: BatchInputs, read_values: bool) -> None:
    _check_integers("cu_seq_lens_q", inputs.cu_seq_lens_q, ("documents + 1",))
    rows = inputs.shape[0]
    if rows != 1:
        raise ValueError(f"`cu_seq_lens_q` describes one packed row, the batch has {rows} rows: flatten it.")
    if not read_values:
        _check_offsets_in_a_graph(inputs)
        return
    longest = _check_offsets(inputs)
    if inputs.max_length_q is not None and inputs.max_length_q < longest:
        # A varlen kernel told too small a maximum leaves the rest of the document out without an error.
        raise ValueError(f"`max_length_q` is {inputs.max_length_q}, but the longest document has {longest} tokens.")
    if inputs.attention_mask is not None and not inputs.attention_mask.bool().all():
        raise ValueError("`cu_seq_lens_q` excludes an `attention_mask` with padding: strip the padding.")
    if inputs.position_ids is not None:
        inside = torch.ones(inputs.shape[1] - 1, dtype=torch.bool, device=inputs.position_ids.device)
        inside[inputs.cu_seq_lens_q[1:-1].long() - 1] = False
        if (inputs.position_ids[0].diff()[inside] <= 0).any():
            raise ValueError("`position_ids` does not increase within every document of `cu_seq_lens_q`.")


def _check_offsets(inputs: BatchInputs) -> int:
    """The number of tokens of the longest document."""
    offsets, length = inputs.cu_seq_lens_q.tolist(), inputs.shape[1]
    if inputs.cu_seq_lens_k is not None and inputs.cu_seq_lens_k.tolist() != offsets:
        raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` differ; in an encoder they are the same.")
    lengths = [right - left for left, right in zip(offsets, offsets[1:])]
    if not lengths or offsets[0] != 0 or offsets[-1] != length or min(lengths) < 1:
        raise ValueError(
            f"`cu_seq_lens_q` is {offsets}: it must rise from 0 to the number of tokens ({length}) with at least one "
            "token a document."
        )
    return max(lengths)


def _check_offsets_in_a_graph(inputs: BatchInputs) -> None:
    if inputs.attention_mask is not None:
        raise ValueError("While compiling, `cu_seq_lens_q` excludes an `attention_mask`: leave it out.")
    offsets, longest = inputs.cu_seq_lens_q, inputs.max_length_q
    lengths = offsets.diff()
    fits = (offsets[0] == 0) & (offsets[-1] == inputs.shape[1]) & (lengths > 0).all()
    fits = fits if longest is None else fits & (lengths.max() <= longest)
    # The one way to look at values inside a graph: a failed check there is an error, too.
    torch._assert_async(fits, "cu_seq_lens_q must rise from 0 to the number of tokens, by at most max_length_q")


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
    limit, rope = config.max_length, config.rope_parameters
    if "factor" in rope:
        limit = max(limit, rope.get("original_max_position_embeddings", limit) * rope["factor"])
    if span > limit:
        # The same text for every length, or `warning_once` would warn once a length.
        logger.warning_once(
            f"A sequence is longer than the {config.max_length} tokens that this model is for. Quality falls with the "
            "distance. YaRN extends a model without training; for twice the length, load it with "
            'rope_parameters={"rope_type": "yarn", "factor": 2.0}.'
        )

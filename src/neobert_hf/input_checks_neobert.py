"""Checks of the arguments of a forward pass: a wrong one raises an error that names it, before anything is computed.

Values are checked on the host. Since each read of a GPU value makes the host wait, everything that is needed for the
checks and for the layout of the batch is copied in one read (`read_on_host`). Labels on a GPU are checked by an
asynchronous assertion. While tracing or capturing, only shapes and dtypes are read.

This file is also served from the Hub as remote code, so it imports nothing from the package.
"""

import math
from dataclasses import replace

import torch
from torch.nn import functional as F
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from .attention_neobert import SERVERS
from .configuration_neobert import MOST_POSITIONS
from .packing_neobert import BatchInputs, find_documents, number_documents


logger = logging.get_logger(__name__)

# Keywords that a forward pass accepts in addition to its named arguments.
FORWARD_KWARGS = {"output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "seq_idx"}

# Arguments of other models. Trainers and clients pass them to any model, with these values, which have no effect here.
INERT_KWARGS = {"use_cache": (None, False)} | dict.fromkeys(
    ("past_key_values", "cache_position", "head_mask", "encoder_hidden_states", "encoder_attention_mask"), (None,)
)

MASK_MEANING = (
    "1 at real tokens and 0 at padding. Additive masks (0 and -inf) are not accepted; to keep the documents of a "
    "packed row apart pass `cu_seq_lens_q` or restarting `position_ids`."
)


# The arguments that determine the layout of a batch, in addition to the shape of its tokens.
LAYOUT_ARGUMENTS = ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def check_inputs(config, inputs: BatchInputs) -> None:
    """Refuse arguments with a wrong shape or dtype, or in a wrong combination, without reading values.

    Raises:
        ValueError: naming the argument, what was found and what is allowed.
    """
    if (inputs.input_ids is None) == (inputs.inputs_embeds is None):
        found = "neither" if inputs.input_ids is None else "both"
        raise ValueError(f"Pass exactly one of `input_ids` and `inputs_embeds`; got {found}.")
    _check_tokens(config, inputs)
    if inputs.attention_mask is not None:
        _check_attention_mask(inputs.attention_mask, inputs.shape)
    if inputs.position_ids is not None:
        _check_position_ids(inputs.position_ids, inputs.shape)
    if inputs.cu_seq_lens_q is not None:
        _check_packing(inputs)
    elif inputs.cu_seq_lens_k is not None or inputs.max_length_q is not None or inputs.max_length_k is not None:
        raise ValueError("`cu_seq_lens_k`, `max_length_q` and `max_length_k` have no effect without `cu_seq_lens_q`.")
    if inputs.seq_idx is not None:
        _check_seq_idx(inputs)
    _check_prefix(config, inputs)
    if not is_tracing(inputs.tokens) and 0 in inputs.shape:
        raise ValueError(f"The batch has shape {inputs.shape}: it must hold at least one row and one column.")


def read_on_host(config, inputs: BatchInputs) -> tuple[BatchInputs, dict[str, tuple[int, int]]]:
    """The batch with everything but its tokens on the host, and smallest and largest values by name, in one read.

    If there is no mask, the values under `padding` say whether the first or last column holds padding.
    """
    mask = inputs.attention_mask
    floating = mask is not None and mask.is_floating_point()
    if floating:
        inputs = replace(inputs, attention_mask=_as_integers(mask))
    given = {name: value for name in LAYOUT_ARGUMENTS if (value := getattr(inputs, name)) is not None}
    looked_at = {name: given[name] for name in ("attention_mask", "position_ids") if name in given}
    if floating:
        looked_at["floating_mask"] = looked_at.pop("attention_mask")
    ids = inputs.input_ids
    if ids is not None:
        looked_at["input_ids"] = ids
        if config.pad_token_id is not None and not given.keys() & {"attention_mask", "cu_seq_lens_q"}:
            looked_at["padding"] = torch.stack((ids[:, 0], ids[:, -1])) == config.pad_token_id
    limits = [
        torch.stack((value.int() if value.dtype == torch.bool else value).aminmax()).long()
        for value in looked_at.values()
    ]
    host = inputs
    if inputs.tokens.device.type == "cpu":
        numbers = torch.cat(limits).tolist() if limits else []
    elif limits or given:
        # As 4-byte numbers: only values beyond the limits need more, and the limits, read in full, refuse these.
        limits = [pair.view(torch.int32) for pair in limits]
        parts = [*limits, *(value.flatten().to(torch.int32) for value in given.values())]
        parts = torch.cat(parts).cpu().split([len(part) for part in parts])
        numbers = [number for pair in parts[: len(limits)] for number in pair.view(torch.int64).tolist()]
        values = parts[len(limits) :]
        host = replace(inputs, **{name: new.view(given[name].shape) for name, new in zip(given, values)})
    pairs = zip(numbers[::2], numbers[1::2]) if limits else ()
    return host, dict(zip(looked_at, pairs))


def check_contents(config, host: BatchInputs, limits: dict[str, tuple[int, int]]) -> None:
    """Refuse values that would give wrong results, or crash deep inside the model.

    Args:
        host, limits: as returned by `read_on_host`.

    Raises:
        ValueError: naming the argument, what was found and what is allowed.
    """
    allowed = {
        "input_ids": (config.vocab_size - 1, f"but only 0 to {config.vocab_size - 1} are allowed."),
        "attention_mask": (1, f"it must be {MASK_MEANING}"),
        # Angles are computed in float32, which cannot represent 16,777,217.
        "position_ids": (MOST_POSITIONS, f"but only 0 to {MOST_POSITIONS} are allowed."),
    }
    if limits.get("floating_mask", (0, 0))[1] > 1:
        raise ValueError(
            "An `attention_mask` of a floating dtype must hold only 0 and 1, and a 1 in every row; this one does not. "
            f"It must be {MASK_MEANING}"
        )
    for name, (largest, needed) in allowed.items():
        low, high = limits.get(name, (0, 0))
        if low < 0 or high > largest:
            raise ValueError(f"`{name}` runs from {low} to {high}, {needed}")
    if host.require_tokens and host.attention_mask is not None:
        _check_rows(host.attention_mask.bool())
    if limits.get("position_ids") == (0, 0):
        _check_zero_positions(host)
    if host.cu_seq_lens_q is not None:
        _check_packed_values(host)
    if host.seq_idx is not None:
        _check_borders(host)
    check_one_document_a_row(host)


def check_on_device(inputs: BatchInputs) -> None:
    """Checks that run in a graph, or on a GPU without waiting for it. There a failed check raises an error later."""
    if inputs.cu_seq_lens_q is None:
        return
    if inputs.attention_mask is not None:
        raise ValueError("While compiling, `cu_seq_lens_q` excludes an `attention_mask`: leave it out.")
    offsets, longest = inputs.cu_seq_lens_q, inputs.max_length_q
    lengths = offsets.diff()
    fits = (offsets[0] == 0) & (offsets[-1] == inputs.shape[1]) & (lengths > 0).all()
    fits = fits if longest is None else fits & (lengths.max() <= longest)
    torch._assert_async(fits, "cu_seq_lens_q must rise from 0 to the number of tokens, by at most max_length_q")


def _check_tokens(config, inputs: BatchInputs) -> None:
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


def _check_prefix(config, inputs: BatchInputs) -> None:
    """Check a prefix. It has a single position, so other arguments that set positions or documents contradict it."""
    prefix, position = inputs.prefix_embeds, inputs.text_position
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= MOST_POSITIONS:
        raise ValueError(f"`text_position` is {position!r}, it must be a whole number, 0 to {MOST_POSITIONS}.")
    if prefix is None or prefix.ndim == 3 and not prefix.shape[1]:
        if position:
            raise ValueError(f"`text_position` is {position}, but has no effect without vectors in `prefix_embeds`.")
    if prefix is None:
        return
    rows, width = inputs.shape[0], config.hidden_size
    if prefix.ndim != 3 or prefix.shape[0] not in (1, rows) or prefix.shape[2] != width:
        raise ValueError(
            f"`prefix_embeds` has shape {tuple(prefix.shape)}, it must be ({rows} or 1, prefix, hidden_size={width})."
        )
    if not prefix.is_floating_point():
        raise ValueError(f"`prefix_embeds` has dtype {prefix.dtype}, it must be a floating dtype.")
    if not config.rope:
        raise ValueError("`prefix_embeds` needs RoPE: there is no learned absolute position for a prefix.")
    for name in ("position_ids", "cu_seq_lens_q", "seq_idx"):
        if getattr(inputs, name) is not None:
            raise ValueError(
                f"`prefix_embeds` excludes `{name}`: the model itself sets the positions of a prefix and its text. "
                "Give each text its own row, with an `attention_mask`; the model strips padding itself."
            )
    refuse_values("prefix_embeds", prefix, ~prefix.isfinite(), "a finite number everywhere")


def _check_rows(mask: torch.Tensor) -> None:
    empty = ~mask.any(-1)
    if empty.any():
        row = empty.nonzero()[0].item()
        raise ValueError(
            f"Row {row} of `attention_mask` is all 0: a row without tokens has no output. Leave such rows out."
        )


def _check_attention_mask(attention_mask: torch.Tensor, shape: tuple[int, int]) -> None:
    found = tuple(attention_mask.shape)
    if found != shape:
        raise ValueError(f"`attention_mask` has shape {found}, it must be {shape}, {MASK_MEANING}")
    # A floating mask is accepted if its values are only 0 and 1, which cannot be checked in a graph.
    if attention_mask.is_complex() or attention_mask.is_floating_point() and is_tracing(attention_mask):
        dtype = attention_mask.dtype
        raise ValueError(f"`attention_mask` has dtype {dtype}, it must be bool or integer, {MASK_MEANING}")


def _as_integers(mask: torch.Tensor) -> torch.Tensor:
    """Convert a mask of a floating dtype, as PEFT's prompts and much user code make them: 0, 1, and 2 for other values.

    A row without a 1 becomes all 2, since an additive mask that hides nothing is all 0.
    """
    numbers = torch.where(mask == 1, 1, torch.where(mask == 0, 0, 2))
    return numbers.masked_fill(~(numbers == 1).any(-1, keepdim=True), 2)


def _check_position_ids(position_ids: torch.Tensor, shape: tuple[int, int]) -> None:
    _check_integers("position_ids", position_ids, ("batch or 1", "length"))
    if position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        found = tuple(position_ids.shape)
        raise ValueError(f"`position_ids` has shape {found}, it must be {shape} or {(1, shape[1])}.")


def _check_zero_positions(host: BatchInputs) -> None:
    """Refuse positions that are all 0: every token would be a document. Attribution tools pass them, meaning others."""
    mask = host.attention_mask
    most = host.shape[1] if mask is None else int(mask.sum(-1).max())
    if most > 1 and host.cu_seq_lens_q is None and host.seq_idx is None:
        raise ValueError(
            f"`position_ids` is all 0, in rows of up to {most} tokens. A 0 begins a document, so every token would be "
            "a document of its own. Leave `position_ids` out if each row is one text; to pack documents of one token, "
            "also pass `cu_seq_lens_q`."
        )


def _check_packing(inputs: BatchInputs) -> None:
    _check_integers("cu_seq_lens_q", inputs.cu_seq_lens_q, ("documents + 1",))
    rows = inputs.shape[0]
    if rows != 1:
        raise ValueError(f"`cu_seq_lens_q` describes one packed row, but the batch has {rows} rows: flatten the batch.")
    if inputs.max_length_k is not None and inputs.max_length_k != inputs.max_length_q:
        raise ValueError(
            f"`max_length_q` is {inputs.max_length_q} and `max_length_k` is {inputs.max_length_k}, but in an encoder "
            "they are the same: pass the same value for both, or only `max_length_q`."
        )


def _check_packed_values(host: BatchInputs) -> None:
    longest = _check_offsets(host)
    if host.max_length_q is not None and not host.max_length_q >= longest:  # NaN as well
        # With too small a maximum, a varlen kernel silently leaves out the rest of the document.
        raise ValueError(f"`max_length_q` is {host.max_length_q}, but the longest document has {longest} tokens.")
    if host.attention_mask is not None and not host.attention_mask.bool().all():
        raise ValueError("`cu_seq_lens_q` cannot be combined with padding in `attention_mask`: strip the padding.")
    if host.position_ids is not None:
        inside = torch.ones(host.shape[1] - 1, dtype=torch.bool)
        inside[host.cu_seq_lens_q[1:-1].long() - 1] = False
        if (host.position_ids[0].diff()[inside] <= 0).any():
            raise ValueError("`position_ids` does not increase within every document of `cu_seq_lens_q`.")


def _check_offsets(inputs: BatchInputs) -> int:
    """The number of tokens of the longest document."""
    offsets, length = inputs.cu_seq_lens_q.tolist(), inputs.shape[1]
    if inputs.cu_seq_lens_k is not None and inputs.cu_seq_lens_k.tolist() != offsets:
        raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` differ, but in an encoder they must be the same.")
    lengths = [right - left for left, right in zip(offsets, offsets[1:])]
    if not lengths or offsets[0] != 0 or offsets[-1] != length or min(lengths) < 1:
        raise ValueError(
            f"`cu_seq_lens_q` is {offsets}: it must rise from 0 to the number of tokens ({length}) with at least one "
            "token per document."
        )
    return max(lengths)


def _check_seq_idx(inputs: BatchInputs) -> None:
    if inputs.cu_seq_lens_q is None and inputs.position_ids is None:
        raise ValueError("`seq_idx` alone separates nothing: also pass `cu_seq_lens_q` or restarting `position_ids`.")
    if tuple(inputs.seq_idx.shape) not in (inputs.shape, (1, inputs.shape[1])):
        raise ValueError(f"`seq_idx` has shape {tuple(inputs.seq_idx.shape)}, it must be {inputs.shape}.")


def _check_borders(host: BatchInputs) -> None:
    """Check that `seq_idx`, which numbers the documents for other kinds of layers, agrees with the documents here."""
    mask = torch.ones(host.shape, dtype=torch.bool)
    mask = mask if host.attention_mask is None else host.attention_mask.bool()
    documents = number_documents(host, mask)
    borders = [None if ids is None else ids.expand(host.shape).diff() != 0 for ids in (documents, host.seq_idx)]
    borders[0] = torch.zeros_like(borders[1]) if borders[0] is None else borders[0]
    if ((borders[0] != borders[1]) & mask[:, 1:] & mask[:, :-1]).any():
        raise ValueError(
            "`seq_idx` changes at other tokens than those where documents begin by `cu_seq_lens_q` or `position_ids`."
        )


def _check_integers(name: str, tensor: torch.Tensor, dimensions: tuple[str, ...]) -> None:
    if tensor.ndim != len(dimensions):
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}, it must be ({', '.join(dimensions)}).")
    if tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`{name}` has dtype {tensor.dtype}, it must be torch.int64 or torch.int32.")


def check_one_document_a_row(inputs: BatchInputs) -> None:
    """Refuse several documents in a row for heads with one output per row. With offsets, each document has its own."""
    positions, mask = inputs.position_ids, inputs.attention_mask
    if not inputs.one_document or positions is None or inputs.cu_seq_lens_q is not None or is_tracing(positions):
        return
    if find_documents(positions.expand(inputs.shape), None if mask is None else mask.bool()).any():
        raise ValueError(
            "`position_ids` restarts within a row, but this head has one output per row. Give each document its own "
            "row; to classify the documents of one packed row, pass `cu_seq_lens_q`."
        )


def check_keywords(kwargs: dict) -> None:
    """Refuse keywords that a forward pass would ignore, such as a misspelt `attention_mask` or the original `pad_mask`.

    Arguments of other models that have no effect here are removed.
    """
    for name in INERT_KWARGS.keys() & kwargs.keys():
        value = kwargs.pop(name)
        if not any(value is inert for inert in INERT_KWARGS[name]):
            raise ValueError(f"`{name}` is given, but NeoBERT is an encoder and does not use it: leave it out.")
    if unknown := sorted(set(kwargs) - FORWARD_KWARGS):
        raise TypeError(
            f"NeoBERT's forward pass has no argument {', '.join(f'`{name}`' for name in unknown)}. Besides its named "
            f"arguments it accepts {', '.join(f'`{name}`' for name in sorted(FORWARD_KWARGS))}."
        )
    count = kwargs.get("num_items_in_batch")
    if count is not None and not is_tracing():
        count = torch.as_tensor(count)
        wrong = ~((count >= 1) & (count < math.inf))
        refuse_values("num_items_in_batch", count, wrong, "1 or more, the number of labels other than -100")


def take_server_arguments(config, kwargs: dict) -> dict:
    """Remove from `kwargs`, and return, what a server passes to its own attention function; empty without a server."""
    if config._attn_implementation not in SERVERS:
        return {}
    return {name: kwargs.pop(name) for name in kwargs.keys() - FORWARD_KWARGS - INERT_KWARGS.keys()}


def check_labels(labels: torch.Tensor, shape: tuple[int, ...], classes: int) -> None:
    """Check labels. Losses flatten them, so labels of a wrong shape with the right number of entries would pass."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"`labels` has shape {tuple(labels.shape)}, it must be {tuple(shape)}: one for each output.")
    if labels.dtype != torch.int64:
        raise ValueError(f"`labels` has dtype {labels.dtype}, it must be torch.int64: labels are classes.")
    wrong = ((labels < 0) | (labels >= classes)) & (labels != -100)
    refuse_values("labels", labels, wrong, f"0 to {classes - 1}, or -100 for no label")


def check_sequence_labels(labels: torch.Tensor, logits: torch.Tensor, problem_type: str | None) -> None:
    """Check labels of whole sequences. Without `problem_type`, Transformers' loss guesses their meaning by dtype."""
    rows, classes = logits.shape
    if problem_type is None and classes > 1:
        problem_type = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if problem_type == "single_label_classification":
        check_labels(labels[:, 0] if labels.shape[1:] == (1,) else labels, (rows,), classes)
        return
    one_each = problem_type != "multi_label_classification" and classes == 1
    if tuple(labels.shape) != (rows, classes) and not (one_each and tuple(labels.shape) == (rows,)):
        needed = (rows,) if one_each else (rows, classes)
        raise ValueError(f"`labels` has shape {tuple(labels.shape)}, it must be {needed}: one for each output.")
    if problem_type == "multi_label_classification":
        if not labels.is_floating_point():
            raise ValueError(f"`labels` has dtype {labels.dtype}; several classes per row need floats: labels.float().")
        refuse_values("labels", labels, ~((labels >= 0) & (labels <= 1)), "0 or 1, or a probability between them")
    else:
        refuse_values("labels", labels, ~labels.isfinite(), "a finite number")


def check_answers(
    start_positions: torch.Tensor, end_positions: torch.Tensor, rows: int, attention_mask: torch.Tensor | None = None
) -> None:
    """Check the positions of answers.

    Transformers' loss treats a negative position as 0, ignores a position after the end, and is infinite in padding.
    """
    answers = {"start_positions": start_positions, "end_positions": end_positions}
    for name, positions in answers.items():
        if tuple(positions.shape) not in ((rows,), (rows, 1)):
            raise ValueError(f"`{name}` has shape {tuple(positions.shape)}, it must be {(rows,)}.")
    if not has_values(start_positions):
        return
    ends = torch.stack((start_positions.flatten(), end_positions.flatten()), 1)
    start, end = ends.unbind(1)
    hidden = torch.zeros_like(start, dtype=torch.bool)
    if attention_mask is not None:
        mask = F.pad(attention_mask.bool().to(ends.device), (0, 1), value=True)
        hidden = ~mask.gather(1, ends.clamp(0, mask.shape[1] - 1)).all(1)
    if start.device.type == "cuda":
        fits = ((start >= 0) & (end >= start) & ~hidden).all()
        message = "`start_positions` must be 0 or more, `end_positions` not before them, and neither in padding"
        torch._assert_async(fits, message)
        return
    for row, (first, last) in enumerate(ends.tolist()):
        for name, position in zip(answers, (first, last)):
            if position < 0:
                raise ValueError(f"`{name}` holds {position} in row {row}, it must be 0 or more.")
        if last < first:
            raise ValueError(f"`end_positions` holds {last} in row {row}, before `start_positions`, {first}.")
    if hidden.any():
        row = int(hidden.nonzero()[0])
        raise ValueError(
            f"The answer in row {row} goes from {int(start[row])} to {int(end[row])}, where `attention_mask` hides "
            "tokens: an answer must begin and end at real tokens."
        )


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read: not in a graph, on the meta device or in a `torch.func.vmap` over rows."""
    return not (is_tracing(tensor) or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def refuse_values(name: str, values: torch.Tensor, wrong: torch.Tensor, needed: str) -> None:
    """Raise an error if values are wrong. On a GPU, the device asserts it: a read would wait for it in every step."""
    if not has_values(values):
        return
    if values.device.type == "cuda":
        torch._assert_async(~wrong.any(), f"`{name}` must be {needed}")
    elif wrong.any():
        raise ValueError(f"`{name}` holds {values[wrong][0].item()}, it must be {needed}.")


def positions_reached(config) -> int | None:
    """The number of positions that a model is meant for, including the factor of a scaled RoPE; None without limit."""
    positions, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if positions is None or "factor" not in rope:
        return positions
    return max(positions, int(rope.get("original_max_position_embeddings", positions) * rope["factor"]))


def check_span(config, span: int) -> None:
    """Warn once if positions exceed those that RoPE was trained or scaled for. Without RoPE, raise an error.

    Nothing is checked while tracing: a graph cannot warn, and the comparison would fix the length in it.
    """
    if is_tracing():
        return
    if not config.rope:
        if span > config.max_length:
            raise ValueError(
                f"A sequence has {span} tokens, but `max_position_embeddings` is {config.max_length}, and without RoPE "
                "there are no positions beyond it. Truncate the input."
            )
        return
    if span > positions_reached(config):
        # The message does not name the length, or `warning_once` would warn once for each length.
        logger.warning_once(
            f"A sequence is longer than the {config.max_length} tokens that this model is meant for. The longer it is, "
            "the lower the quality. YaRN extends a model without training; for twice the length, load it with "
            'rope_parameters={"rope_type": "yarn", "factor": 2.0}.'
        )

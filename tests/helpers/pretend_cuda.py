"""A CUDA device without a GPU: tensors that say `cuda`, are computed on the CPU, and count what the host reads of them.

Under `pretend_cuda` factory functions and `.to("cuda")` make such tensors, and operations between them and tensors of
the host fail as they would on a GPU. So everything in front of the kernels runs as it is; only kernels need a stand-in.
There are no gradients: for these torch asks the driver.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.attention.varlen
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map


aten = torch.ops.aten
# Of bfloat16 outputs up to 4. A CPU without instructions for it rounds in other places: four of its steps there.
BFLOAT16_ATOL = 0.05 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 2**-4
# What needs values on the host to go on. A boolean index and a number of repetitions on the device need them as well.
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}


class PretendTensor(torch.Tensor):
    """A tensor of the device; `.host` holds its values."""

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="cuda:0",
        )

    def __init__(self, host: torch.Tensor):
        self.host = host

    # These methods of torch ask the driver for the device first.

    def tolist(self):
        return self.cpu().tolist()

    def __int__(self):
        return int(self.item())

    def __invert__(self):
        return self.bitwise_not()

    def nonzero(self):
        return aten.nonzero.default(self)

    def contiguous(self):
        return self if self.is_contiguous() else aten.clone.default(self, memory_format=torch.contiguous_format)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        missing = self.ndim - sum(part is not None and part is not Ellipsis for part in index)
        fill = (slice(None),) * missing
        if Ellipsis in [part for part in index if not isinstance(part, torch.Tensor)]:
            place = [part is Ellipsis for part in index].index(True)
            index = (*index[:place], *fill, *index[place + 1 :])
        result, dimension, tensors = self, 0, []
        for part in index:
            if part is None:
                result = result.unsqueeze(dimension)
            elif isinstance(part, int):
                result, dimension = result.select(dimension, part), dimension - 1
            elif isinstance(part, slice):
                result = aten.slice.Tensor(result, dimension, part.start, part.stop, part.step or 1)
            else:
                tensors += [None] * (dimension - len(tensors)) + [part]
            dimension += 1
        return aten.index.Tensor(result, tensors) if tensors else result

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {}, Counter())


class PretendDevice(TorchDispatchMode):
    """Runs the operations, with `reads`: how often the host waited for values, by operation."""

    def __init__(self):
        super().__init__()
        self.reads = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {}, self.reads)


def run(function, args: tuple, kwargs: dict, reads: Counter):
    flat = tree_flatten((args, kwargs))[0]
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    on_device = any(isinstance(tensor, PretendTensor) for tensor in tensors)
    device = kwargs.get("device")
    if device is not None:
        target = torch.device(device).type
        kwargs = kwargs | {"device": "cpu"}
    else:
        target = "cuda" if on_device else "cpu"
    is_copy = function in (aten._to_copy.default, aten.copy_.default)
    if on_device and not is_copy:
        check_devices(function, tensors)
    if on_device and must_read(function, args, kwargs, target):
        reads[function.__name__] += 1
    host_args, host_kwargs = tree_map(
        lambda leaf: leaf.host if isinstance(leaf, PretendTensor) else leaf, (args, kwargs)
    )
    if is_copy and device is not None:
        # A CPU returns the tensor itself where only the device changes; a GPU has another memory.
        out = function(*host_args, **host_kwargs).clone()
    else:
        out = function(*host_args, **host_kwargs)
    if target != "cuda":
        return out
    out = tree_map(lambda leaf: PretendTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)
    return return_and_correct_aliasing(function, args, kwargs, out) if on_device else out


def host_of(leaf):
    return leaf.host if isinstance(leaf, PretendTensor) else leaf


def check_devices(function, tensors: list[torch.Tensor]) -> None:
    """As on a GPU, where tensors of the host are allowed as single numbers and as host arguments of our own kernels."""
    if (
        any(not isinstance(tensor, PretendTensor) and tensor.ndim for tensor in tensors)
        and function.namespace == "aten"
    ):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, found cuda and cpu")


def must_read(function, args: tuple, kwargs: dict, target: str) -> bool:
    if function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if function is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return function in READS or function is aten._to_copy.default and target == "cpu"


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
    """Stand-in for the kernel: (tokens, heads, dim_head), one document after the other."""
    assert cu_seq_q.device.type == "cuda" and cu_seq_q.dtype == torch.int32
    lengths = cu_seq_q.host.diff().tolist()
    assert max_q == max_k >= max(lengths)
    documents = zip(*(states.transpose(0, 1).split(lengths, dim=1) for states in (query, key, value)))
    return torch.cat([torch.nn.functional.scaled_dot_product_attention(*states) for states in documents], 1).transpose(
        0, 1
    )


@contextmanager
def pretend_cuda(monkeypatch) -> Iterator[PretendDevice]:
    """A GPU of the Hopper generation while it lasts, with a stand-in for torch's FlashAttention."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    with PretendDevice() as device:
        yield device


def on_device(kwargs: dict) -> dict:
    return {name: value.to("cuda:0") if torch.is_tensor(value) else value for name, value in kwargs.items()}


def model_on_device(model: torch.nn.Module) -> torch.nn.Module:
    """`model.to("cuda")`, which would keep the type of the parameters."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(
                    PretendTensor(parameter.detach()), parameter.requires_grad
                )
    return model

"""`neobert-hf compile`: compile an encoder to machine code, for one text at a time on this machine's CPU.

    neobert-hf compile runs/embeddings/model compiled --precision int8

takes a minute or two, needs a C++ compiler (`apt install g++`), and writes `encoder.pt2` and `compiled.json`, which
records what it was compiled from. `use_compiled` lets a model use it for single texts:

```python
>>> encoder = SentenceTransformer("runs/embeddings/model", device="cpu")
>>> use_compiled(encoder, "compiled")
>>> encoder.encode("one query")
```

The file is made by AOTInductor. It holds the weights in the layout that oneDNN multiplies with, and the steps between
the products as compiled C++, so that nothing runs in Python. The compiled encoder does not handle padding, which a
single text does not have; batches run as before.
"""

import copy
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from neobert_hf.checkpoints.model_folder import ModelFolder, local_folder, new_folder, read_json
from neobert_hf.common.atomic_writes import write_json
from neobert_hf.common.fingerprints import add_weights
from neobert_hf.common.locks import folder_lock
from neobert_hf.common.settings import LocalPath, PathOrId, parse_config
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.cpu_neobert import ZERO_POINT, Written, are_still, is_followed, largest_int8_weight, scales_of
from neobert_hf.modeling_neobert import NeoBERTModel


logger = logging.get_logger(__name__)

FILE, DESCRIPTION = "encoder.pt2", "compiled.json"
# Limits against PyTorch in float32: the largest difference, relative to the largest hidden state, for float32, and the
# least cosine for the other precisions.
LARGEST_DIFFERENCE, LEAST_COSINE = 1e-5, 0.99
# Lengths, in tokens, of the texts with which a file is checked. Weights are packed for the first length, which is also
# checked by each `use_compiled`.
LENGTHS = (8, 2, 33, 128)
# In int8, rows of at least this many tokens without padding are computed one after the other, which is faster than the
# batch in PyTorch. In float32 it is not faster.
LONG_ROW = 128
# A model may be loaded in any of these, for the calls that are not compiled.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Arguments that the compiled encoder ignores, since they do not affect the hidden states of one text.
INDIFFERENT = {"return_dict", "require_tokens", "one_document", "use_cache"}


@dataclass
class CompileSettings:
    """What is compiled, and where to. For a model with a head, or of Sentence Transformers, the encoder is compiled."""

    path: PathOrId = field(metadata={"help": "checkpoint: a local folder or a Hub id"})
    output_dir: LocalPath = field(metadata={"help": "folder to write; must not exist yet"})
    precision: Literal["float32", "bfloat16", "int8"] = field(
        default="float32", metadata={"help": "of the matrix products; int8 has a scale per token and per weight row"}
    )
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit on the Hub"})


class Int8Linear(nn.Module):
    """`cpu_neobert.Int8Weight` as a layer that can be part of a graph: it is packed when the graph is compiled."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        weight = layer.weight.detach()
        scales = scales_of(weight, largest_int8_weight())
        self.register_buffer("weight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales.flatten())
        self.register_buffer("zero_points", torch.zeros(len(weight), dtype=torch.int32))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, -2)
        scales = rows.abs().amax(-1, keepdim=True).div(127).clamp(min=torch.finfo(torch.float32).tiny)
        rounded = (rows / scales + (ZERO_POINT + 0.5)).to(torch.uint8)
        weight = (torch.ops.onednn.qlinear_prepack(self.weight, None), self.scales, self.zero_points)
        product = torch.ops.onednn.qlinear_pointwise.default(
            rounded, 1.0, ZERO_POINT, *weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return (product * scales).unflatten(0, hidden_states.shape[:-1])


class OneText(nn.Module):
    """Ids (1, length) to the last hidden state (1, length, width)."""

    def __init__(self, encoder: NeoBERTModel):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(input_ids).last_hidden_state


def main(args: list[str] | None = None) -> None:
    """The command `neobert-hf compile`."""
    (settings,) = parse_config(CompileSettings, args=args, positional=("path", "output_dir"), prog="neobert-hf compile")
    with folder_lock(Path(settings.output_dir)):
        print(compile_encoder(settings), flush=True)


def compile_encoder(settings: CompileSettings) -> str:
    """Write a compiled encoder, whole or not at all.

    Returns:
        One line that says what was checked.

    Raises:
        ValueError: if the checkpoint cannot be compiled as requested, before work starts; or if the file does not
            compute the same as PyTorch.
        OSError: if there is no C++ compiler.
        RuntimeError: if the CPU computes int8 products wrongly.
    """
    # 1. Checks, and the encoder
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already. Delete it, or name another folder.")
    encoder = load_encoder(ModelFolder(local_folder(settings.path, settings.revision)), settings.precision)

    # 2. The expected outputs
    config = encoder.config
    texts = [example_ids(length, config.vocab_size) for length in LENGTHS if length <= config.max_length]
    weights = {str(dtype): weights_checksum(encoder, dtype) for dtype in DTYPES}
    with torch.no_grad():
        expected = [encoder(ids).last_hidden_state for ids in texts]

    # 3. The compiled file, checked
    with new_folder(output) as partial:
        write_package(encoder, settings.precision, texts[0], partial / FILE)
        run = torch._inductor.aoti_load_package(str(partial / FILE))
        found = torch.cat([run(ids) for ids in texts], dim=1)
        said = compare(found, torch.cat(expected, dim=1), settings.precision)

        # 4. A record of what it was compiled from
        content = {"precision": settings.precision, "max_length": config.max_length}
        content |= {"weights": weights, "states": expected[0].flatten().tolist()}
        write_json(partial / DESCRIPTION, content | asdict(Machine.here()))
    return f"{output} is complete: {said} from PyTorch in float32, on texts of up to {LENGTHS[-1]} tokens."


def weights_checksum(encoder: NeoBERTModel, dtype: torch.dtype) -> str:
    """A checksum of all weights as if loaded in `dtype`: xxHash, which processes some gigabytes per second."""
    digest = xxhash.xxh3_64()
    add_weights(digest, encoder, dtype)
    return digest.hexdigest()


def load_encoder(folder: ModelFolder, precision: str) -> NeoBERTModel:
    """The encoder of a checkpoint, in float32.

    Raises:
        ValueError: if it cannot be compiled.
    """
    if folder.is_contextual:
        raise ValueError("A contextual model takes a context in addition to every text, and cannot be compiled.")
    folder.check_rope()
    if precision == "int8":
        largest_int8_weight()
    if precision == "bfloat16" and not multiplies_bfloat16():
        raise ValueError("`precision` is bfloat16, which this CPU can only emulate slowly: use float32 or int8.")
    return folder.load_model(NeoBERTModel, dtype=torch.float32, attn_implementation="sdpa").eval()


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16. Others emulate it step by step, several times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def write_package(encoder: NeoBERTModel, precision: str, ids: torch.Tensor, file: Path) -> None:
    """Compile the encoder; this changes its blocks to the precision."""
    if precision == "bfloat16":
        encoder.to(torch.bfloat16)
    if precision == "int8":
        register_shape_of_packed_weights()
        for block in encoder.transformer_encoder:
            for name, layer in list(block.named_modules()):
                if type(layer) is nn.Linear:
                    block.set_submodule(name, Int8Linear(layer))
    length = torch.export.Dim("length", min=2, max=encoder.config.max_length)
    with torch.no_grad():
        program = torch.export.export(OneText(encoder), (ids,), dynamic_shapes={"input_ids": {1: length}})
        # Weights are constants then, and are packed once, when the file is made.
        options = {"freezing": True}
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
        except InvalidCxxCompiler as error:
            raise OSError("There is no C++ compiler, which is needed to compile a model: apt install g++.") from error


def register_shape_of_packed_weights() -> None:
    """Tell `torch.export` the shape of packed weights, which torch 2.13 does not know."""
    try:
        torch.library.register_fake("onednn::qlinear_prepack")(lambda weight, shape: torch.empty_like(weight.t()))
    except RuntimeError as error:
        # An earlier call, or this version of torch, has registered it already.
        if "already" not in str(error):
            raise


def example_ids(length: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(length))


def compare(found: torch.Tensor, expected: torch.Tensor, precision: str) -> str:
    """The measured deviation, in words; ValueError if it is too large."""
    found, expected = found.float(), expected.float()
    if precision == "float32":
        difference = ((found - expected).abs().max() / expected.abs().max()).item()
        # Written so that NaN fails as well.
        near, said = difference <= LARGEST_DIFFERENCE, f"largest difference {difference:.1e} of the largest state"
    else:
        cosine = F.cosine_similarity(found, expected, dim=-1).min().item()
        near, said = cosine >= LEAST_COSINE, f"cosine {cosine:.4f} or more"
    if not near:
        raise ValueError(f"The compiled encoder does not compute the same as PyTorch in float32: {said}.")
    return said


@dataclass
class Machine:
    """The properties of a machine that compiled code depends on."""

    torch: str
    cpu: list[str]
    """The feature flags that Linux reports for the CPU; on other systems its name."""

    @classmethod
    def here(cls) -> "Machine":
        file = Path("/proc/cpuinfo")
        lines = file.read_text().splitlines() if file.exists() else []
        flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
        return cls(torch.__version__, sorted(flags[0]) if flags else [platform.machine(), platform.processor()])

    def check(self, folder: Path) -> None:
        """Raises:
        ValueError: if code that was compiled on that machine may not run on this one.
        """
        here = Machine.here()
        again = "Compile the model again on this machine."
        if self.torch != here.torch:
            raise ValueError(f"{folder} was compiled with torch {self.torch}, but this is torch {here.torch}. {again}")
        if lacking := sorted(set(self.cpu) - set(here.cpu)):
            raise ValueError(f"{folder} was compiled for a CPU with {', '.join(lacking)}, unlike this one. {again}")


def use_compiled(model: nn.Module, folder: str | Path) -> nn.Module:
    """Let a model's encoder use compiled code for single texts, on a CPU and without gradients.

    In int8 it is also used for rows of 128 tokens and more without padding. All other calls run as before: other
    batches, and calls with hidden states, gradients, or hooks or replaced modules inside the encoder. If weights change
    or are replaced, the compiled code is no longer used, and a warning is logged. Writes to `.data` that change only a
    few numbers may go unnoticed.

    Args:
        model: a NeoBERT with or without a head, or a Sentence Transformers model, in eval mode.
        folder: the folder that `neobert-hf compile` wrote for the model's weights.

    Returns:
        The model, so that calls can be chained. It can be saved, but neither copied nor pickled.

    Raises:
        ValueError: if the file is of other weights, of another version of torch or for another CPU.
    """
    folder = Path(folder)
    encoders = [module for module in model.modules() if isinstance(module, NeoBERTModel)]
    if len(encoders) != 1:
        raise ValueError(f"The model has {len(encoders)} encoders of the class NeoBERTModel; it must have one.")
    content = read_json(folder / DESCRIPTION)
    Machine(content["torch"], content["cpu"]).check(folder)
    (encoder,) = encoders
    if isinstance(earlier := vars(encoder).get("forward"), CompiledForward):
        earlier.give_up()
    dtype = encoder.encoder.weight.dtype
    if content.get("weights", {}).get(str(dtype)) != weights_checksum(encoder, dtype):
        raise ValueError(f"{folder} was compiled from other weights than this model's: compile this model.")
    compiled = CompiledForward(encoder, folder, content["max_length"], content["precision"] == "int8")
    ids = example_ids(LENGTHS[0], encoder.config.vocab_size)
    expected = torch.tensor(content["states"]).view(1, LENGTHS[0], -1)
    # With gradients enabled, so that the weights themselves are used, and not those packed by `prepare_for_inference`.
    with torch.enable_grad():
        own = encoder(ids).last_hidden_state.detach()
    try:
        compare(own, expected, "float32" if own.dtype == torch.float32 else str(own.dtype))
    except ValueError as error:
        raise ValueError(f"{folder} was compiled from a model with another config: compile this model.") from error
    compare(compiled.run(ids), expected, content["precision"])
    encoder.forward = compiled
    return model


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks. Those that Transformers left from collecting hidden states do not count."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not hook.__module__.startswith("transformers.") for hook in hooks)


def settings_of(config: NeoBERTConfig) -> tuple:
    """The settings that a user may change in a loaded model's config, and that affect its hidden states."""
    return config._attn_implementation, config.rope_parameters


def _are_there(places: list[tuple[dict, str, Any]]) -> bool:
    return all(holder.get(name) is value for holder, name, value in places)


class CompiledForward:
    """`forward` of an encoder that runs compiled code for the calls that allow it."""

    def __init__(self, encoder: NeoBERTModel, folder: Path, max_length: int, one_by_one: bool):
        self.encoder, self.max_length, self.one_by_one = encoder, max_length, one_by_one
        self.plain: Callable = encoder.forward
        self.run = torch._inductor.aoti_load_package(str(folder / FILE))
        self.weights = list(encoder.parameters())
        # Only the first and last number of each weight are compared: more would take a tenth of the time of a short
        # text. Code that writes to `.data`, such as merging adapters, writes to the whole weight.
        self.written = [Written.of(weight, count=1) for weight in self.weights]
        self.before = vars(encoder).get("forward")
        # The parts that the code was compiled from, each as (a dictionary of a module, a name, the value). Flat lists,
        # since every call checks all of them: this takes 0.2 ms with 28 layers, and one object per module took 0.8 ms.
        modules = list(encoder.modules())
        self.inner = modules[1:]
        self.parameters = [(one._parameters, *item) for one in modules for item in one._parameters.items()]
        self.parts = [(one._modules, *item) for one in modules for item in one._modules.items()]
        self.parts += [(vars(one), "eps", one.eps) for one in modules if hasattr(one, "eps")]
        self.settings = copy.deepcopy(settings_of(encoder.config))
        self.sizes = [(one._modules, len(one._modules)) for one in modules if one._modules]

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutput | tuple:
        given = (input_ids, attention_mask, token_type_ids)
        if position_ids is inputs_embeds is None and self._are_whole_rows(*given) and self._is_plain(kwargs):
            if _are_there(self.parameters) and all(are_still(self.written, self.weights)):
                try:
                    states = torch.cat([self.run(row) for row in input_ids.split(1)])
                except RuntimeError:
                    # For ids outside the vocabulary, for example, the model's own error message is clearer.
                    return self.plain(input_ids, attention_mask, token_type_ids=token_type_ids, **kwargs)
                return BaseModelOutput(last_hidden_state=states.to(self.weights[0].dtype))
            logger.warning("Weights have changed since `use_compiled`: the model runs without compiled code.")
            self.give_up()
        return self.plain(input_ids, attention_mask, position_ids, token_type_ids, inputs_embeds, **kwargs)

    def give_up(self) -> None:
        """Restore the encoder's original `forward`."""
        if self.before is None:
            # Another thread may have removed it already.
            vars(self.encoder).pop("forward", None)
        else:
            self.encoder.forward = self.before

    def _are_whole_rows(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None, token_types: torch.Tensor | None
    ) -> bool:
        """Whether it is one text without padding, on a CPU, of a length that was compiled; in int8, also long rows."""
        return (
            ids is not None
            and ids.dim() == 2
            and (len(ids) == 1 or (self.one_by_one and len(ids) and ids.shape[1] >= LONG_ROW))
            and 2 <= ids.shape[1] <= self.max_length
            and ids.dtype == torch.int64
            and ids.device.type == self.weights[0].device.type == "cpu"
            and (mask is None or (mask.shape == ids.shape and bool((mask == 1).all())))
            and (token_types is None or not token_types.any())
        )

    def _is_plain(self, kwargs: dict) -> bool:
        """Whether only the last hidden states are requested, and nothing observes intermediate results."""
        config = self.encoder.config
        return (
            not is_followed()
            and not self.encoder.training
            and kwargs.get("return_dict") is not False
            and all(value is None or value is False for name, value in kwargs.items() if name not in INDIFFERENT)
            and config.return_dict
            and not (config.output_hidden_states or config.output_attentions)
            and settings_of(config) == self.settings
            and not any(is_hooked(module) or "forward" in vars(module) for module in self.inner)
            and _are_there(self.parts)
            and all(len(children) == size for children, size in self.sizes)
        )

    def __reduce__(self):
        raise TypeError("A model that uses compiled code cannot be copied or pickled: do this before `use_compiled`.")

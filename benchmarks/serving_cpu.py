"""One query and full batches on a CPU, in PyTorch, ONNX Runtime and OpenVINO.

    pip install openvino nncf
    python benchmarks/serving_cpu.py            # ten minutes on 2 quiet CPU cores

All engines run the published architecture with the same random weights and the same number of threads, in one process.
They take turns, and medians are compared. OpenVINO is left out if it and NNCF are not installed, and bfloat16 if the
CPU does not multiply it.

OpenVINO's static int8 is what Sentence Transformers' `export_static_quantized_openvino_model` makes. That function
needs optimum-intel, of which no release works with this Transformers. So NNCF is called here, with the same settings
but for SmoothQuant: it is for activations with outliers, which random weights have not, and was slower and less exact.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import torch
from matplotlib.figure import Figure
from runner import BLUE, GREEN, GREY, ORANGE, ROOT, Settings, medians, new_figure, run_benchmark, table
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.hub import export


Batch = tuple[torch.Tensor, torch.Tensor]
Engine = Callable[[torch.Tensor, torch.Tensor], np.ndarray]
LAYERS, WIDTH = 28, 768
SHORTEST, RAGGED, BY_LENGTH = "1 text of 8 tokens", "32 texts of 4 to 128 tokens", "the same, by length in batches of 4"
# Rows, tokens, and the number of rounds whose median is taken.
SHAPES = {
    SHORTEST: (1, 8, 15),
    "1 text of 32 tokens": (1, 32, 15),
    "1 text of 128 tokens": (1, 128, 9),
    "8 texts of 128 tokens": (8, 128, 3),
    RAGGED: (32, 128, 3),
    BY_LENGTH: (32, 128, 3),
}
# Texts of a batch where they are sorted by their length, so that an engine that computes padding has little of it.
SORTED_ROWS = 4
# About the mean length of the rows of the ragged batch, of which none has more than 128 tokens.
MEAN_LENGTH = 45
# Pause between turns. After its work, an engine's threads spin for a while, waiting for more, and keep a core from the
# next engine. Without a pause, int8 in PyTorch, which follows ONNX Runtime, takes 60 ms instead of 28 for one query of
# 8 tokens.
PAUSE_SECONDS = 0.1
# Limits for each token's hidden state, compared with PyTorch in float32: the largest difference for other float32
# engines, and the least cosine for other precisions.
EXACT, LEAST_COSINE = 1e-3, 0.99
# Batches from which NNCF learns the ranges of activations. With random weights and ids a few are enough.
CALIBRATION = 8
# Ours and its rivals in each precision.
ENGINES = {
    "float32": ("PyTorch, prepared", ("ONNX Runtime", "OpenVINO")),
    "bfloat16": ("PyTorch, bfloat16, prepared", ("OpenVINO, bfloat16",)),
    "int8": ("PyTorch, int8", ("ONNX Runtime, int8", "OpenVINO, static int8")),
}
COLOURS = {"float32": BLUE, "bfloat16": GREEN, "int8": ORANGE}


def make_model(folder: Path) -> None:
    """Make the model, with some tokenizer, and its ONNX files in float32 and int8."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "benchmarks" / "models" / "small")
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": len(tokenizer)}
    sizes |= {"num_attention_heads": WIDTH // 64, "intermediate_size": 4 * WIDTH}
    NeoBERTModel(NeoBERTConfig(**sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    files = {"model": str(folder / "model"), "output_dir": str(folder / "exported")}
    export(**files, task="feature-extraction", precisions=["float32", "int8"])


def of_torch(folder: Path, dtype: torch.dtype, **prepared: bool) -> Engine:
    model = NeoBERTModel.from_pretrained(folder / "model", dtype=dtype).eval()
    if prepared:
        model.prepare_for_inference(**prepared)

    def run(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        with torch.inference_mode():
            return model(ids, attention_mask=mask).last_hidden_state.float().numpy()

    return run


def of_onnx_runtime(folder: Path, file: str) -> Engine:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    path = folder / "exported" / "onnx" / file
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]


def of_openvino(folder: Path, precision: str, int8: bool = False) -> Engine:
    import openvino

    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": precision}
    options |= {"PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().read_model(folder / "exported" / "onnx" / "model.onnx")
    compiled = openvino.Core().compile_model(quantize(model) if int8 else model, "CPU", options)
    return lambda ids, mask: compiled({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]


def quantize(model: Any) -> Any:
    """An OpenVINO model in static int8: also the activations' ranges are fixed, learned from a few batches.

    The batches have padding. Without it NNCF learns that nothing is ever masked, and padding is attended to.
    """
    import nncf

    parameters = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.DISABLE)
    parameters.smooth_quant_alphas.matmul = -1
    batches = [make_batch(4, 128, ragged=True, seed=1 + number) for number in range(CALIBRATION)]
    inputs = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()} for ids, mask in batches]
    return nncf.quantize(
        model,
        nncf.Dataset(inputs),
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=CALIBRATION,
        model_type=nncf.ModelType.TRANSFORMER,
        advanced_parameters=parameters,
    )


def load_engines(folder: Path) -> dict[str, Engine]:
    """The engines by name: functions that take ids and mask, and return the last hidden states."""
    # Other CPUs emulate bfloat16 step by step, several times slower than float32.
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    rival = has_openvino()
    engines = {
        "PyTorch": of_torch(folder, torch.float32),
        "PyTorch, prepared": of_torch(folder, torch.float32, int8=False),
        "ONNX Runtime": of_onnx_runtime(folder, "model.onnx"),
    }
    if rival:
        engines["OpenVINO"] = of_openvino(folder, "f32")
    if bfloat16:
        engines["PyTorch, bfloat16, prepared"] = of_torch(folder, torch.bfloat16, int8=False)
        if rival:
            engines["OpenVINO, bfloat16"] = of_openvino(folder, "bf16")
    engines["PyTorch, int8"] = of_torch(folder, torch.float32, int8=True)
    engines["ONNX Runtime, int8"] = of_onnx_runtime(folder, "model_quantized.onnx")
    if rival:
        engines["OpenVINO, static int8"] = of_openvino(folder, "bf16" if bfloat16 else "f32", int8=True)
    return engines


def has_openvino() -> bool:
    return all(find_spec(package) for package in ("openvino", "nncf"))


def make_batch(rows: int, length: int, ragged: bool, seed: int = 0) -> Batch:
    """Random ids and their mask. A ragged batch has one row of full length, and others of 4 tokens or more."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.randint(5, 1000, (rows, length), generator=generator), torch.ones(rows, length, dtype=torch.long)
    if ragged:
        lengths = torch.randint(4, 2 * MEAN_LENGTH - 4, (rows,), generator=generator)
        lengths[0] = length
        mask = (torch.arange(length) < lengths[:, None]).long()
    return ids, mask


def by_length(batch: Batch) -> list[Batch]:
    """Batches of `SORTED_ROWS` rows of similar lengths, none with more columns than its longest row has tokens."""
    ids, mask = batch
    order = mask.sum(1).argsort(descending=True)
    groups = [(ids[rows], mask[rows]) for rows in order.split(SORTED_ROWS)]
    return [(ids[:, : mask.sum(1).max()], mask[:, : mask.sum(1).max()]) for ids, mask in groups]


def run_all(run: Engine, batches: list[Batch]) -> None:
    for ids, mask in batches:
        run(ids, mask)


def check(engines: dict[str, Engine]) -> None:
    """Raise if an engine's outputs for the real tokens of a ragged batch differ from those of PyTorch."""
    ids, mask = make_batch(4, 128, ragged=True)
    found = {name: run(ids, mask)[mask.bool().numpy()] for name, run in engines.items()}
    expected = found["PyTorch"]
    for name, states in found.items():
        norms = np.linalg.norm(states, axis=1) * np.linalg.norm(expected, axis=1)
        difference, cosine = np.abs(states - expected).max(), ((states * expected).sum(1) / norms).min()
        rounded = "int8" in name or "bfloat16" in name
        if (cosine < LEAST_COSINE) if rounded else (difference > EXACT):
            raise ValueError(f"{name} computes something else: difference {difference:.2g}, cosine {cosine:.5f}.")


def measure(settings: Settings) -> dict[str, dict[str, float]]:
    """Median milliseconds by shape and engine."""
    with TemporaryDirectory() as folder:
        make_model(Path(folder))
        engines, found = load_engines(Path(folder)), {}
        check(engines)
        for shape, (rows, length, rounds) in SHAPES.items():
            batch = make_batch(rows, length, shape in (RAGGED, BY_LENGTH))
            batches = by_length(batch) if shape == BY_LENGTH else [batch]
            turns = {name: partial(run_all, run, batches) for name, run in engines.items()}
            found[shape] = {name: 1000 * value for name, value in medians(turns, rounds, PAUSE_SECONDS).items()}
            print(shape, {name: round(value, 1) for name, value in found[shape].items()}, flush=True)
    return {"milliseconds": found}


def ratio(found: dict, shape: str, precision: str) -> float | None:
    """How many times as fast as the fastest rival ours is; None if one of them was not measured."""
    (ours, rivals), times = ENGINES[precision], found["milliseconds"][shape]
    of_rivals = [times[name] for name in rivals if name in times]
    return min(of_rivals) / times[ours] if of_rivals and ours in times else None


def span(found: dict, shape: str) -> str:
    """The least and the greatest ratio over the precisions."""
    ratios = [value for precision in ENGINES if (value := ratio(found, shape, precision)) is not None]
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(ratios), max(ratios))))


def verdict(found: dict) -> str:
    names = {RAGGED: "mixed lengths", BY_LENGTH: "sorted", SHORTEST: "one short text"}
    return ", ".join(f"{name} {span(found, shape)}" for shape, name in names.items() if shape in found["milliseconds"])


def plot(found: dict) -> Figure:
    """How many times as fast as the faster rival ours is, a row each shape and a colour each precision."""
    shapes = list(reversed(found["milliseconds"]))
    unit = "Speed of PyTorch on 2 CPU cores, in multiples of the faster of ONNX Runtime and OpenVINO"
    title = verdict(found)
    figure, axes = new_figure(title[0].upper() + title[1:], unit, size=(7.6, 0.66 * len(shapes) + 1.2))
    for place, shape in enumerate(shapes):
        for level, (precision, color) in zip((0.24, 0, -0.24), COLOURS.items()):
            if (times := ratio(found, shape, precision)) is None:
                continue
            axes.plot([1, times], [place + level] * 2, color=color, linewidth=1.4, zorder=2)
            axes.scatter([times], [place + level], s=30, color=color, zorder=3)
            label = f"{times:.2f}" if shape != shapes[-1] else f"{precision} {times:.2f}"
            side = ("left", 7) if times >= 1 else ("right", -7)
            axes.annotate(label, (times, place + level), (side[1], 0), textcoords="offset points", ha=side[0],
                          va="center", color=color, fontsize=9)  # fmt: skip
    axes.axvline(1, color=GREY, linewidth=1, zorder=1)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([])
    axes.set_yticks(range(len(shapes)), shapes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.5, len(shapes) - 0.1)
    drawn = [value for shape in shapes for precision in ENGINES if (value := ratio(found, shape, precision))]
    axes.set_xlim(0.75 * min(0.5, *drawn), 1.25 * max(3.7, *drawn))
    axes.text(0.96, len(shapes) - 0.4, "the others are faster", ha="right", color=GREY, fontsize=9)
    axes.text(1.04, len(shapes) - 0.4, "NeoBERT in PyTorch is faster", ha="left", color=GREY, fontsize=9)
    return figure


def page(found: dict) -> list[str]:
    times = found["milliseconds"]
    rows = [
        [name, *(f"{column[name]:,.{int(column[name] < 100)}f}" for column in times.values())]
        for name in next(iter(times.values()))
    ]
    ratios = [
        [precision, *("" if (value := ratio(found, shape, precision)) is None else f"{value:.2f}" for shape in times)]
        for precision in ENGINES
    ]
    sorted_too = "PyTorch computes no padding; the others have little of it if similar lengths share a batch. "
    static = "Static int8 is made by NNCF, as in Sentence Transformers' `export_static_quantized_openvino_model`. "
    return [
        f"# On a CPU, the speed of PyTorch over that of the fastest other engine: {verdict(found)}",
        "![Speed in PyTorch over that of ONNX Runtime and OpenVINO](serving_cpu.png)",
        f"A forward pass of {LAYERS} layers of width {WIDTH} with random weights, the same in "
        f"all engines. The engines take turns in one process, with {PAUSE_SECONDS:g} seconds in between; a time is the "
        "median. `prepared` is `model.prepare_for_inference()`, and int8 in PyTorch is "
        f"`prepare_for_inference(int8=True)`. The 32 texts have {MEAN_LENGTH} tokens on average, and one has 128. "
        + (sorted_too if BY_LENGTH in times else "")
        + (static if "OpenVINO, static int8" in times[SHORTEST] else "")
        + f"Every engine was first compared with PyTorch: float32 must agree to {EXACT:g}, others to a cosine of "
        f"{LEAST_COSINE} in every token.",
        table(["milliseconds", *times], rows),
        "The same as speed: how many times as fast PyTorch, prepared, is as the fastest of the others.",
        table(["", *times], ratios),
    ]


def main(args: list[str] | None = None) -> None:
    packages = ["onnxruntime", *(["openvino", "nncf"] if has_openvino() else [])]
    run_benchmark("serving_cpu", measure, page, plot, packages, args=args)


if __name__ == "__main__":
    main()

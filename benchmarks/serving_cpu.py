"""One query and full batches on a CPU, in PyTorch, ONNX Runtime and OpenVINO.

    pip install openvino
    python benchmarks/serving_cpu.py            # seven minutes on 2 quiet CPU cores

All engines run the published architecture with the same random weights and the same number of threads, in one process.
They take turns, and medians are compared. OpenVINO is left out if it is not installed, and bfloat16 if the CPU does not
multiply it.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch
from matplotlib.figure import Figure
from runner import BLUE, GREEN, GREY, ORANGE, ROOT, Settings, medians, new_figure, run_benchmark, table
from transformers import AutoTokenizer

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.hub import export


Engine = Callable[[torch.Tensor, torch.Tensor], np.ndarray]
LAYERS, WIDTH = 28, 768
RAGGED = "32 texts of 4 to 128 tokens"
# Rows, tokens, and the number of rounds whose median is taken.
SHAPES = {
    "1 text of 8 tokens": (1, 8, 15),
    "1 text of 32 tokens": (1, 32, 15),
    "1 text of 128 tokens": (1, 128, 9),
    "8 texts of 128 tokens": (8, 128, 3),
    RAGGED: (32, 128, 3),
}
# About the mean length of the rows of the ragged batch, of which none has more than 128 tokens.
MEAN_LENGTH = 45
# Pause between turns. After its work, an engine's threads spin for a while, waiting for more, and keep a core from the
# next engine. Without a pause, int8 in PyTorch, which follows ONNX Runtime, takes 60 ms instead of 28 for one query of
# 8 tokens.
PAUSE_SECONDS = 0.1
# Limits for each token's hidden state, compared with PyTorch in float32: the largest difference for other float32
# engines, and the least cosine for other precisions.
EXACT, LEAST_COSINE = 1e-3, 0.99
# Ours and its rivals in each precision. OpenVINO is faster in float32 than with the exported int8 file.
ENGINES = {
    "float32": ("PyTorch, prepared", ("ONNX Runtime", "OpenVINO")),
    "bfloat16": ("PyTorch, bfloat16, prepared", ("OpenVINO, bfloat16",)),
    "int8": ("PyTorch, int8", ("ONNX Runtime, int8",)),
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


def of_openvino(folder: Path, precision: str) -> Engine:
    import openvino

    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": precision}
    options |= {"PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(folder / "exported" / "onnx" / "model.onnx", "CPU", options)
    return lambda ids, mask: model({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]


def load_engines(folder: Path) -> dict[str, Engine]:
    """The engines by name: functions that take ids and mask, and return the last hidden states."""
    # Other CPUs emulate bfloat16 step by step, several times slower than float32.
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    engines = {
        "PyTorch": of_torch(folder, torch.float32),
        "PyTorch, prepared": of_torch(folder, torch.float32, int8=False),
        "ONNX Runtime": of_onnx_runtime(folder, "model.onnx"),
    }
    if find_spec("openvino"):
        engines["OpenVINO"] = of_openvino(folder, "f32")
    if bfloat16:
        engines["PyTorch, bfloat16, prepared"] = of_torch(folder, torch.bfloat16, int8=False)
        if find_spec("openvino"):
            engines["OpenVINO, bfloat16"] = of_openvino(folder, "bf16")
    engines["PyTorch, int8"] = of_torch(folder, torch.float32, int8=True)
    engines["ONNX Runtime, int8"] = of_onnx_runtime(folder, "model_quantized.onnx")
    return engines


def make_batch(rows: int, length: int, ragged: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and their mask. A ragged batch has one row of full length, and others of 4 tokens or more."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(5, 1000, (rows, length), generator=generator), torch.ones(rows, length, dtype=torch.long)
    if ragged:
        lengths = torch.randint(4, 2 * MEAN_LENGTH - 4, (rows,), generator=generator)
        lengths[0] = length
        mask = (torch.arange(length) < lengths[:, None]).long()
    return ids, mask


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
            ids, mask = make_batch(rows, length, shape == RAGGED)
            turns = {name: partial(run, ids, mask) for name, run in engines.items()}
            found[shape] = {name: 1000 * value for name, value in medians(turns, rounds, PAUSE_SECONDS).items()}
            print(shape, {name: round(value, 1) for name, value in found[shape].items()}, flush=True)
    return {"milliseconds": found}


def plot(found: dict) -> Figure:
    """How many times as fast as the faster rival ours is, a row each shape and a colour each precision."""
    shapes = list(reversed(found["milliseconds"]))
    title = "Three times as fast on texts of mixed lengths, slower on one short text"
    unit = "Speed on 2 CPU cores, in multiples of the faster of ONNX Runtime and OpenVINO"
    figure, axes = new_figure(title, unit, size=(7.6, 0.66 * len(shapes) + 1.2))
    for place, shape in enumerate(shapes):
        times = found["milliseconds"][shape]
        for level, (precision, (ours, rivals)) in zip((0.24, 0, -0.24), ENGINES.items()):
            of_rivals = [times[name] for name in rivals if name in times]
            if ours not in times or not of_rivals:
                continue
            ratio, color = min(of_rivals) / times[ours], COLOURS[precision]
            axes.plot([1, ratio], [place + level] * 2, color=color, linewidth=1.4, zorder=2)
            axes.scatter([ratio], [place + level], s=30, color=color, zorder=3)
            label = f"{ratio:.2f}" if shape != shapes[-1] else f"{precision} {ratio:.2f}"
            side = ("left", 7) if ratio >= 1 else ("right", -7)
            axes.annotate(label, (ratio, place + level), (side[1], 0), textcoords="offset points", ha=side[0],
                          va="center", color=color, fontsize=9)  # fmt: skip
    axes.axvline(1, color=GREY, linewidth=1, zorder=1)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([])
    axes.set_yticks(range(len(shapes)), shapes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.5, len(shapes) - 0.1)
    axes.set_xlim(0.36, 4.6)
    axes.text(0.96, len(shapes) - 0.4, "the others are faster", ha="right", color=GREY, fontsize=9)
    axes.text(1.04, len(shapes) - 0.4, "NeoBERT in PyTorch is faster", ha="left", color=GREY, fontsize=9)
    return figure


def page(found: dict) -> list[str]:
    times = found["milliseconds"]
    rows = [
        [name, *(f"{column[name]:,.{int(column[name] < 100)}f}" for column in times.values())]
        for name in next(iter(times.values()))
    ]
    return [
        "# On a CPU, PyTorch is ahead for texts of mixed lengths, ONNX Runtime for one short query",
        "![Speed in PyTorch over that of ONNX Runtime and OpenVINO](serving_cpu.png)",
        f"A forward pass of {LAYERS} layers of width {WIDTH} with random weights, the same in "
        f"all engines. The engines take turns in one process, with {PAUSE_SECONDS:g} seconds in between; a time is the "
        "median. `prepared` is `model.prepare_for_inference()`, and int8 in PyTorch is "
        f"`prepare_for_inference(int8=True)`. The 32 texts have {MEAN_LENGTH} tokens on average, and one has 128. "
        f"Every engine was first compared with PyTorch: float32 must agree to {EXACT:g}, others to a cosine of "
        f"{LEAST_COSINE} in every token.",
        table(["milliseconds", *times], rows),
    ]


def main(args: list[str] | None = None) -> None:
    packages = ["onnxruntime", *(["openvino"] if find_spec("openvino") else [])]
    run_benchmark("serving_cpu", measure, page, plot, packages, args=args)


if __name__ == "__main__":
    main()

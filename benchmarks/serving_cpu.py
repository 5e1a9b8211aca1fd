"""One query and full batches on a CPU, in PyTorch, ONNX Runtime and OpenVINO. Writes results/serving_cpu.md.

    pip install openvino
    python benchmarks/serving_cpu.py            # a quarter of an hour on 2 CPU cores

All engines run the published architecture with the same random weights and the same number of threads, in one process.
They take turns, and medians are compared. With `--shapes` only the given shapes are measured, and the others keep their
results. OpenVINO is left out if it is not installed, and bfloat16 if the CPU does not multiply it. What each precision
costs in quality is read from the file that serving_quality.py writes, if it exists. Times of other machines stay on the
page. They are stored next to the results, in serving_cpu_*.json, which no run writes.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from circumstances import circumstances, processor
from forward import medians
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.transformers.optimizer import optimize_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from neobert_hf import NeoBERTConfig, NeoBERTModel
from neobert_hf.common.files import write_json, write_text
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.export import ExportSettings, export


RAGGED = "32 x 128, ragged"
# Rows and tokens, and the number of rounds whose median is taken.
SHAPES = {"1 x 8": 25, "1 x 32": 25, "1 x 128": 15, "8 x 128": 5, "4 x 512": 3, RAGGED: 3}
# About the mean length of the rows of the ragged batch, of which none has more than 128 tokens.
MEAN_LENGTH = 45
# Pause between turns. After its work, an engine's threads spin for a while, waiting for more, and keep a core from the
# next engine. Without a pause, int8 in PyTorch, which follows ONNX Runtime, takes 60 ms instead of 28 for one query of
# 8 tokens.
PAUSE_SECONDS = 0.1
# Files that only benchmarks make. Calibrated: the scales of activations are measured once, on example texts, while the
# exported int8 file computes new ones for each batch. Fused: ONNX Runtime's optimizer has joined each norm with the sum
# before it.
CALIBRATED, FUSED = "model_calibrated.onnx", "model_fused.onnx"
CALIBRATION_TEXTS, CALIBRATION_LENGTH = 30, 64
# Limits for each token's hidden state, compared with PyTorch in float32: the largest difference for other float32
# engines, and the least cosine for other precisions.
EXACT, LEAST_COSINE = 1e-3, 0.99

# Keys of the results. Each holds, by shape, the times of all engines, or when and where they were measured.
PARTS = TIMES, PLACES = "milliseconds", "measured"

# Scores of serving_quality.py.
QUALITY = {
    "test FOLDOC": "FOLDOC, nDCG@10",
    "test WordNet": "WordNet, nDCG@10",
    "similarity": "news, Spearman",
    "accuracy": "sections, accuracy",
}


@dataclass
class ServingArguments:
    output_dir: str = field(default="runs/serving_cpu", metadata={"help": "the model and its exported files"})
    results: str = field(default="benchmarks/results", metadata={"help": "where the report goes"})
    layers: int = field(default=28, metadata={"help": "of the model; fewer for a trial"})
    width: int = field(default=768, metadata={"help": "of the model; less for a trial"})
    shapes: list[str] = field(default_factory=lambda: list(SHAPES), metadata={"help": "what to measure"})


def make_model(settings: ServingArguments) -> Path:
    """Make the model with a tokenizer, and its ONNX files in float32 and int8. Returns the folder of both."""
    output = Path(settings.output_dir) / f"{settings.layers}_{settings.width}"
    if not (output / "exported").exists():
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": settings.layers, "hidden_size": settings.width, "vocab_size": 1000}
        heads = {"num_attention_heads": settings.width // 64, "intermediate_size": 4 * settings.width}
        NeoBERTModel(NeoBERTConfig(**sizes, **heads)).save_pretrained(output / "model")
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(995))]
        words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4096, **special).save_pretrained(
            output / "model"
        )
        files = {"path": str(output / "model"), "output_dir": str(output / "exported")}
        export(ExportSettings(**files, task="feature-extraction", precisions=["float32", "int8"]))
    files = output / "exported" / "onnx"
    if not (files / CALIBRATED).exists():
        generator = np.random.default_rng(0)
        texts = (generator.integers(5, 1000, (1, CALIBRATION_LENGTH)) for _ in range(CALIBRATION_TEXTS))
        calibrate(files, ({"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in texts))
    if not (files / FUSED).exists():
        sizes = {"num_heads": settings.width // 64, "hidden_size": settings.width}
        fused = optimize_model(str(files / "model.onnx"), "bert", opt_level=0, **sizes)
        fused.save_model_to_file(str(files / FUSED))
    return output


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16. Others emulate it step by step, several times slower than float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class CalibrationBatches(CalibrationDataReader):
    """Batches in the interface that the quantizer expects."""

    def __init__(self, batches: Iterator[dict[str, np.ndarray]]):
        self.batches = batches

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def calibrate(files: Path, batches: Iterator[dict[str, np.ndarray]]) -> None:
    """Write the calibrated file beside the float32 one.

    Args:
        batches: batches of one text each, since padding would be counted as text.
    """
    partial_file = files / f"{CALIBRATED}.partial"
    options = {"per_channel": True, "op_types_to_quantize": ["MatMul"]}
    quantize_static(files / "model.onnx", partial_file, CalibrationBatches(batches), **options)
    partial_file.rename(files / CALIBRATED)


def load_engines(folder: Path) -> dict[str, Callable[[torch.Tensor, torch.Tensor], np.ndarray]]:
    """The engines by name: functions that take ids and mask, and return the last hidden states."""

    def of_torch(dtype: torch.dtype, **prepared: bool):
        model = NeoBERTModel.from_pretrained(folder / "model", dtype=dtype).eval()
        if prepared:
            model.prepare_for_inference(**prepared)

        def run(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
            with torch.inference_mode():
                return model(ids, attention_mask=mask).last_hidden_state.float().numpy()

        return run

    def of_onnx_runtime(file: str):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(
            folder / "exported" / "onnx" / file, options, providers=["CPUExecutionProvider"]
        )
        return lambda ids, mask: session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]

    engines = {
        "PyTorch": of_torch(torch.float32),
        "PyTorch, prepared": of_torch(torch.float32, int8=False),
        "ONNX Runtime": of_onnx_runtime("model.onnx"),
        "ONNX Runtime, fused": of_onnx_runtime(FUSED),
        "PyTorch, int8": of_torch(torch.float32, int8=True),
        "ONNX Runtime, int8": of_onnx_runtime("model_quantized.onnx"),
        "ONNX Runtime, int8, calibrated": of_onnx_runtime(CALIBRATED),
    }
    if find_spec("openvino"):
        engines["OpenVINO"] = of_openvino(folder, "f32")
        # With the exported int8 file, OpenVINO is slower than in float32. It needs calibrated files.
        engines["OpenVINO, int8, calibrated"] = of_openvino(folder, "f32", CALIBRATED)
    if multiplies_bfloat16():
        engines["PyTorch, bfloat16"] = of_torch(torch.bfloat16)
        engines["PyTorch, bfloat16, prepared"] = of_torch(torch.bfloat16, int8=False)
        if find_spec("openvino"):
            engines["OpenVINO, bfloat16"] = of_openvino(folder, "bf16")
    return engines


def of_openvino(
    folder: Path, precision: str, file: str = "model.onnx"
) -> Callable[[torch.Tensor, torch.Tensor], np.ndarray]:
    import openvino

    options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": precision}
    options |= {"PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(folder / "exported" / "onnx" / file, "CPU", options)
    return lambda ids, mask: model({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]


def make_batch(shape: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and their mask. A ragged batch has one row of full length, and others of 4 tokens or more."""
    rows, length = map(int, shape.split(",")[0].split(" x "))
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(5, 1000, (rows, length), generator=generator), torch.ones(rows, length, dtype=torch.long)
    if shape == RAGGED:
        lengths = torch.randint(4, 2 * MEAN_LENGTH - 4, (rows,), generator=generator)
        lengths[0] = length
        mask = (torch.arange(length) < lengths[:, None]).long()
    return ids, mask


def check(name: str, found: np.ndarray, expected: np.ndarray, mask: torch.Tensor) -> None:
    """Raise if an engine's outputs for real tokens differ from those of PyTorch."""
    found, expected = found[mask.bool().numpy()], expected[mask.bool().numpy()]
    exact = precision_of(name) == "float32"
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    difference, cosine = np.abs(found - expected).max(), ((found * expected).sum(1) / norms).min()
    if (difference > EXACT) if exact else (cosine < LEAST_COSINE):
        raise ValueError(f"{name} computes something else: largest difference {difference:.2g}, cosine {cosine:.5f}.")


def earlier_times(settings: ServingArguments) -> dict[str, dict]:
    """Results of earlier calls with the same model, for the shapes that this call does not measure."""
    file = Path(settings.results) / "serving_cpu.json"
    stored = json.loads(file.read_text()) if file.exists() else {"settings": {}}
    same = all(stored["settings"].get(name) == getattr(settings, name) for name in ("layers", "width"))
    kept = set(SHAPES) - set(settings.shapes) if same else ()
    return {name: {shape: stored[name][shape] for shape in kept if shape in stored[name]} for name in PARTS}


def measure(engines: dict[str, Callable], shapes: list[str]) -> dict[str, dict[str, float]]:
    """Median milliseconds by shape and engine."""
    found = {}
    for shape in shapes:
        ids, mask = make_batch(shape)
        expected = engines["PyTorch"](ids, mask)
        for name, run in engines.items():
            found_states = run(ids, mask)
            # Fixed scales do not fit random weights. serving_quality.py scores calibrated files with trained weights.
            if "calibrated" not in name:
                check(name, found_states, expected, mask)
        candidates = {name: partial(run, ids, mask) for name, run in engines.items()}
        seconds = medians(candidates, SHAPES[shape], PAUSE_SECONDS)
        found[shape] = {name: 1000 * value for name, value in seconds.items()}
        print(shape, {name: round(value, 1) for name, value in found[shape].items()}, flush=True)
    return found


def weight_megabytes(folder: Path) -> dict[str, float]:
    """Memory of the weights. Packed weights are a second copy of the blocks' weights; in int8, this copy is small."""
    model = NeoBERTModel.from_pretrained(folder / "model")
    blocks = sum(weight.numel() for weight in model.transformer_encoder.parameters())
    everything = sum(weight.numel() for weight in model.parameters())
    files = {path.name: path.stat().st_size for path in (folder / "exported" / "onnx").iterdir()}
    taken = {
        "PyTorch": 4 * everything,
        "PyTorch, prepared": 4 * (everything + blocks),
        "PyTorch, int8": 4 * everything + blocks,
        "PyTorch, bfloat16": 2 * everything,
        "PyTorch, bfloat16, prepared": 2 * (everything + blocks),
        "ONNX Runtime": files["model.onnx"],
        "ONNX Runtime, fused": files[FUSED],
        "ONNX Runtime, int8": files["model_quantized.onnx"],
        "ONNX Runtime, int8, calibrated": files[CALIBRATED],
    }
    if find_spec("openvino"):
        taken |= {"OpenVINO": files["model.onnx"], "OpenVINO, int8, calibrated": files[CALIBRATED]}
    return {name: size / 1e6 for name, size in taken.items()}


def quality_table(found: dict[str, dict[str, float]], sizes: dict[str, float], quality: dict) -> list[str]:
    """Speed, size and quality of each engine. Quality is the mean, and the difference from float32 in PyTorch."""
    rows = []
    # Some engines have scores but no size.
    for name in dict.fromkeys([*sizes, *quality["scores"]]):
        size = f"{sizes[name]:,.0f}" if name in sizes else "-"
        times = [f"{found[shape][name]:,.1f}" if name in found[shape] else "-" for shape in found]
        # Engines that only lay out the weights differently have no scores: they give the same numbers.
        scores, exact = quality["scores"].get(name), quality["scores"]["PyTorch"]
        cells = []
        for key in QUALITY:
            gains = [one[key] - other[key] for one, other in zip(scores or [], exact)]
            mean = f"{statistics.mean(one[key] for one in scores):.3f}" if scores else "-"
            cells.append(f"{mean} ({statistics.mean(gains):+.4f})" if gains and name != "PyTorch" else mean)
        rows.append([name, size, *times, *cells])
    return markdown_table(["", "weights, MB", *found, *QUALITY.values()], rows)


def time_table(found: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(found.values())))
    rows = [
        [shape, *(f"{times[name]:,.1f}" if name in times else "-" for name in names)] for shape, times in found.items()
    ]
    return "\n".join(markdown_table(["", *names], rows))


def other_machines(results: Path) -> list[str]:
    """Sections with the measurements of other machines."""
    sections = []
    for file in sorted(results.glob("serving_cpu_*.json")):
        stored = json.loads(file.read_text(encoding="utf-8"))
        sections += [f"## {stored['title']}", stored["note"], time_table(stored["milliseconds"])]
    return sections


def report(
    settings: ServingArguments,
    found: dict[str, dict[str, float]],
    places: dict[str, str],
    quality: dict | None,
    folder: Path,
) -> str:
    packages = ["onnxruntime", *(["openvino"] if find_spec("openvino") else [])]
    precision = f"{torch.get_num_threads()} threads of {processor()}"
    calls = {place: ", ".join(shape for shape in found if places[shape] == place) for place in places.values()}
    measured = "; ".join(f"{place}: {shapes}" for place, shapes in calls.items())
    sections = (
        "# Serving on a CPU",
        "![times](serving_cpu.png)",
        circumstances("serving_cpu", *packages, precision=precision, runs=f"Measured {measured}."),
        f"{settings.layers} layers of width {settings.width}, random weights, the same in all engines. The engines "
        f"take turns in one process, with {PAUSE_SECONDS:g} seconds in between. Times are the median milliseconds of a "
        "forward pass, for rows x tokens. "
        "`prepared` is `model.prepare_for_inference()`; `fused` and `calibrated` are files that only this benchmark "
        "makes. The ragged batch has "
        f"{MEAN_LENGTH} tokens per row on average, and one row of 128. Every engine was first compared with PyTorch: "
        f"float32 must agree to {EXACT:g}, others to a cosine of {LEAST_COSINE} in every token. Calibrated files were "
        "not compared, because their scales do not fit random weights; the next table shows them with trained ones.",
        time_table(found),
    )
    if quality:
        sections += (
            "## Speed, size and quality",
            f"Quality was measured with small models, {quality['settings']['seeds']} of each kind, trained from "
            "`benchmarks/models/small` by `python benchmarks/serving_quality.py --data ../shared/data`: nDCG@10 of "
            "searches in two dictionaries, Spearman's coefficient on 1,225 pairs of news, and the share of 4,441 "
            "descriptions that are assigned to the right one of 41 sections. In brackets: the difference from PyTorch "
            "in float32. Times and sizes are those of the large model above. Prepared models give the same numbers as "
            "PyTorch in that precision.",
            "\n".join(quality_table(found, weight_megabytes(folder), quality)),
        )
    return "\n\n".join([*sections, *other_machines(Path(settings.results))]) + "\n"


def precision_of(engine: str) -> str:
    return next((name for name in ("int8", "bfloat16") if name in engine), "float32")


def plot(found: dict[str, dict[str, float]], quality: dict | None, file: Path) -> None:
    """For each precision, times as multiples of the fastest engine's; and quality against time for all engines."""
    shapes, panels = list(found), []
    for precision in ("float32", "bfloat16", "int8"):
        names = [name for name in found[shapes[0]] if precision_of(name) == precision]
        lines = []
        for name in names:
            times = {shape: found[shape] for shape in shapes if name in found[shape]}
            fastest = {shape: min(of[one] for one in names if one in of) for shape, of in times.items()}
            points = [(shape, of[name] / fastest[shape]) for shape, of in times.items()]
            lines.append(Line(points, name, {"marker": "o"}))
        labels = {"ylabel": "time, in that of the fastest", "xlabel": "rows x tokens", "title": precision}
        panels += [Panel(lines, labels, legend={"loc": "upper center", "fontsize": "x-small"})] if lines else []
    if quality:
        shape, key = shapes[len(shapes) // 2], next(iter(QUALITY))
        exact = statistics.mean(one[key] for one in quality["scores"]["PyTorch"])
        points = []
        for number, name in enumerate(found[shape]):
            if name in quality["scores"]:
                mean = statistics.mean(one[key] for one in quality["scores"][name])
                style = {"marker": "o", "color": f"C{number}", "linestyle": ""}
                points.append(Line([(found[shape][name], mean - exact)], name, style))
        labels = {"xlabel": f"milliseconds, {shape}", "ylabel": f"{QUALITY[key]}, above float32"}
        panels.append(Panel(points, labels, legend={"fontsize": "x-small"}))
    plot_lines(file, panels, size=(6.5, 4))


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(ServingArguments, args=args)
    folder = make_model(settings)
    results = earlier_times(settings)
    results[TIMES] |= measure(load_engines(folder), settings.shapes)
    results[PLACES] |= dict.fromkeys(settings.shapes, f"on {date.today()} on {processor()}")
    found, places = ({shape: results[name][shape] for shape in SHAPES if shape in results[name]} for name in PARTS)
    output = Path(settings.results)
    output.mkdir(parents=True, exist_ok=True)
    quality = output / "serving_quality.json"
    quality = json.loads(quality.read_text()) if quality.exists() else None
    plot(found, quality, output / "serving_cpu.png")
    write_json(output / "serving_cpu.json", {"settings": asdict(settings), TIMES: found, PLACES: places})
    write_text(output / "serving_cpu.md", report(settings, found, places, quality, folder))


if __name__ == "__main__":
    main()

"""The report of benchmarks/throughput.py: CSV, Markdown with tables like the paper's Table 10, a plot like Figure 3."""

import csv
import io
import shlex
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from encoders import count_parameters
from transformers import PretrainedConfig

from neobert_hf.common.files import write_text
from neobert_hf.common.report import Line, Panel, markdown_table, plot_lines


MODES = {
    "forward": "Forward pass",
    "training": "Training step",
    "checkpointing": "Training step with gradient checkpointing",
}
LAYOUTS = ("full", "ragged")
OUT_OF_MEMORY = "out of memory"


def summarise(entries: list[dict], ceiling: float) -> list[dict]:
    """One row for each model, mode, length and layout: the fastest of what was tried, medians over the rounds.

    Args:
        entries: of the record, with at least one round each.
        ceiling: FLOP/s of plain matrix products.
    """
    rows = {}
    for entry in entries:
        row = {name: entry[name] for name in ("model", "mode", "length", "layout", "attention", "compiled", "rows")}
        if entry["rows"] is not None:
            rounds = entry["rounds"]
            speeds = [measured["tokens"] / measured["seconds"] for measured in rounds]
            flops = statistics.median(measured["flops"] / measured["seconds"] for measured in rounds)
            row["real_share"] = rounds[0]["tokens"] / (entry["rows"] * entry["length"])
            row |= {"tokens_per_s": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
            row |= {"gflops_per_s": flops / 1e9, "mfu": flops / ceiling}
            peaks = [measured["peak_bytes"] for measured in rounds]
            row["peak_gib"] = None if None in peaks else max(peaks) / 2**30
        measurement = tuple(row[name] for name in ("model", "mode", "length", "layout"))
        rows.setdefault(measurement, []).append(row)
    return [_best(tried) for tried in rows.values()]


def _best(tried: list[dict]) -> dict:
    best = max(tried, key=lambda row: row.get("tokens_per_s", 0))
    speeds = {(row["attention"], row["compiled"]): row.get("tokens_per_s") for row in tried}
    compiled, eager = (speeds.get((best["attention"], way)) for way in (True, False))
    return best | {"compile_gain": compiled / eager if compiled and eager else None}


def matrix(
    rows: list[dict], mode: str, layout: str, parameters: dict[str, float], sheet: float | None = None
) -> list[str]:
    """Thousands of real tokens a second and MFU, a line each model and a column each length.

    Args:
        sheet: FLOP/s of the device's data sheet, to show the share of them as well.
    """
    lengths = sorted({row["length"] for row in rows if row["mode"] == mode})
    cells = {(row["model"], row["length"]): row for row in rows if (row["mode"], row["layout"]) == (mode, layout)}
    table = []
    for model, count in parameters.items():
        texts = []
        for length in lengths:
            row = cells.get((model, length))
            speed = row and row.get("tokens_per_s")
            if speed:
                shares = f"{row['mfu']:.0%}" + (f", {row['gflops_per_s'] * 1e9 / sheet:.0%}" if sheet else "")
                texts.append(f"{speed / 1e3:.3g} ({shares})")
            else:
                texts.append(OUT_OF_MEMORY if row else "-")
        if set(texts) != {"-"}:
            table.append([model, f"{count / 1e6:.0f}M", *texts])
    return markdown_table(["", "parameters", *(f"{length:,}" for length in lengths)], table)


def ragged_over_full(rows: list[dict]) -> list[str]:
    """Real tokens a second of ragged batches over those of full ones."""
    speeds = {
        (row["model"], row["mode"], row["length"], row["layout"]): row.get("tokens_per_s")
        for row in rows
        if row["mode"] != "checkpointing"
    }
    columns = sorted({(mode, length) for _, mode, length, _ in speeds})
    table = []
    for model in dict.fromkeys(model for model, *_ in speeds):
        both = [[speeds.get((model, *column, layout)) for layout in LAYOUTS] for column in columns]
        ratios = [f"{ragged / full:.2f}" if full and ragged else "-" for full, ragged in both]
        table.append([model, *ratios])
    return markdown_table(["", *(f"{mode}, {length:,}" for mode, length in columns)], table)


def training_memory(entries: list[dict]) -> list[str]:
    """The largest batch of the search, and the bytes per token that its last doubling added, at one length."""
    with_checkpointing = [entry for entry in entries if entry["mode"] == "checkpointing" and entry["trials"]]
    if not with_checkpointing:
        return ["Not measured."]
    length = with_checkpointing[0]["length"]
    table = []
    for entry in entries:
        trials, mode = entry["trials"], entry["mode"]
        if (entry["length"], entry["layout"], entry["compiled"]) != (length, "full", False):
            continue
        if mode == "forward" or not trials:
            continue
        growth = "-"
        if len(trials) > 1:
            before, last = trials[-2:]
            grown = (last["peak_bytes"] - before["peak_bytes"]) / (last["tokens"] - before["tokens"])
            growth = f"{grown / 1e3:,.0f}"
        name = f"{entry['model']} ({entry['attention']})"
        table.append([name, "yes" if mode == "checkpointing" else "no", trials[-1]["rows"], growth])
    return markdown_table([f"at {length:,} tokens", "gradient checkpointing", "largest batch", "kB a token"], table)


def all_rows(rows: list[dict]) -> list[str]:
    """A table of every number that was measured."""
    head = "model, mode, length, layout, attention, batch, real tokens".split(", ")
    head += ["tokens/s (slowest, fastest round)", "GFLOP/s", "MFU", "peak GiB", "compiled / eager"]
    table = []
    for row in rows:
        cells = [row["model"], row["mode"], f"{row['length']:,}", row["layout"]]
        cells.append(row["attention"] + (", compiled" if row["compiled"] else ""))
        if row["rows"] is None:
            cells += [OUT_OF_MEMORY] + ["-"] * 6
        else:
            cells += [str(row["rows"]), f"{row['real_share']:.0%}"]
            cells.append(f"{row['tokens_per_s']:,.0f} ({row['slowest']:,.0f}, {row['fastest']:,.0f})")
            cells += [f"{row['gflops_per_s']:,.0f}", f"{row['mfu']:.2f}"]
            cells.append("not measured" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}")
            cells.append("-" if row["compile_gain"] is None else f"{row['compile_gain']:.2f}")
        table.append(cells)
    return markdown_table(head, table)


def to_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plot(rows: list[dict], file: Path) -> None:
    """Draw the paper's Figure 3, once for each mode and layout."""
    panels = []
    for mode in ("forward", "training"):
        for layout in LAYOUTS:
            chosen = [row for row in rows if (row["mode"], row["layout"]) == (mode, layout)]
            points = {model: [] for model in dict.fromkeys(row["model"] for row in rows)}
            for row in chosen:
                if row["rows"] is not None:
                    points[row["model"]].append((row["length"], row["tokens_per_s"] / 1e3))
            # A model has the same colour in all panels, even if one of them lacks a model.
            lines = [
                Line(sorted(measured), model, {"marker": "o", "color": f"C{number}"})
                for number, (model, measured) in enumerate(points.items())
            ]
            labels = {"xlabel": "sequence length", "ylabel": "thousand real tokens a second"}
            labels["title"] = f"{MODES[mode]}, {layout} batches"
            lengths = sorted({row["length"] for row in rows if row["mode"] == mode})
            panels.append(Panel(lines, labels, lengths))
    plot_lines(file, panels)


def markdown(
    record: dict, rows: list[dict], entries: list[dict], parameters: dict, failures: dict, plot: str | None
) -> str:
    settings, ceilings = dict(record["settings"]), [ceiling / 1e9 for ceiling in record["ceilings"]]
    versions = f"torch {settings.pop('torch')}, transformers {settings.pop('transformers')}"
    machine, dtype = settings.pop("machine"), settings.pop("dtype")
    limits = ", ".join(f"`{name}` {value}" for name, value in settings.items())
    sections = [
        "# Throughput of encoders",
        *([f"![throughput]({plot})"] if plot else []),
        f"{machine}, {dtype}, {versions}, {record['date']}, `python {shlex.join(sys.argv)}` ({limits}). The "
        "top of `benchmarks/throughput.py` says what is measured, and how.",
        f"Ceiling: {statistics.median(ceilings):,.0f} GFLOP/s in {record['ceiling_shape']} matrix products, the median "
        f"of {len(ceilings)} measurements taken in between ({min(ceilings):,.0f} to {max(ceilings):,.0f}).",
    ]
    for mode, title in MODES.items():
        for layout in LAYOUTS:
            if any((row["mode"], row["layout"]) == (mode, layout) for row in rows):
                sections.append(
                    f"## {title}, {layout} batches\n\nThousand real tokens per second, with MFU in brackets."
                )
                sections.append("\n".join(matrix(rows, mode, layout, parameters)))
    sections += ["## Ragged over full, real tokens a second", "\n".join(ragged_over_full(rows))]
    sections += ["## Memory of training", "\n".join(training_memory(entries))]
    sections += ["## All", "\n".join(all_rows(rows))]
    if failures:
        sections += ["## Not measured", "\n".join(f"* {name}: {why}" for name, why in failures.items())]
    return "\n\n".join(sections) + "\n"


def write_report(
    record: dict, entries: list[dict], configs: dict[str, PretrainedConfig], failures: dict[str, str], path: Path
) -> None:
    """Write `path`.md, .csv and, if matplotlib is installed, .png.

    Args:
        record: the whole content of the file of measurements.
        entries: the cells of it to report, each with at least one round.
        configs: of the models, by name.
        failures: why a model or a way to run it is missing, by name.
        path: without an extension.
    """
    rows = summarise(entries, statistics.median(record["ceilings"]))
    parameters = {name: count_parameters(config) for name, config in configs.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `with_suffix`: the name may contain dots.
    files = {extension: path.with_name(f"{path.name}.{extension}") for extension in ("md", "csv", "png")}
    write_text(files["csv"], to_csv(rows))
    if plotted := find_spec("matplotlib") is not None:
        plot(rows, files["png"])
    image = files["png"].name if plotted else None
    write_text(files["md"], markdown(record, rows, entries, parameters, failures, image))
    print(files["md"].read_text(encoding="utf-8"))

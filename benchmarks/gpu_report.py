"""The page that benchmarks/gpu.py writes: its measurements, compared with the goals."""

import math
import statistics

from encoders import ENCODERS
from throughput import PAPER_LENGTHS, Cell
from throughput_report import MODES, OUT_OF_MEMORY, matrix, summarise, training_memory

from neobert_hf.common.report import markdown_table
from neobert_hf.pretraining.flops import DATASHEET_PEAKS


NEOBERT, RIVAL = "NeoBERT", "ModernBERT-base"
RIVALS_GOAL = "Share of the rate over the best of the other encoders'"
# Whether a model is compiled: first eager, then compiled.
WAYS = (False, True)
GOAL_LENGTHS = (512, 1024, 2048, 4096)
NOT_MEASURED = "not measured"
# At most this many errors and this many tests are listed; gpu.json has all of them.
MOST_LISTED = 12
KERNELS_SHOWN = 6


def page(content: dict) -> str:
    """The whole page, made from the content of gpu.json."""
    entries = [entry for entry in content["cells"].values() if entry["rounds"]]
    ceiling = statistics.median(content["ceilings"] or [float("nan")])
    rows = summarise(entries, ceiling)
    sections = [
        heading(content, ceiling),
        "## Against the goals",
        "\n".join(goals_table(content, rows, entries, ceiling)),
    ]
    parameters = {name: encoder.parameters * 1e6 for name, encoder in ENCODERS.items()}
    sheet = data_sheet(content)
    shares = "share of the products' rate" + (" (MFU) and of the data sheet's." if sheet else " (MFU).")
    for mode, layout in (("forward", "full"), ("forward", "ragged"), ("training", "full"), ("training", "ragged")):
        if any((row["mode"], row["layout"]) == (mode, layout) for row in rows):
            title = f"## {MODES[mode]}, {layout} batches\n\nThousand real tokens a second, in brackets the"
            sections += [f"{title} {shares}", "\n".join(matrix(rows, mode, layout, parameters, sheet))]
    if numbers := content["numbers"]:
        sections += ["## Parts", "\n".join(parts_table(numbers, ceiling))]
        sections += ["TFLOP/s of attention, of one layer.", "\n".join(attention_table(numbers))]
        sections += ["\n".join(profiles_table(numbers))]
    if rows:
        sections += ["## Memory of training", "\n".join(training_memory(entries))]
    sections += ["## Not measured, and failed tests", "\n".join(failures(content)) or "Nothing."]
    return "\n\n".join(sections) + "\n"


def heading(content: dict, ceiling: float) -> str:
    settings, tests = content["settings"], content["tests"].get("outcomes", {})
    lines = ["# Speed on a GPU, on one page"]
    if not content["cells"] and not content["numbers"]:
        lines.append("**Not measured on a GPU yet.** `python benchmarks/gpu.py` measures it and writes this page.")
        return "\n\n".join(lines)
    versions = ", ".join(f"{name} {settings[name]}" for name in ("torch", "cuda", "transformers"))
    lines.append(
        f"{settings['machine']}, {settings['dtype']}, {versions}, {content['date']}, `python benchmarks/gpu.py`, whose "
        "first lines say what is measured and how."
    )
    sheet = data_sheet(content)
    said = f"; its data sheet says {sheet / 1e12:,.0f}" if sheet else ""
    lines.append(
        f"Products' rate: {ceiling / 1e12:,.3g} TFLOP/s, the median of {len(content['ceilings'])} measurements of "
        f"{content.get('ceiling_shape', '')} products{said}."
    )
    counts = {name: list(tests.values()).count(name) for name in ("passed", "failed", "error", "skipped")}
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    ended = "" if content["tests"].get("finished") else ", not finished"
    lines.append(f"Tests (`pytest -m gpu`): {listed}{ended}.")
    return "\n\n".join(lines)


def data_sheet(content: dict) -> float | None:
    """FLOP/s from the data sheet of the GPU; None if it is not known."""
    machine = content["settings"].get("machine", "")
    return next((peak for name, peak in DATASHEET_PEAKS.items() if name in machine), None)


def goals_table(content: dict, rows: list[dict], entries: list[dict], ceiling: float) -> list[str]:
    found = {(row["model"], row["mode"], row["length"], row["layout"]): row for row in rows}

    def mfu(mode: str, length: int, layout: str = "full", model: str = NEOBERT) -> float | None:
        return found.get((model, mode, length, layout), {}).get("mfu")

    lengths = sorted({row["length"] for row in rows if row["model"] == NEOBERT} | set(GOAL_LENGTHS))
    forward = {length: mfu("forward", length) for length in GOAL_LENGTHS}
    training = {length: mfu("training", length) for length in lengths if length <= 8192}
    ragged = {length: ratio(mfu("forward", length, "ragged"), mfu("forward", length)) for length in lengths}
    others = {}
    for length in PAPER_LENGTHS:
        rivals = [mfu("forward", length, model=name) or 0 for name in rivals_at(length)]
        others[length] = ratio(mfu("forward", length), max(rivals))
    table = [at_least("Forward pass, share of the products' rate", 0.55, forward)]
    if any(name.startswith("attention FlashAttention 3") for name in content["numbers"]):
        table.append(at_least("The same with FlashAttention 3", 0.60, forward))
    else:
        table.append(["The same with FlashAttention 3", "0.60", "-", "not installed"])
    table.append(at_least("Training step, share of the products' rate", 0.45, training))
    table.append(at_least("Ragged batches' FLOP/s over full ones'", 0.90, ragged))
    table.append(at_least(RIVALS_GOAL, 1.0, others, missing_rivals(content)))
    if sheet := data_sheet(content):
        for mode in ("forward", "training"):
            shares = {length: mfu(mode, length) for length in lengths}
            listed = listed_by_length({n: share * ceiling / sheet for n, share in shares.items() if share})
            said = [listed, "reported"] if listed else ["-", NOT_MEASURED]
            table.append([f"{MODES[mode]}, share of the data sheet's rate", "-", *said])
    table.append(longest_row(rows))
    table += rival_rows(entries)
    return markdown_table(["Goal, bfloat16 on a GPU", "at least", "measured", ""], table)


def ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def rivals_at(length: int) -> list[str]:
    """The other encoders that have positions for this many tokens."""
    return [name for name, encoder in ENCODERS.items() if name != NEOBERT and length <= (encoder.longest or math.inf)]


def missing_rivals(content: dict) -> list[str]:
    """The other encoders, and their lengths, whose measurements are not complete.

    An encoder can be run eager or compiled, with each attention that was tried for it. A length is complete if all
    these ways were tried and at least one of them was measured. A way that ended with an error counts as tried.
    """
    entries = [entry for entry in content["cells"].values() if entry["rounds"]]
    measured = {Cell(*(entry[name] for name in Cell._fields)).key for entry in entries}
    tried = measured | set(content["errors"])
    missing = []
    for name in (name for name in ENCODERS if name != NEOBERT):
        planned = [length for length in PAPER_LENGTHS if name in rivals_at(length)]
        attentions = {key.split()[1] for key in tried if key.startswith(f"{name} ")}
        absent = []
        for length in planned:
            ways = [Cell(name, attention, way, "forward", length, "full") for attention in attentions for way in WAYS]
            keys = {cell.key for cell in ways}
            if not keys & measured or not keys <= tried:
                absent.append(f"{length:,}")
        if absent:
            missing.append(name if len(absent) == len(planned) else f"{name} at {', '.join(absent)}")
    return missing


def listed_by_length(found: dict[int, float]) -> str:
    return ", ".join(f"{value:.2f} at {length:,}" for length, value in found.items())


def at_least(name: str, needed: float, found: dict[int, float | None], missing: list[str] = ()) -> list[str]:
    """A line of the table: the value at each length, and whether all values reach the goal.

    Args:
        missing: names of what else has to be measured before the goal can be met.
    """
    there = {length: value for length, value in found.items() if value}
    missed = [f"{length:,}" for length, value in there.items() if value < needed]
    absent = [f"{length:,}" for length in found if length not in there]
    verdict = [f"missed at {', '.join(missed)}"] if missed else ["met"] if there and not missing else []
    if absent or not there:
        verdict.append(f"{NOT_MEASURED} at {', '.join(absent)}" if there else NOT_MEASURED)
    if missing and there:
        verdict.append(f"not all measured: {', '.join(missing)}")
    return [name, f"{needed:.2f}", listed_by_length(there) or "-", "; ".join(verdict)]


def longest_row(rows: list[dict]) -> list[str]:
    """The line for the longest sequence, in a batch of one or more."""
    name = "32,768 tokens in one sequence"
    wanted = (NEOBERT, "forward", 32_768, "full")
    longest = next((r for r in rows if (r["model"], r["mode"], r["length"], r["layout"]) == wanted), None)
    if longest is None:
        return [name, "computed", "-", NOT_MEASURED]
    if longest["rows"] is None:
        return [name, "computed", OUT_OF_MEMORY, "missed"]
    memory = "" if longest["peak_gib"] is None else f", {longest['peak_gib']:.1f} GiB"
    shown = f"{longest['rows']} at once, {longest['tokens_per_s']:,.0f} tokens/s{memory}"
    return [name, "computed", shown, "met"]


def rival_rows(entries: list[dict]) -> list[list[str]]:
    """Tokens a second over ModernBERT-base's at 4,096 tokens, for each of its attentions."""
    speeds = {}
    for entry in entries:
        if (entry["mode"], entry["length"], entry["layout"]) == ("forward", 4096, "full") and entry["rows"]:
            speed = statistics.median(measured["tokens"] / measured["seconds"] for measured in entry["rounds"])
            name = (entry["model"], entry["attention"])
            speeds[name] = max(speed, speeds.get(name, 0))
    own = max((speed for (model, _), speed in speeds.items() if model == NEOBERT), default=None)
    rivals = {attention: speed for (model, attention), speed in speeds.items() if model == RIVAL}
    title = f"Tokens/s over {RIVAL}'s at 4,096"
    return [
        [f"{title}, `{attention}`", "1.467 in the paper", f"{own / speed:.2f}", "reported"]
        for attention, speed in rivals.items()
        if own
    ] or [[title, "1.467 in the paper", "-", NOT_MEASURED]]


def parts_table(numbers: dict, ceiling: float) -> list[str]:
    """Copies, matrix products and the operations between them."""
    table = []
    for name, number in numbers.items():
        if "kernels" in number or name.startswith("attention"):
            continue
        rate, share = f"{number.get('bytes', 0) / number['seconds'] / 1e12:,.3g} TB/s", "-"
        if "flops" in number:
            flops = number["flops"] / number["seconds"]
            rate, share = f"{flops / 1e12:,.3g} TFLOP/s", f"{flops / ceiling:.2f}"
        table.append([name, f"{number['seconds'] * 1e6:,.0f}", rate, share])
    return markdown_table(["", "microseconds", "rate", "of the products' rate"], table)


def attention_table(numbers: dict) -> list[str]:
    """A line for each kernel, with and without gradients, and a column for each length."""
    cells = {}
    for name, number in numbers.items():
        kernel, _, length = name.rpartition(" ")
        if name.startswith("attention"):
            cells.setdefault(kernel.removeprefix("attention "), {})[int(length)] = number
    lengths = sorted({length for found in cells.values() for length in found})
    table = [
        [kernel, *(f"{found[n]['flops'] / found[n]['seconds'] / 1e12:,.3g}" if n in found else "-" for n in lengths)]
        for kernel, found in cells.items()
    ]
    return markdown_table(["", *(f"{length:,}" for length in lengths)], table)


def profiles_table(numbers: dict) -> list[str]:
    """The kernels that take most of the time of a block."""
    table = []
    for name, number in numbers.items():
        if "kernels" not in number:
            continue
        kernels = [
            f"{kernel['name'][:40]} x{kernel['calls']} {kernel['microseconds'] / number['seconds'] / 1e6:.0%}"
            for kernel in number["kernels"][:KERNELS_SHOWN]
        ]
        mode = name.removeprefix("profile of a block, ")
        table.append([mode, number["batch"], f"{number['seconds'] * 1e6:,.0f}", ", ".join(kernels)])
    return markdown_table(
        ["a model of one block", "batch", "microseconds", "calls and share of the first kernels"], table
    )


def failures(content: dict) -> list[str]:
    tests = content["tests"]
    failed = [name for name, outcome in tests.get("outcomes", {}).items() if outcome in ("failed", "error")]
    lines = [f"* Test {name}" for name in failed[:MOST_LISTED]]
    said = tests.get("output", "").strip().splitlines()
    if said and not tests["finished"]:
        lines.insert(0, f"* The tests did not come to their end: {said[-1][:200]}")
    errors = [f"* {name}: {entry['error']}" for name, entry in content["errors"].items()]
    lines += errors[:MOST_LISTED]
    rest = max(0, len(failed) - MOST_LISTED) + max(0, len(errors) - MOST_LISTED)
    return lines + ([f"* and {rest} more, in gpu.json"] if rest else [])

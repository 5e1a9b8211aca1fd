"""`benchmarks/throughput.py` on tiny encoders: counts, batches, resumption and report; speeds are never asserted."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from itertools import product

import pytest
import throughput
import torch
from encoders import ENCODERS, build_config, build_model, count_parameters, forward_flops
from forward import ragged_lengths
from throughput import Bench, Cell, ThroughputArguments, double_until_out_of_memory, make_batch, row_counts
from throughput_report import all_rows, matrix, ragged_over_full, summarise, training_memory
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_bidirectional_sliding_window_mask
from transformers.modeling_layers import GradientCheckpointingLayer as CHECKPOINTED

from neobert_hf.common.fingerprints import SettingsMismatch
from tests.helpers.models import ROOT


SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 1,
}


def small(name: str):
    return build_config(name, **SMALL)


@pytest.mark.parametrize("name", ENCODERS)
def test_published_sizes(name):
    """To 1.2%: published counts are rounded, and those of BERT and RoBERTa have the pooler in them."""
    assert count_parameters(build_config(name)) / 1e6 == pytest.approx(ENCODERS[name].parameters, rel=0.012)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("mode", ["forward", "training", "checkpointing"])
@pytest.mark.parametrize("layout", ["full", "ragged"])
def test_one_measurement(name, mode, layout):
    """Full and ragged batches; only real tokens are counted."""
    cell = Cell(name, "sdpa", False, mode, 16, layout)
    bench = Bench(small(name), cell)
    before = [parameter.clone() for parameter in bench.model.parameters()]
    measured = bench.measure(cell, 8, 0.0)
    assert measured["rows"] == 8 and measured["seconds"] > 0 and measured["flops"] > 0
    assert measured["tokens"] == (128 if layout == "full" else int(ragged_lengths(8, 16).sum())) and (
        layout == "full" or measured["tokens"] < 90
    )
    changed = any((old != new).any() for old, new in zip(before, bench.model.parameters()))
    assert changed == (mode != "forward")
    assert all(parameter.isfinite().all() for parameter in bench.model.parameters())
    recomputing = {layer.gradient_checkpointing for layer in bench.model.modules() if isinstance(layer, CHECKPOINTED)}
    assert recomputing == {mode == "checkpointing"}


@pytest.mark.parametrize("name", ENCODERS)
def test_flops_equal_those_of_torch(name):
    """Exactly, where nothing is padded, every label is wanted and the local window reaches over the whole sequence."""
    model = build_model(small(name), "eager", "cpu", torch.float32).train()
    lengths = torch.tensor([24, 24])
    ids = torch.randint(5, 100, (2, 24))
    with FlopCounterMode(display=False) as forward:
        model.base_model(ids)
    assert forward.get_total_flops() == forward_flops(model, lengths, 0)
    with FlopCounterMode(display=False) as training:
        model(ids, labels=ids).loss.backward()
    # The derivative by the first layer's input is not taken where the embedding stays: both are counted alike.
    assert training.get_total_flops() == 3 * forward_flops(model, lengths, 48)


def test_pairs_of_local_attention():
    """As many as Transformers' own mask of the window lets through."""
    config = build_config("ModernBERT-base", **SMALL, local_attention=8)
    config._attn_implementation = "eager"
    model = build_model(config, "eager", "meta", torch.float32)
    for length in (3, 5, 6, 9, 40):
        states = torch.zeros(1, length, 32)
        mask = create_bidirectional_sliding_window_mask(config=config, inputs_embeds=states, attention_mask=None)
        pairs = length**2 if mask is None else int((mask == 0).sum())
        kinds = config.layer_types
        expected = sum(length**2 if kind == "full_attention" else pairs for kind in kinds)
        linear = forward_flops(model, torch.tensor([length]), 0) - 4 * 32 * expected
        assert kinds.count("sliding_attention") == 2
        assert linear == length * forward_flops(model, torch.tensor([1]), 0) - length * 4 * 32 * 4


def test_flops_of_ragged_batches_are_those_of_their_sequences():
    model = build_model(small("NeoBERT"), "eager", "meta", torch.float32)
    one_by_one = sum(forward_flops(model, torch.tensor([length]), 1) for length in (3, 9, 16))
    assert forward_flops(model, torch.tensor([3, 9, 16]), 3) == one_by_one


def test_labels_are_a_fifth_of_the_real_tokens():
    torch.manual_seed(0)
    lengths = ragged_lengths(64, 256)
    for packed in (False, True):
        inputs, labels = make_batch(small("NeoBERT"), lengths, packed)
        assert labels.shape == inputs["input_ids"].shape
        assert (labels != -100).sum() / lengths.sum() == pytest.approx(0.2, abs=0.02)
        if not packed:
            assert inputs["attention_mask"].sum() == lengths.sum()
            assert (labels[inputs["attention_mask"] == 0] == -100).all()


@torch.no_grad()
def test_packed_batch_keeps_sequences_apart():
    """The packed row is the padded batch without its padding: each sequence has the output that it has alone."""
    lengths = torch.tensor([16, 5, 9])
    inputs, _ = make_batch(small("NeoBERT"), lengths, True)
    model = build_model(small("NeoBERT"), "sdpa", "cpu", torch.float32).eval().base_model
    packed = model(**inputs).last_hidden_state[0].split(lengths.tolist())
    for ids, states in zip(inputs["input_ids"][0].split(lengths.tolist()), packed):
        torch.testing.assert_close(model(ids[None]).last_hidden_state[0], states, rtol=0, atol=1e-6)


def documents_apart(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """What a flash attention does with a packed row; none runs on a CPU."""
    documents = zip(*(states.split(cu_seq_lens_q.diff().tolist(), dim=2) for states in (query, key, value)))
    outputs = [scaled_dot_product_attention(*states, scale=scaling).transpose(1, 2) for states in documents]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register("documents_apart", documents_apart)
AttentionMaskInterface.register("documents_apart", lambda *args, **kwargs: None)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "NeoBERT"])
def test_packed_batch_of_the_others(name):
    """Every architecture takes the positions of a packed row and hands its documents on to a flash attention."""
    lengths = torch.tensor([16, 5, 9])
    model = build_model(small(name), "sdpa", "cpu", torch.float32).eval().base_model
    inputs, _ = make_batch(model.config, lengths, True)
    model.config._attn_implementation = "documents_apart"
    packed = model(**inputs).last_hidden_state[0].split(lengths.tolist())
    model.config._attn_implementation = "sdpa"
    for ids, states in zip(inputs["input_ids"][0].split(lengths.tolist()), packed):
        torch.testing.assert_close(model(ids[None]).last_hidden_state[0], states, rtol=0, atol=1e-5)


def test_doubling_stops_where_memory_ends():
    tried = []

    def measure(rows: int) -> dict:
        tried.append(rows)
        if rows > 8:
            raise torch.OutOfMemoryError("a card of 8 rows")
        return {"rows": rows}

    assert [trial["rows"] for trial in double_until_out_of_memory(measure, [1, 2, 4, 8, 16, 32])] == [1, 2, 4, 8]
    assert tried == [1, 2, 4, 8, 16]


def test_row_counts():
    settings = ThroughputArguments(max_rows=64, max_tokens=4096)
    full = Cell("NeoBERT", "sdpa", False, "forward", 128, "full")
    assert row_counts(settings, full) == [1, 2, 4, 8, 16, 32]
    assert row_counts(settings, full._replace(length=8192)) == [1]
    assert row_counts(settings, full._replace(layout="ragged")) == [8, 16, 32]
    assert row_counts(settings, full._replace(layout="ragged", length=2048)) == [8]
    assert row_counts(ThroughputArguments(max_rows=4, max_tokens=None), full) == [1, 2, 4]
    settings = ThroughputArguments(max_rows=64, min_tokens=1024, max_tokens=4096)
    assert row_counts(settings, full) == [8, 16, 32]
    assert row_counts(settings, full._replace(length=32768)) == [1]
    assert row_counts(settings, full._replace(layout="ragged", length=2048)) == [8]


def entry(**changes) -> dict:
    cell = {"model": "NeoBERT", "mode": "forward", "length": 64, "layout": "full", "attention": "sdpa"}
    measured = {"rows": 4, "tokens": 256, "flops": 1e9, "peak_bytes": None}
    rounds = [measured | {"seconds": seconds} for seconds in (1.0, 4.0, 2.0)]
    return cell | {"compiled": False, "rows": 4, "trials": [], "rounds": rounds} | changes


def test_summary_takes_medians_and_the_best_way():
    fast = [{"rows": 4, "tokens": 256, "flops": 1e9, "seconds": 0.5, "peak_bytes": 2**30}]
    (row,) = summarise([entry(), entry(compiled=True, rounds=fast)], 4e9)
    assert (row["compiled"], row["tokens_per_s"], row["mfu"], row["peak_gib"]) == (True, 512, 0.5, 1)
    assert row["compile_gain"] == 4
    (row,) = summarise([entry()], 4e9)
    assert (row["tokens_per_s"], row["slowest"], row["fastest"], row["mfu"]) == (128, 64, 256, 0.125)
    assert row["compile_gain"] is None
    # Padding does not count, and a batch that does not fit is no speed.
    (row,) = summarise([entry(rows=8), entry(attention="eager", rows=None, rounds=[None])], 4e9)
    assert (row["attention"], row["real_share"]) == ("sdpa", 0.5)
    (row,) = summarise([entry(rows=None, rounds=[None])], 4e9)
    assert row["rows"] is None and "tokens_per_s" not in row


def test_every_line_of_a_table_has_its_columns():
    rows = summarise([entry(), entry(model="BERT-base", rows=None, rounds=[None]), entry(layout="ragged")], 4e9)
    for lines in (
        all_rows(rows),
        matrix(rows, "forward", "full", {"NeoBERT": 2e8, "BERT-base": 1e8}),
        ragged_over_full(rows),
    ):
        assert len({line.count("|") for line in lines}) == 1
        assert len(lines) >= 4
    assert matrix(rows, "forward", "full", {"NeoBERT": 2e8, "BERT-base": 1e8})[2:] == [
        "| NeoBERT | 200M | 0.128 (12%) |",
        "| BERT-base | 100M | out of memory |",
    ]
    assert ragged_over_full(rows)[2:] == ["| NeoBERT | 1.00 |", "| BERT-base | - |"]


def test_memory_of_training():
    trials = [{"rows": rows, "tokens": rows * 4096, "peak_bytes": 10**9 + rows * 4096 * 5000} for rows in (1, 2, 4)]
    plain = entry(mode="training", length=4096, trials=trials)
    lines = training_memory([plain, entry(mode="checkpointing", length=4096, trials=trials[:2])])
    assert lines[2] == "| NeoBERT (sdpa) | no | 4 | 5 |" and lines[3] == "| NeoBERT (sdpa) | yes | 2 | 5 |"
    assert training_memory([plain]) == ["Not measured."]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="did you mean 'ModernBERT-base'"):
        ThroughputArguments(models=["ModernBERT-bas"])
    with pytest.raises(ValueError, match="`lengths` is .*at least 1"):
        ThroughputArguments(lengths=[0])
    with pytest.raises(ValueError, match="`rounds` is 0"):
        ThroughputArguments(rounds=0)


# What a process of its own runs: the benchmark with tiny encoders, of which one is not there.
SCRIPT = """
from tests.benchmarks import test_throughput
test_throughput.shrink_encoders()
import throughput
throughput.main()
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))}


def shrink_encoders() -> None:
    for name, encoder in ENCODERS.items():
        ENCODERS[name] = dataclasses.replace(encoder, values=encoder.values | SMALL)
    ENCODERS["NomicBERT"] = dataclasses.replace(ENCODERS["NomicBERT"], config_class="GoneConfig")


def flags(folder, **changes) -> list[str]:
    values = {"models": "BERT-base NeoBERT NomicBERT", "lengths": "16 1024", "training_lengths": 16, "rounds": 2}
    values |= {
        "max_tokens": 64,
        "seconds": 0.01,
        "output_dir": folder / "runs",
        "results": folder / "results",
    } | changes
    return " ".join(f"--{name} {value}" for name, value in values.items()).split()


def finished_rounds(file) -> int:
    return sum(len(cell["rounds"]) for cell in json.loads(file.read_text())["cells"].values())


@pytest.mark.slow
def test_benchmark_resumes_and_reports(tmp_path, monkeypatch):
    """Killed with SIGKILL in the middle, the same command measures what is missing only; a model that is not there and
    lengths beyond a model's positions are lines of the report."""
    file = tmp_path / "runs" / "cpu.json"
    command = [sys.executable, "-c", SCRIPT, *flags(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (file.exists() and finished_rounds(file) > 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(file.read_text())["cells"]
    for name, encoder in ENCODERS.items():
        monkeypatch.setitem(ENCODERS, name, encoder)
    shrink_encoders()
    throughput.main(flags(tmp_path))
    cells = json.loads(file.read_text())["cells"]
    assert all(cells[key]["rounds"][: len(cell["rounds"])] == cell["rounds"] for key, cell in before.items())
    assert all(len(cell["rounds"]) == 2 for cell in cells.values())

    results = tmp_path / "results"
    rows = list(csv.DictReader((results / "throughput_cpu.csv").open()))
    found = {(row["model"], row["mode"], row["length"], row["layout"]) for row in rows}
    short = product(("BERT-base", "NeoBERT"), ("forward", "training"), ("16",), ("full", "ragged"))
    assert found == {*short, ("NeoBERT", "forward", "1024", "full"), ("NeoBERT", "forward", "1024", "ragged")}
    text = (results / "throughput_cpu.md").read_text()
    assert "* NomicBERT: NomicBERT is not available in transformers" in text
    assert "1,024-square float32 matrix products" in text and "## Memory of training\n\nNot measured." in text
    assert (results / "throughput_cpu.png").stat().st_size > 10_000

    stored = file.read_text()
    with pytest.raises(SettingsMismatch, match="max_tokens: 64 there, 128 now"):
        throughput.main(flags(tmp_path, max_tokens=128))
    assert file.read_text() == stored


@pytest.mark.gpu
@pytest.mark.slow
def test_benchmark_on_a_gpu(tmp_path):
    """Batches are searched for, memory is measured, compiled models run; gradient checkpointing needs less memory."""
    changes = {"lengths": "512", "training_lengths": "4096", "max_tokens": 65536, "max_rows": 16, "compile": "true"}
    command = [sys.executable, "-c", SCRIPT, *flags(tmp_path, **changes, models="NeoBERT ModernBERT-base")]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    cells = json.loads((tmp_path / "runs" / "cuda.json").read_text())["cells"].values()
    assert {(cell["model"], cell["compiled"]) for cell in cells if cell["rounds"]} == {
        *product(("NeoBERT", "ModernBERT-base"), (False, True))
    }
    assert all(len(cell["trials"]) > 1 for cell in cells if cell["layout"] == "full")
    peaks = {
        cell["mode"]: cell["trials"][-1]["peak_bytes"]
        for cell in cells
        if (cell["model"], cell["length"], cell["layout"], cell["compiled"]) == ("NeoBERT", 4096, "full", False)
    }
    assert 0 < peaks["checkpointing"] < peaks["training"]
    assert "Not measured." not in (tmp_path / "results" / "throughput_cuda.md").read_text()

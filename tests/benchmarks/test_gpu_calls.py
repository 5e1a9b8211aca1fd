"""What the three calls of ten minutes come to, by a clock that each measurement moves on by the time it may take."""

from functools import partial

import gpu
import gpu_probe
import pytest
import throughput
from gpu import GpuArguments, Study


class Clock:
    """In place of the module `time`."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Call(Study):
    """Nothing is measured, the clock moves on."""

    def __init__(self, settings: GpuArguments, clock: Clock):
        super().__init__(settings)
        self.clock = clock
        self.clock.now += 60 * settings.test_minutes
        self.ended = []

    def jobs(self):
        for job in super().jobs():
            yield job._replace(measure=partial(self.take, job))

    def take(self, job: gpu.Job) -> dict:
        opening = 0 if job.cell and job.cell[:4] == self.turn else job.opening
        self.clock.now += job.seconds + opening
        self.turn = job.cell and job.cell[:4]
        self.ended.append(job.key)
        return {**job.cell._asdict(), "rounds": [None]} if job.cell else {"seconds": 1.0}


@pytest.fixture
def calls(tmp_path, monkeypatch, request) -> list[list[str]]:
    """Keys that end in each of three calls, of which the first one runs the tests."""
    flash, clock = request.param, Clock()
    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(gpu, "CUDA", True)
    monkeypatch.setattr(gpu, "Sizes", partial(gpu_probe.Sizes, few=(32, 512, 2048)))
    for module in (throughput, gpu_probe):
        monkeypatch.setattr(module, "CUDA", True)
    monkeypatch.setattr(throughput, "flash_attention", lambda head_dim: flash)
    monkeypatch.setattr(gpu_probe, "find_faster_kernel", lambda *arguments: flash)
    monkeypatch.setattr(gpu_probe, "FASTER_KERNELS", {(gpu_probe.DTYPE, 64): (None, None)})
    found = []
    for test_minutes in (2.5, 0.0, 0.0):
        sizes = {"longest": 32_768, "least_tokens": 16_384, "most_tokens": 131_072, "test_minutes": test_minutes}
        study = Call(GpuArguments(output_dir=str(tmp_path), **sizes), clock)
        study.end = clock.now - 60 * test_minutes + 540
        study.run(study.pending())
        assert clock.now <= study.end
        found.append(study.ended)
    return found


def cells(model: str, attention: str, ways: tuple[bool, ...], mode: str, lengths: tuple[int, ...]) -> set[str]:
    return {
        f"{model} {attention} {way} {mode} {length} {layout}"
        for way in ways
        for length in lengths
        for layout in ("full", "ragged")
    }


FIRST, EVERY = (512, 4096, 8192), (512, 1024, 2048, 4096, 8192)


@pytest.mark.parametrize("calls", [None, "flash_attention_3"], indirect=True)
def test_three_calls_end_what_they_are_for(calls, request):
    """With a FlashAttention that all encoders take, and with what torch has."""
    flash = request.node.callspec.params["calls"]
    first, second, third = (set(call) for call in calls)
    assert {"copy", "product w12", "attention varlen 32768", "rotation", "swiglu", "norm"} <= first
    assert cells("NeoBERT", "sdpa", (False,), "forward", FIRST) <= first
    for attention in (flash or "flex_attention", "sdpa"):
        assert cells("ModernBERT-base", attention, (False,), "forward", FIRST) <= first
    done = first | second
    assert cells("NeoBERT", "sdpa", (False, True), "forward", EVERY) <= done
    assert cells("NeoBERT", "sdpa", (False, True), "training", EVERY) <= done
    done |= third
    assert cells("NeoBERT", "sdpa", (False, True), "forward", (32_768,)) <= done
    assert "NeoBERT sdpa False checkpointing 4096 full" in done and "profile of a block, training" in done
    for name in ("BERT-base", "BERT-large", "RoBERTa-base", "RoBERTa-large"):
        assert cells(name, "sdpa", (False,), "forward", (512,)) <= done
    for name in ("NomicBERT", "ModernBERT-base", "ModernBERT-large"):
        assert cells(name, "sdpa", (False,), "forward", EVERY) <= done

"""All checks that need a GPU, in the order of their worth, within a time: what is not reached is said.

    python benchmarks/gpu_checks.py        # make gpu_checks: ten minutes

First the numbers (backends, layouts and types; compiled training), then the speed of NeoBERT and others, then the
protocol of the paper's section 5.4 with a few steps. They need torch, transformers, accelerate, sentence-transformers,
peft, pytest and scipy. `--train_data` adds pretraining in compiled blocks, which needs the extra `train`.
"""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.common.settings import parse_config


ROOT = Path(__file__).parent.parent


@dataclass(kw_only=True)
class Settings:
    """For how long the checks run, and where their results go."""

    results: str = field(default="runs/gpu_checks", metadata={"help": "folder of logs and pages", "path": True})
    minutes: float = field(default=10.0, metadata={"help": "for all checks together"})
    train_data: str | None = field(default=None, metadata={"help": "a prepared folder to pretrain on", "path": True})


def checks(settings: Settings) -> dict[str, list[str]]:
    """The command of each check, without the interpreter."""
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    speed = ["benchmarks/gpu.py", "--results"]
    found = {
        "compiled": [*tests, "tests/model/test_parity.py", "-k", "compiled"],
        "numbers": [*tests, "tests/model"],
        "speed": [*speed, f"{settings.results}/speed"],
        "study": [*speed, f"{settings.results}/study", "--steps", "5"],
    }
    if settings.train_data is not None:
        launch = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/gpu.yaml"]
        options = ["--train_data", settings.train_data, "--max_steps", "60", "--logging_steps", "20"]
        options += ["--output_dir", f"{settings.results}/pretraining", "--report_to", "none"]
        options += ["--global_batch_tokens", "131072"]
        script = ["examples/pretrain.py", "--config", "configs/pretrain/neobert_1024.yaml"]
        found["pretraining"] = [*launch, *script, *options]
    return found


def run(commands: dict[str, list[str]], folder: Path, seconds: float) -> dict[str, str]:
    """How each command ended: `passed`, `failed`, `out of time`, or `not reached`. What it prints goes to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    end, found = time.monotonic() + seconds, dict.fromkeys(commands, "not reached")
    for name, command in commands.items():
        left = end - time.monotonic()
        if left <= 0:
            break
        with open(folder / f"{name}.log", "w") as log:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                found[name] = "failed" if process.wait(timeout=left) else "passed"
            except subprocess.TimeoutExpired:
                process.terminate()  # Pretraining then saves.
                process.wait()
                found[name] = "out of time"
        print(f"{name}: {found[name]}; {folder / name}.log", flush=True)
    return found


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(Settings, args=args)
    settings.results = str(Path(settings.results).absolute())
    found = run(checks(settings), Path(settings.results), 60 * settings.minutes)
    for name, ending in found.items():
        if ending == "not reached":
            print(f"{name}: {ending}")
    sys.exit("failed" in found.values())


if __name__ == "__main__":
    main()

"""The memory and time of training a model of the published size, with and without LoRA. Writes results/lora_memory.md.

    python benchmarks/lora_memory.py

A model with random weights is trained with configs/embeddings/lora.yaml, with and without its `lora_rank`, for some
steps on pairs of real text. Each setting runs in its own process, whose peak memory the system reports when it ends;
this includes libraries, loading and saving.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from circumstances import circumstances
from pretraining import ENVIRONMENT, ROOT
from transformers import AutoTokenizer, set_seed

from neobert_hf import NeoBERTConfig, NeoBERTForMaskedLM
from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import Count, check_ranges, parse_config


SETTINGS = {"LoRA": {}, "all weights": {"lora_rank": None}}


@dataclass
class MemoryArguments:
    datasets: str = field(
        default=f"{ROOT}/configs/embeddings/small_datasets.yaml", metadata={"help": "YAML file that describes pairs"}
    )
    tokenizer: str = field(default=f"{ROOT}/benchmarks/models/small", metadata={"help": "folder or Hub id"})
    output_dir: str = field(default="runs/lora_memory", metadata={"help": "folder of the model and the runs"})
    results: str = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    layers: Count = field(default=28, metadata={"help": "of the model"})
    hidden_size: Count = field(default=768, metadata={"help": "of the model"})
    steps: Count = field(default=5, metadata={"help": "of each training"})
    flags: str = field(default="--only wordnet_usage", metadata={"help": "further flags of both trainings"})

    def __post_init__(self):
        check_ranges(self)


def save_random(settings: MemoryArguments, folder: Path) -> int:
    """A model with random weights and a tokenizer. Returns the number of its parameters."""
    set_seed(0)
    sizes = {"num_hidden_layers": settings.layers, "hidden_size": settings.hidden_size}
    model = NeoBERTForMaskedLM(NeoBERTConfig(**sizes, num_attention_heads=settings.hidden_size // 64))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    # The tokenizer needs as many entries as the model; the added ones occur in no text.
    tokenizer.add_tokens([f"[unused{number}]" for number in range(model.config.vocab_size - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def without_evaluation(description: Path, file: Path) -> None:
    """Write a description of only the training datasets: with evaluation data, a run would end with an evaluation."""
    train = yaml.safe_load(description.read_text())["train"]
    for entry in train.values():
        entry["source"] = str((description.parent / entry["source"]).resolve())
    write_text(file, yaml.safe_dump({"train": train}, sort_keys=False))


def measure(settings: MemoryArguments, model: Path, name: str) -> dict[str, float]:
    """Train in a process of its own. Returns the peak of its memory in GB, and the seconds of a step."""
    folder = model.parent / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"extends": f"{ROOT}/configs/embeddings/lora.yaml", **SETTINGS[name]}
    write_text(folder / "settings.yaml", yaml.safe_dump(changes))
    # Processes of dataloader workers would not be counted.
    flags = (
        f"--config {folder}/settings.yaml --datasets {model.parent}/datasets.yaml --model {model} "
        f"--output_dir {folder}/run --bf16 false --use_cpu true --max_steps {settings.steps} "
        f"--save_steps {settings.steps} --logging_steps 1 --eval_strategy no --dataloader_num_workers 0 "
        f"--report_to none {settings.flags}"
    )
    command = [sys.executable, str(ROOT / "examples/finetune_embeddings.py"), *flags.split()]
    with open(folder / "output.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}; see {folder}/output.txt")
    log = json.loads((folder / "run/log.json").read_text())
    seconds = next(entry["train_runtime"] for entry in log if "train_runtime" in entry) / settings.steps
    # Linux reports it in units of 1,024 bytes.
    return {"peak_gb": usage.ru_maxrss * 1024 / 1e9, "seconds_a_step": seconds}


def report(settings: MemoryArguments, parameters: int, found: dict[str, dict[str, float]]) -> str:
    rows = [[name, f"{one['peak_gb']:.2f}", f"{one['seconds_a_step']:.1f}"] for name, one in found.items()]
    sections = (
        "# Memory of training with LoRA",
        circumstances("lora_memory", "sentence-transformers", "peft"),
        f"A NeoBERT of {settings.layers} layers x {settings.hidden_size} with random weights ({parameters:,} "
        "parameters with its decoder, which embeddings do not need) is trained with `configs/embeddings/lora.yaml`, "
        f"with and without `lora_rank`, for {settings.steps} steps on real pairs (`{settings.flags}`). The peak is the "
        "resident memory of the whole process, including Python, libraries, loading and saving. The seconds of a step "
        "include a share of saving. Other work ran on the machine, so they say little.",
        "\n".join(markdown_table(["trained", "peak, GB", "seconds a step"], rows)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(MemoryArguments, args=args)
    output, results = Path(settings.output_dir).resolve(), Path(settings.results)
    parameters = save_random(settings, output / "model")
    without_evaluation(Path(settings.datasets), output / "datasets.yaml")
    found = {name: measure(settings, output / "model", name) for name in SETTINGS}
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / "lora_memory.json", {"parameters": parameters, "found": found})
    write_text(results / "lora_memory.md", report(settings, parameters, found))


if __name__ == "__main__":
    main()

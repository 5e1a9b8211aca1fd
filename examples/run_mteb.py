"""Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, or on your own data.

    python examples/run_mteb.py --config configs/mteb/eng_v1.yaml --model runs/embeddings/model
    python examples/run_mteb.py --config configs/mteb/eng_v1.yaml --model chandar-lab/NeoBERT --types STS Clustering
    python examples/run_mteb.py --config configs/mteb/local.yaml --model runs/embeddings/model

Any dense Sentence Transformers model with a Transformers encoder, or a pretrained encoder, which gets mean pooling
(zero-shot). Run the same command again after an interruption: finished tasks are not repeated. `output_dir` gets a
folder for each model with a file for each task, and a report on all: `report.md`, `report.json`, `report.png`.

References: section 5.2.1, appendix D, Tables 4, 8 and 9, Figure 5.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import mteb
import torch
import yaml
from mteb.abstasks import AbsTask

import neobert_hf  # noqa: F401  # registers the architecture
from neobert_hf.common.results import ResultError, folder_of_results
from neobert_hf.common.settings import nearest, parse_config
from neobert_hf.embeddings.inference import fingerprint, load_model
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.local_tasks import read_local_tasks
from neobert_hf.evaluation.mteb.report import COLUMNS, read_published, write_report
from neobert_hf.evaluation.mteb.results import Results, Settings, subtasks


BENCHMARK = "MTEB(eng, v1)"


@dataclass
class MTEBArguments:
    model: str = field(metadata={"help": "folder or Hub name"})
    output_dir: str = field(metadata={"help": "where results of all models and the report go"})
    name: str | None = field(default=None, metadata={"help": "of the model in the report; made from `model` if unset"})
    mteb: bool = field(default=True, metadata={"help": f"the 56 tasks of {BENCHMARK}"})
    local_tasks: str | None = field(default=None, metadata={"help": "YAML file of tasks on your own data"})
    tasks: list[str] = field(default_factory=list, metadata={"help": "only these of the tasks; all if unset"})
    types: list[str] = field(default_factory=list, metadata={"help": f"only these types: {', '.join(COLUMNS)}"})
    instructions: str | None = field(
        default=None, metadata={"help": "YAML file, one for each MTEB task; the model's saved prompts if unset"}
    )
    prompt_template: str = field(
        default="{instruction} ", metadata={"help": "what stands before a text; as in fine-tuning"}
    )
    published: str | None = field(default=None, metadata={"help": "YAML file of rows for the report"})
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto", metadata={"help": "of the encoder; bfloat16 on a GPU, float32 on a CPU. Pooling is float32"}
    )
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest there is if unset"})
    max_length: int | None = field(default=None, metadata={"help": "tokens of a text; the model's own if unset"})
    truncate_dim: int | None = field(default=None, metadata={"help": "dimensions to keep (Matryoshka)"})
    batch_size: int = field(default=32, metadata={"help": "texts encoded at once"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})


def select_tasks(tasks: list[AbsTask], names: list[str], types: list[str]) -> list[AbsTask]:
    """The tasks of these names and types; empty lists select all.

    Raises:
        ValueError: if a name or a type is not there, or nothing is left.
    """
    known = {task.metadata.name: task for task in tasks}
    for group, wanted, there in (
        ("task", names, list(known)),
        ("type", types, sorted({task.metadata.type for task in tasks})),
    ):
        for name in wanted:
            if name not in there:
                raise ValueError(f"Unknown {group} {name!r}{nearest(name, there)}")
    chosen = [
        task
        for name, task in known.items()
        if (not names or name in names) and (not types or task.metadata.type in types)
    ]
    if not chosen:
        raise ValueError(f"No task is left of {len(tasks)}: `tasks` is {names}, `types` {types}.")
    return chosen


def read_instructions(file: str, tasks: list[AbsTask]) -> dict[str, str]:
    """One instruction for each task.

    Raises:
        ValueError: if one is for no task, or a task has none.
    """
    content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise ValueError(f"{file} must hold one `Task: instruction` a line.")
    names = {task.metadata.name for task in tasks}
    if surplus := sorted(content.keys() - names):
        raise ValueError(f"{file}: {surplus[0]!r} is no task of {BENCHMARK}{nearest(surplus[0], list(names))}")
    if missing := sorted(names - content.keys()):
        raise ValueError(f"{file} has no instruction for {', '.join(missing)}. Write an empty one ('') for none.")
    return content


def build_prompts(instructions: dict[str, str], tasks: list[AbsTask], template: str) -> dict[str, str]:
    """What stands before the texts of each task and, of a task of several parts, of each part.

    Raises:
        ValueError: if the template has no place for the instruction.
    """
    if "{instruction}" not in template:
        raise ValueError(f"`prompt_template` is {template!r}; it must contain {{instruction}}.")
    prompts = {}
    for task in tasks:
        instruction = instructions[task.metadata.name]
        prompt = template.replace("{instruction}", instruction) if instruction else ""
        prompts |= {part.metadata.name: prompt for part in (task, *subtasks(task))}
    return prompts


def collect_tasks(settings: MTEBArguments) -> tuple[list[AbsTask], dict[str, str] | None]:
    """The tasks to evaluate on and their prompts, None for those that the model was saved with."""
    benchmark = list(mteb.get_benchmark(BENCHMARK).tasks) if settings.mteb else []
    local, local_instructions = read_local_tasks(settings.local_tasks) if settings.local_tasks else ([], {})
    if clashing := {task.metadata.name for task in benchmark} & local_instructions.keys():
        raise ValueError(f"{settings.local_tasks}: {clashing.pop()} is a task of {BENCHMARK}; give yours another name.")
    chosen = select_tasks(benchmark + local, settings.tasks, settings.types)
    if settings.instructions is None and not any(local_instructions.values()):
        return chosen, None
    if settings.instructions is not None and not benchmark:
        raise ValueError("`instructions` are for the tasks of MTEB, and `mteb` is false; local tasks have their own.")
    if settings.instructions is None and benchmark:
        raise ValueError("The local tasks have instructions and MTEB's do not: set `instructions`, or `mteb` to false.")
    instructions = read_instructions(settings.instructions, benchmark) if benchmark else {}
    return chosen, build_prompts(instructions | local_instructions, benchmark + local, settings.prompt_template)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """16 bits on a GPU, 32 elsewhere, unless a type is given."""
    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def main(args: list[str] | None = None) -> None:
    # 1. Settings and tasks; nothing is loaded before all of them are found right
    (settings,) = parse_config(MTEBArguments, args=args)
    name = folder_of_results(settings.name, settings.model)
    tasks, prompts = collect_tasks(settings)
    published = read_published(settings.published) if settings.published else {}

    # 2. Model; its name is for the report only, its fingerprint tells it from others
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = choose_dtype(settings.dtype, device)
    model = load_model(
        settings.model, dtype, str(device), settings.max_length, settings.truncate_dim, settings.trust_remote_code
    )
    encoder = InstructionEncoder(model, name, prompts)
    conditions = Settings(
        fingerprint(model), str(dtype).removeprefix("torch."), model.max_seq_length, settings.truncate_dim
    )
    print(f"{name}: {conditions}, on {device}; {len(tasks)} tasks", flush=True)

    # 3. Evaluation, task by task
    output = Path(settings.output_dir)
    results = Results(output / name, conditions, encoder)
    results.check(tasks)
    failed = results.evaluate(tasks, settings.batch_size)

    # 4. Report on all models in the folder
    if len(failed) < len(tasks):
        benchmark = {task.metadata.name for task in mteb.get_benchmark(BENCHMARK).tasks}
        print(write_report(output, benchmark, published))
        print(f"{output / 'report.md'}, {output / 'report.json'}, {output / 'report.png'}", flush=True)
    if failed:
        sys.exit(
            "\n".join([f"{len(failed)} tasks failed:", *(f"  {task}: {error}" for task, error in failed.items())])
            + "\nRun the same command again for these only."
        )


if __name__ == "__main__":
    try:
        main()
    except ResultError as error:
        sys.exit(str(error))

"""The recipe of `examples/run_mteb.py`: settings, selection of tasks, and their instructions and prompts."""

from dataclasses import dataclass, field
from typing import Literal

import mteb
import torch
from mteb.abstasks import AbsTask
from sentence_transformers import SentenceTransformer

from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.embeddings.prompts import Separator, as_prompt, separator_of, separator_text
from neobert_hf.evaluation.mteb.encoder import TYPES_WITH_QUERIES, parts_of
from neobert_hf.evaluation.mteb.local_tasks import read_local_tasks
from neobert_hf.evaluation.mteb.report import TASK_TYPES


@dataclass
class MTEBSettings:
    """The model, its tasks, and how it encodes."""

    model: str = field(metadata={"help": "folder or Hub name", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder for the results of all models and the report", "path": True})
    name: str | None = field(
        default=None, metadata={"help": "name of the model in the report; the last part of `model` if unset"}
    )
    mteb: bool = field(default=True, metadata={"help": "evaluate on the tasks of `benchmark`"})
    benchmark: Literal["MTEB(eng, v1)", "MTEB(eng, v2)"] = field(
        default="MTEB(eng, v1)", metadata={"help": "the paper's, 56 tasks, or its successor, 41 tasks"}
    )
    local_tasks: str | None = field(
        default=None, metadata={"help": "YAML file of tasks on your own data", "path": True}
    )
    tasks: list[str] = field(default_factory=list, metadata={"help": "only these of the tasks; all if unset"})
    types: list[str] = field(default_factory=list, metadata={"help": f"only these types: {', '.join(TASK_TYPES)}"})
    instructions: str | None = field(
        default=None,
        metadata={"help": "YAML file with one for each MTEB task; the model's own prompts if unset", "path": True},
    )
    separator: Separator | None = field(
        default=None,
        metadata={"help": "between an instruction and a text; as in the model's own prompts if unset"},
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "in place of `separator`: the whole prompt, with {instruction} in it"}
    )
    published: list[str] = field(
        default_factory=list, metadata={"help": "YAML files of rows for the report", "path": True}
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto",
        metadata={"help": "of the encoder; auto: bfloat16 on a GPU, float32 on a CPU. Pooling is float32"},
    )
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest available if unset"})
    max_length: int | None = field(default=None, metadata={"help": "tokens of a text; the model's own limit if unset"})
    truncate_dim: int | None = field(default=None, metadata={"help": "dimensions to keep (Matryoshka)"})
    batch_size: int = field(default=32, metadata={"help": "texts encoded at once"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        template = self.prompt_template
        if template is not None and (self.separator is not None or "{instruction}" not in template):
            raise ValueError(
                f"`prompt_template` is {template!r} and `separator` {self.separator}: write {{instruction}} into the "
                "template, and leave `separator` out."
            )


def benchmark_tasks(name: str = "MTEB(eng, v1)") -> list[AbsTask]:
    """The tasks of a benchmark. Nothing is downloaded before they are evaluated."""
    return list(mteb.get_benchmark(name).tasks)


def benchmark_types(name: str) -> dict[str, str]:
    """The type of each task of a benchmark."""
    return {task.metadata.name: task.metadata.type for task in benchmark_tasks(name)}


# By task: its instruction for `query`, which is for all texts of a task without queries, and one for `document`.
Instructions = dict[str, dict[str, str]]


def collect_tasks(settings: MTEBSettings) -> tuple[list[AbsTask], Instructions]:
    """Collect the tasks to evaluate on.

    Returns:
        The tasks, and the instructions by task name. Tasks without instructions are evaluated with the prompts that the
        model was saved with.
    """
    tasks = benchmark_tasks(settings.benchmark) if settings.mteb else []
    local, instructions = read_local_tasks(settings.local_tasks) if settings.local_tasks else ([], {})
    if settings.instructions is not None and not settings.mteb:
        raise ValueError("`instructions` are for the tasks of MTEB, but `mteb` is false; local tasks have their own.")
    if settings.instructions is not None:
        instructions = read_instructions(settings.instructions, tasks) | instructions
    tasks = tasks + local
    names, types = ([getattr(task.metadata, name) for task in tasks] for name in ("name", "type"))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{settings.local_tasks}: {twice[0]} is a task of MTEB; give yours another name.")
    for kind, wanted, known in (("task", settings.tasks, names), ("type", settings.types, types)):
        for name in wanted:
            if name not in known:
                raise ValueError(f"Unknown {kind} {name!r}{nearest(name, sorted(set(known)))}")
    chosen = [
        task
        for task, name, kind in zip(tasks, names, types)
        if (not settings.tasks or name in settings.tasks) and (not settings.types or kind in settings.types)
    ]
    if not chosen:
        raise ValueError(f"No task is selected: `tasks` is {settings.tasks}, `types` is {settings.types}.")
    return chosen, instructions


def read_instructions(file: str, tasks: list[AbsTask]) -> Instructions:
    """Read one instruction for each task, or one for its queries and one for its documents. Refuse other tasks."""
    types = {task.metadata.name: task.metadata.type for task in tasks}
    instructions = {}
    for name, entry in read_yaml(file).items():
        roles = instructions[name] = entry if isinstance(entry, dict) else {"query": entry}
        if name not in types:
            raise ValueError(f"{file}: {name!r} is not a task of this benchmark{nearest(name, list(types))}")
        if not roles.keys() <= {"query", "document"} or not all(isinstance(text, str) for text in roles.values()):
            raise ValueError(f"{file}: {name} must be a text, or have the keys `query` and `document`.")
        if roles.get("document") and types[name] not in TYPES_WITH_QUERIES:
            raise ValueError(f"{file}: {name} is of the type {types[name]} and has no documents: give one instruction.")
    if missing := sorted(types.keys() - instructions.keys()):
        raise ValueError(f"{file} has no instruction for {', '.join(missing)}. Write an empty one ('') for none.")
    return instructions


def choose_template(settings: MTEBSettings, model: SentenceTransformer) -> str:
    """The prompt template, with {instruction} in it: as set, or else as in the model's own prompts."""
    if settings.prompt_template is not None:
        return settings.prompt_template
    separator = settings.separator or separator_of(model.prompts.values(), model.tokenizer) or "space"
    return as_prompt("{instruction}", separator_text(separator, model.tokenizer))


def build_prompts(instructions: Instructions, tasks: list[AbsTask], template: str) -> dict[str, dict[str, str]]:
    """The prompts for `query` and `document` of each task with instructions, and of each part of such a task.

    Args:
        template: what `choose_template` returns.
    """
    prompts = {}
    for task in (task for task in tasks if task.metadata.name in instructions):
        texts = {role: instructions[task.metadata.name].get(role, "").strip() for role in ("query", "document")}
        of_task = {role: template.replace("{instruction}", text) if text else "" for role, text in texts.items()}
        prompts |= {part.metadata.name: of_task for part in (task, *parts_of(task))}
    return prompts


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The given type; for `auto`, 16 bits on a GPU and 32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if device.type == "cuda" else torch.float32

"""The recipe of `examples/run_mteb.py`: settings, selection of tasks, and their instructions and prompts."""

from dataclasses import dataclass, field
from typing import Literal

import mteb
import torch
from mteb.abstasks import AbsTask
from sentence_transformers import SentenceTransformer

from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.embeddings.instructions import Separator, as_prompt, separator_of, separator_text
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
        if self.prompt_template is None:
            return
        if self.separator is not None:
            raise ValueError(
                f"`prompt_template` is {self.prompt_template!r} and `separator` {self.separator}: leave one out."
            )
        if "{instruction}" not in self.prompt_template:
            raise ValueError(f"`prompt_template` is {self.prompt_template!r}; it must contain {{instruction}}.")


def benchmark_tasks(name: str = "MTEB(eng, v1)") -> list[AbsTask]:
    """The tasks of a benchmark. Nothing is downloaded before they are evaluated."""
    return list(mteb.get_benchmark(name).tasks)


def benchmark_types(name: str) -> dict[str, str]:
    """The type of each task of a benchmark."""
    return {task.metadata.name: task.metadata.type for task in benchmark_tasks(name)}


# By task: its instruction, or one for `query` and one for `document`.
Instructions = dict[str, str | dict[str, str]]


def by_role(entry: str | dict[str, str]) -> dict[str, str]:
    """The instructions of a task by `query` and `document`: a single one is for queries."""
    return entry if isinstance(entry, dict) else {"query": entry}


def collect_tasks(settings: MTEBSettings) -> tuple[list[AbsTask], Instructions]:
    """Collect the tasks to evaluate on.

    Returns:
        The tasks, and the instructions by task name. Tasks without instructions are evaluated with the prompts that the
        model was saved with.
    """
    benchmark = benchmark_tasks(settings.benchmark) if settings.mteb else []
    local, local_instructions = read_local_tasks(settings.local_tasks) if settings.local_tasks else ([], {})
    if clashing := {task.metadata.name for task in benchmark} & local_instructions.keys():
        raise ValueError(
            f"{settings.local_tasks}: {clashing.pop()} is a task of {settings.benchmark}; give yours another name."
        )
    chosen = select_tasks(benchmark + local, settings.tasks, settings.types)
    if settings.instructions is not None and not benchmark:
        raise ValueError("`instructions` are for the tasks of MTEB, but `mteb` is false; local tasks have their own.")
    if settings.instructions is None and benchmark and any(local_instructions.values()):
        raise ValueError(
            "The local tasks have instructions, but MTEB's have none: set `instructions`, or `mteb` to false."
        )
    instructions = {}
    if settings.instructions is not None:
        instructions = read_instructions(settings.instructions, benchmark, settings.benchmark)
    given = {name: text for name, text in local_instructions.items() if text is not None}
    return chosen, instructions | given


def select_tasks(tasks: list[AbsTask], names: list[str], types: list[str]) -> list[AbsTask]:
    """The tasks of these names and types; empty lists select all."""
    known_names = [task.metadata.name for task in tasks]
    known_types = sorted({task.metadata.type for task in tasks})
    for kind, wanted, known in (("task", names, known_names), ("type", types, known_types)):
        for name in wanted:
            if name not in known:
                raise ValueError(f"Unknown {kind} {name!r}{nearest(name, known)}")
    chosen = [
        task
        for task in tasks
        if (not names or task.metadata.name in names) and (not types or task.metadata.type in types)
    ]
    if not chosen:
        raise ValueError(f"None of {len(tasks)} tasks is selected: `tasks` is {names}, `types` is {types}.")
    return chosen


def read_instructions(file: str, tasks: list[AbsTask], benchmark: str) -> Instructions:
    """Read one instruction for each task, or one for its queries and one for its documents. Refuse other tasks.

    Args:
        benchmark: its name, for errors.
    """
    instructions = read_yaml(file)
    types = {task.metadata.name: task.metadata.type for task in tasks}
    for name, entry in instructions.items():
        roles = by_role(entry)
        if not roles.keys() <= {"query", "document"} or not all(isinstance(text, str) for text in roles.values()):
            raise ValueError(
                f"{file} must hold one `Task: instruction` or `Task: {{query: ..., document: ...}}` a line."
            )
        if roles.get("document") and types.get(name, "Retrieval") not in TYPES_WITH_QUERIES:
            raise ValueError(f"{file}: {name} is of the type {types[name]} and has no documents: give one instruction.")
    names = types.keys()
    if surplus := sorted(instructions.keys() - names):
        raise ValueError(f"{file}: {surplus[0]!r} is not a task of {benchmark}{nearest(surplus[0], list(names))}")
    if missing := sorted(names - instructions.keys()):
        raise ValueError(f"{file} has no instruction for {', '.join(missing)}. Write an empty one ('') for none.")
    return instructions


def choose_template(settings: MTEBSettings, model: SentenceTransformer) -> str:
    """The prompt template, with {instruction} in it: as set, or else as in the model's own prompts."""
    if settings.prompt_template is not None:
        return settings.prompt_template
    separator = settings.separator or separator_of(model.prompts.values(), model.tokenizer) or "space"
    return as_prompt("{instruction}", separator_text(separator, model.tokenizer))


def build_prompts(
    instructions: Instructions, tasks: list[AbsTask], template: str, role: Literal["query", "document"] = "query"
) -> dict[str, str]:
    """The prompt of each task with an instruction and, if a task has several parts, of each part.

    Args:
        template: what `choose_template` returns.
        role: role of the texts. In tasks without queries, all texts count as `query` here.
    """
    prompts = {}
    for task in tasks:
        if task.metadata.name not in instructions:
            continue
        instruction = by_role(instructions[task.metadata.name]).get(role, "").strip()
        prompt = template.replace("{instruction}", instruction) if instruction else ""
        prompts |= {part.metadata.name: prompt for part in (task, *parts_of(task))}
    return prompts


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The given type; for `auto`, 16 bits on a GPU and 32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if device.type == "cuda" else torch.float32

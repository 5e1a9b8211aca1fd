"""The recipe of `examples/run_mteb.py`: settings, tasks with their instructions, and a file for each result."""

import json
import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mteb
from mteb.abstasks import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.results import TaskResult
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.run import check_same_identity
from neobert_hf.common.settings import nearest, read_yaml
from neobert_hf.embeddings.prompts import as_prompt
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder, parts_of
from neobert_hf.evaluation.mteb.local_tasks import Instruction, read_instruction, read_local_tasks
from neobert_hf.evaluation.mteb.report import TASK_TYPES
from neobert_hf.evaluation.results import ADVICE


@dataclass
class MTEBSettings:
    """The model, its tasks, and how it encodes."""

    model: str = field(metadata={"help": "folder or Hub name", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder for the results of all models and the report", "path": True})
    name: str | None = field(
        default=None, metadata={"help": "name of the model in the report; the last part of `model` if unset"}
    )
    benchmark: Literal["MTEB(eng, v1)", "MTEB(eng, v2)"] | None = field(
        default=None, metadata={"help": "the paper's, 56 tasks, or its successor, 41 tasks; neither if unset"}
    )
    local_tasks: str | None = field(
        default=None, metadata={"help": "YAML file of tasks on your own data", "path": True}
    )
    tasks: list[str] = field(
        default_factory=list,
        metadata={"help": f"only these tasks, or all of these types: {', '.join(TASK_TYPES)}; all if unset"},
    )
    instructions: str | None = field(
        default=None,
        metadata={"help": "YAML file with one for each MTEB task; the model's own prompts if unset", "path": True},
    )
    separator: Literal["space", "special_tokens"] | None = field(
        default=None,
        metadata={"help": "between an instruction and a text; as in the model's own prompts if unset"},
    )
    published: list[str] = field(
        default_factory=list, metadata={"help": "YAML files of rows for the report", "path": True}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "dtype of the encoder; pooling is float32"}
    )
    device: str | None = field(default=None, metadata={"help": "cuda, cpu, ...; the fastest available if unset"})
    max_length: int | None = field(default=None, metadata={"help": "tokens of a text; the model's own limit if unset"})
    truncate_dim: int | None = field(default=None, metadata={"help": "dimensions to keep (Matryoshka)"})
    batch_size: int = field(default=32, metadata={"help": "texts encoded at once"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    def __post_init__(self):
        if self.benchmark is None and self.local_tasks is None:
            raise ValueError("There is nothing to evaluate on: give `benchmark`, `local_tasks` or both.")
        if self.benchmark is None and self.instructions is not None:
            raise ValueError(
                "`instructions` are for the tasks of `benchmark`, which is not set; local tasks have theirs."
            )


# Tasks and instructions.


def benchmark_tasks(name: str | None = "MTEB(eng, v1)") -> list[AbsTask]:
    """The tasks of a benchmark, none of None. Nothing is downloaded before they are evaluated."""
    return list(mteb.get_benchmark(name).tasks) if name is not None else []


def benchmark_types(name: str | None) -> dict[str, str]:
    """The type of each task of a benchmark."""
    return {task.metadata.name: task.metadata.type for task in benchmark_tasks(name)}


def collect_tasks(settings: MTEBSettings) -> tuple[list[AbsTask], dict[str, Instruction]]:
    """Collect the tasks to evaluate on.

    Returns:
        The tasks, and the instructions by task name. Tasks without instructions are evaluated with the prompts that the
        model was saved with.
    """
    tasks = benchmark_tasks(settings.benchmark)
    local, instructions = read_local_tasks(settings.local_tasks) if settings.local_tasks else ([], {})
    if settings.instructions is not None:
        instructions = read_instructions(settings.instructions, tasks) | instructions
    tasks = tasks + local
    names = [task.metadata.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{settings.local_tasks}: {twice[0]} is a task of MTEB; give yours another name.")
    known = {*names, *(task.metadata.type for task in tasks)}
    for name in settings.tasks:
        if name not in known:
            raise ValueError(f"`tasks` has the unknown {name!r}{nearest(name, sorted(known))}")
    wanted = settings.tasks or names
    return [task for task in tasks if {task.metadata.name, task.metadata.type} & set(wanted)], instructions


def read_instructions(file: str, tasks: list[AbsTask]) -> dict[str, Instruction]:
    """Read the instruction of each task of a benchmark; see `read_instruction`. Other tasks are refused."""
    types = {task.metadata.name: task.metadata.type for task in tasks}
    content = read_yaml(file, "instructions")
    for name in content:
        if name not in types:
            raise ValueError(f"{file}: {name!r} is not a task of this benchmark{nearest(name, list(types))}")
    if missing := sorted(types.keys() - content.keys()):
        raise ValueError(f"{file} has no instruction for {', '.join(missing)}. Write an empty one ('') for none.")
    return {name: read_instruction(f"{file}: {name}", entry, types[name]) for name, entry in content.items()}


def build_prompts(
    instructions: dict[str, Instruction], tasks: list[AbsTask], separator: str
) -> dict[str, dict[str, str]]:
    """The prompts for `query` and `document` of each task with instructions, and of each part of such a task."""
    prompts = {}
    for task in (task for task in tasks if task.metadata.name in instructions):
        texts = instructions[task.metadata.name]
        of_task = {role: as_prompt(texts.get(role, ""), separator) for role in ("query", "document")}
        prompts |= {part.metadata.name: of_task for part in (task, *parts_of(task))}
    return prompts


def choose_separator(separator: str | None, model: SentenceTransformer) -> str:
    """What stands between an instruction and a text: as set, or else as in the model's own prompts.

    Special tokens are the end of one text and the beginning of the next: `[SEP] [CLS]` for BERT's tokenizers, including
    the published model's, and `</s> <s>` for RoBERTa's. The paper does not say what the separator is, and the released
    code handles it in two ways. Its wrapper for MTEB (scripts/evaluation/wrappers.py) puts `sep_token + " " +
    bos_token` there, for queries and documents of retrieval and reranking, and nothing before other texts; BERT's
    tokenizers have no `bos_token`, so their `cls_token` is used here. Its script for MTEB (run_mteb.py) does not use
    that wrapper and never uses an instruction. It is not known which of these produced the paper's numbers.

    Raises:
        ValueError: if the tokenizer lacks these tokens, or treats them as ordinary text.
    """
    tokenizer = model.tokenizer
    end, beginning = tokenizer.sep_token or tokenizer.eos_token, tokenizer.bos_token or tokenizer.cls_token
    special = f"{end} {beginning}"
    if separator is None and any(prompt.rstrip().endswith(special) for prompt in model.prompts.values()):
        separator = "special_tokens"
    if separator != "special_tokens":
        return " "
    ids = tokenizer(f"a{special}a", add_special_tokens=False)["input_ids"]
    if not end or not beginning or not set(tokenizer.convert_tokens_to_ids([end, beginning])) <= set(ids):
        raise ValueError(
            f"`separator` is special_tokens, but the tokenizer has no special tokens for the end of a text ({end}) and "
            f"its beginning ({beginning}), or reads them as words. Set it to space."
        )
    return special


# Results.


class Evaluation:
    """The results of one model: a file `<task>.json` for each task, written whole when the task is finished.

    A file also holds everything that its result depends on. (MTEB's own cache knows a model by its name, and takes a
    result whatever prompts or data it came from.) The parts of a task, such as the forums of CQADupstack, have their
    files in `parts/`.

    Args:
        folder: the folder of the model.
        encoder: the model.
        settings: what all results of the model depend on; `model` is its fingerprint.
        batch_size: texts encoded at once.
    """

    def __init__(self, folder: Path, encoder: InstructionEncoder, settings: dict[str, Any], batch_size: int):
        self.folder = folder
        self.encoder = encoder
        self.settings = settings
        self.batch_size = batch_size

    def evaluate(self, tasks: list[AbsTask]) -> dict[str, str]:
        """Evaluate on the tasks that have no result yet.

        Returns:
            The error of each task that failed, by its name. The other tasks are still evaluated.

        Raises:
            SettingsMismatch: if the folder has a result of other weights or settings, before anything is evaluated.
        """
        chosen = {each.metadata.name: each for task in tasks for each in (task, *parts_of(task))}
        for file in self.folder.rglob("*.json"):
            stored, now = json.loads(file.read_text(encoding="utf-8"))["settings"], self.settings
            if file.stem in chosen:
                now = self._depends_on(chosen[file.stem])
            else:
                # A row of the report is one model, also on the tasks that are not evaluated now.
                stored = {name: stored[name] for name in now}
            check_same_identity(file, stored, now, ADVICE)
        failed = {}
        for task in tqdm(tasks, desc="Tasks", unit="task"):
            try:
                # Other processes may evaluate other tasks of the same model.
                with folder_lock(self.folder / task.metadata.name):
                    self._result_of(task, self.folder)
            except Exception as error:
                traceback.print_exc()
                failed[task.metadata.name] = f"{type(error).__name__}: {error}"
        return failed

    def _depends_on(self, task: AbsTask) -> dict[str, Any]:
        """What the result of a task depends on. The context of a contextual model follows from this."""
        return self.settings | {
            "type": task.metadata.type,
            "metric": task.metadata.main_score,
            "prompts": self.encoder.prompts_of(task.metadata),
            "dataset": " ".join(sorted(part.metadata.revision for part in parts_of(task))),
        }

    def _result_of(self, task: AbsTask, folder: Path) -> TaskResult:
        """The result in the file of a task, which is written if there is none."""
        file = folder / f"{task.metadata.name}.json"
        if file.exists():
            return TaskResult.from_dict(json.loads(file.read_text(encoding="utf-8"))["result"])
        if isinstance(task, AbsTaskAggregate):
            result = task.combine_task_results(
                [self._result_of(part, self.folder / "parts") for part in parts_of(task)]
            )
        else:
            encoding = {"batch_size": self.batch_size, "show_progress_bar": True}
            options = {"cache": None, "co2_tracker": False, "show_progress_bar": False}
            (result,) = mteb.evaluate(self.encoder, task, encode_kwargs=encoding, **options).task_results
        score, settings = float(result.get_score()), self._depends_on(task)
        if not math.isfinite(score):
            raise FloatingPointError(f"The score ({settings['metric']}) is {score}.")
        content = {"task": task.metadata.name, "type": settings["type"], "metric": settings["metric"], "score": score}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, content | {"settings": settings, "result": json.loads(result.model_dump_json())})
        return result

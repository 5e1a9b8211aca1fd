"""MTEB as a recipe: settings, tasks with their instructions, and a file for each result."""

import json
import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mteb
import torch
from mteb.abstasks import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.results import TaskResult
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from neobert_hf.common.files import folder_lock, write_json
from neobert_hf.common.paths import name_of_model
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import check_inputs, check_same_identity, mark_folder
from neobert_hf.common.settings import check_numbers, nearest, read_yaml
from neobert_hf.embeddings.models import embedding_fingerprint, load_embedding_model
from neobert_hf.embeddings.prompts import as_prompt
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder, parts_of
from neobert_hf.evaluation.mteb.local_tasks import Instruction, read_instruction, read_local_tasks
from neobert_hf.evaluation.mteb.report import TASK_TYPES, read_published, write_report
from neobert_hf.evaluation.results import ADVICE


@dataclass
class MTEBSettings:
    """The model, its tasks, and how it encodes."""

    model: str = field(metadata={"help": "folder or Hub name", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder for the results of all models and the report", "path": True})
    name: str | None = field(
        default=None, metadata={"help": "name of the model in the report; the last part of `model` if unset"}
    )
    benchmark: str | None = field(
        default=None,
        metadata={"help": "MTEB(eng, v1), the paper's, or any other one of MTEB, such as MTEB(eng, v2) or NanoBEIR"},
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
        check_numbers(self, dict.fromkeys(("max_length", "truncate_dim", "batch_size"), "1 or more"))
        if self.benchmark is None and self.local_tasks is None:
            raise ValueError("There is nothing to evaluate on: give `benchmark`, `local_tasks` or both.")
        if self.benchmark is None and self.instructions is not None:
            raise ValueError(
                "`instructions` are for the tasks of `benchmark`, which is not set; local tasks have theirs."
            )


@recipe
def run_mteb(settings: MTEBSettings) -> Result:
    """Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, another benchmark, or your own data.

    The model is any dense Sentence Transformers model with a Transformers encoder, or a pretrained encoder, which gets
    mean pooling (zero-shot). Called again after an interruption, it does not repeat finished tasks. `output_dir` gets a
    folder for each model with a file for each task, and a report on all models, `report.md`.

    Returns:
        `output`: the report; `scores`: the main metric of each task, by task and metric.

    Raises:
        RuntimeError: with the error of each task that failed, when all others have their result.
    """
    # 1. The tasks, which are checked before anything is loaded
    name = name_of_model(settings.name, settings.model)
    tasks, instructions = collect_tasks(settings)
    published = read_published(settings.published)
    output = Path(settings.output_dir)
    inputs = {each: getattr(settings, each) for each in ("model", "local_tasks", "instructions", "published")}
    check_inputs(output, (name, "report.md"), inputs)

    # 2. The model. Its name is for the report only; results are matched to a model by its fingerprint
    model = load_embedding_model(
        settings.model,
        getattr(torch, settings.dtype),
        settings.max_length,
        device=settings.device,
        truncate_dim=settings.truncate_dim,
        trust_remote_code=settings.trust_remote_code,
    )
    prompts = build_prompts(instructions, tasks, choose_separator(settings.separator, model))
    encoder = InstructionEncoder(model, name, prompts, tasks)
    identity = {
        "model": embedding_fingerprint(model),
        "dtype": settings.dtype,
        "max_length": model.max_seq_length,
        "truncate_dim": settings.truncate_dim,
    }
    print(f"{name}: {identity}, on {model.device}; {len(tasks)} tasks", flush=True)

    # 3. Evaluation, task by task
    # Several processes may write the folder; each locks its task. Results say themselves whose they are.
    mark_folder(output, "run_mteb", (name, "report.md"))
    scores, failed = Evaluation(output / name, encoder, identity, settings.batch_size).evaluate(tasks)

    # 4. Report on all models in the folder
    if scores:
        print(write_report(output, settings.benchmark, benchmark_types(settings.benchmark), published))
        print(output / "report.md", flush=True)
    if failed:
        errors = "\n".join(f"  {task}: {error}" for task, error in failed.items())
        raise RuntimeError(f"{len(failed)} of {len(tasks)} tasks failed, which alone are repeated next time:\n{errors}")
    return Result(output=output / "report.md", scores=scores)


# Tasks and instructions.


def benchmark_tasks(name: str | None = "MTEB(eng, v1)") -> list[AbsTask]:
    """The tasks of a benchmark, none of None. Nothing is downloaded before they are evaluated.

    Raises:
        ValueError: if MTEB has no benchmark of this name.
    """
    try:
        return list(mteb.get_benchmark(name).tasks) if name is not None else []
    except KeyError as error:
        raise ValueError(f"`benchmark`: {error.args[0]} `mteb.get_benchmarks()` lists all.") from error


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
        identity: what all results of the model depend on; `model` is its fingerprint.
        batch_size: texts encoded at once.
    """

    def __init__(self, folder: Path, encoder: InstructionEncoder, identity: dict[str, Any], batch_size: int):
        self.folder = folder
        self.encoder = encoder
        self.identity = identity
        self.batch_size = batch_size

    def evaluate(self, tasks: list[AbsTask]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Evaluate on the tasks that have no result yet.

        Returns:
            The main metric of each task, by task and metric; and the error of each task that failed, by its name. The
            other tasks are still evaluated.

        Raises:
            SettingsMismatch: if the folder has a result of other weights or settings, before anything is evaluated.
        """
        chosen = {each.metadata.name: each for task in tasks for each in (task, *parts_of(task))}
        for file in self.folder.rglob("*.json"):
            stored, now = json.loads(file.read_text(encoding="utf-8"))["identity"], self.identity
            if file.stem in chosen:
                now = self._identity_of(chosen[file.stem])
            else:
                # A row of the report is one model, also on the tasks that are not evaluated now.
                stored = {name: stored[name] for name in now}
            check_same_identity(file, stored, now, ADVICE)
        scores, failed = {}, {}
        for task in tqdm(tasks, desc="Tasks", unit="task"):
            name = task.metadata.name
            try:
                # Other processes may evaluate other tasks of the same model.
                with folder_lock(self.folder / name):
                    result = self._result_of(task, self.folder)
                scores[name] = {task.metadata.main_score: float(result.get_score())}
            except Exception as error:
                # Data that cannot be reached or read are no bug: the line at the end says enough.
                if not isinstance(error, OSError):
                    traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
        return scores, failed

    def _identity_of(self, task: AbsTask) -> dict[str, Any]:
        """What the result of a task depends on. The context of a contextual model follows from this."""
        return self.identity | {
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
        score, identity = float(result.get_score()), self._identity_of(task)
        if not math.isfinite(score):
            raise FloatingPointError(f"The score ({identity['metric']}) is {score}.")
        content = {"task": task.metadata.name, "type": identity["type"], "metric": identity["metric"], "score": score}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, content | {"identity": identity, "result": json.loads(result.model_dump_json())})
        return result

"""Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, on its successor, or on your own data.

    python examples/run_mteb.py --config configs/mteb/eng_v1.yaml --model runs/embeddings/model
    python examples/run_mteb.py --config configs/mteb/eng_v1.yaml --model chandar-lab/NeoBERT --tasks STS Clustering
    python examples/run_mteb.py --config configs/mteb/eng_v2.yaml --model runs/embeddings/model
    python examples/run_mteb.py --config configs/mteb/local.yaml --model runs/embeddings/model

The model is any dense Sentence Transformers model with a Transformers encoder, or a pretrained encoder, which gets mean
pooling (zero-shot). After an interruption, run the same command again: finished tasks are not repeated. `output_dir`
gets a folder for each model with a file for each task, and a report on all models, `report.md`.

References: section 5.2.1, appendix D, Tables 4, 5, 8 and 9.
"""

import sys
from pathlib import Path

import torch

import neobert_hf  # noqa: F401  # registers the architecture
from neobert_hf.common.run import check_inputs, mark_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.models import embedding_fingerprint, load_embedding_model
from neobert_hf.evaluation.mteb.encoder import InstructionEncoder
from neobert_hf.evaluation.mteb.recipe import (
    Evaluation,
    MTEBSettings,
    benchmark_types,
    build_prompts,
    choose_separator,
    collect_tasks,
)
from neobert_hf.evaluation.mteb.report import read_published, write_report
from neobert_hf.evaluation.results import name_of_model


def main(args: list[str] | None = None) -> None:
    # 1. Settings and tasks, all of which are checked before anything is loaded
    (settings,) = parse_config(MTEBSettings, args=args)
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
    depends_on = {
        "model": embedding_fingerprint(model),
        "dtype": settings.dtype,
        "max_length": model.max_seq_length,
        "truncate_dim": settings.truncate_dim,
    }
    print(f"{name}: {depends_on}, on {model.device}; {len(tasks)} tasks", flush=True)

    # 3. Evaluation, task by task
    # Several processes may write the folder; each locks its task. Results say themselves whose they are.
    mark_folder(output, "run_mteb.py", ("report.md",))
    failed = Evaluation(output / name, encoder, depends_on, settings.batch_size).evaluate(tasks)

    # 4. Report on all models in the folder
    if len(failed) < len(tasks):
        print(write_report(output, settings.benchmark, benchmark_types(settings.benchmark), published))
        print(output / "report.md", flush=True)
    if failed:
        errors = "\n".join(f"  {task}: {error}" for task, error in failed.items())
        sys.exit(f"{len(failed)} tasks failed:\n{errors}\nRun the same command again: it repeats only these.")


if __name__ == "__main__":
    run_script(main)

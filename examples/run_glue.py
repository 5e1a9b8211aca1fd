"""Fine-tune and evaluate any encoder on GLUE as the paper does (section 5.1, appendix C), or on your own task.

    python examples/run_glue.py --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/run_glue.py \\
        --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all --grid true

Without `--grid` each task gets the hyperparameters of Table 6. RTE, STS-B, MRPC and QNLI start from the best MNLI
model. Each process of `accelerate launch`, on one machine or several, takes runs of its own, on its own GPU, and all
write to the same folder. After an interruption, run the same command again: finished runs are not repeated, and an
interrupted run resumes, on a CPU bit for bit. `output_dir` gets a folder for each model, with a JSON file for each run
and the best model of each task, and a report on all models: `report.md`, `report.json`.
"""

from pathlib import Path

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.files import check_inputs, mark_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.recipe import (
    GlueArguments,
    GlueEvaluation,
    GlueSettings,
    plan_runs,
    separate_processes,
)
from neobert_hf.evaluation.glue.report import read_published, write_report
from neobert_hf.evaluation.glue.tasks import choose_tasks
from neobert_hf.evaluation.results import name_of_model


def main(args: list[str] | None = None) -> None:
    # 1. Settings, all runs, and this process's share of them
    process, processes = separate_processes()
    settings, arguments = parse_config(GlueSettings, GlueArguments, args=args)
    tasks = choose_tasks(settings.task_config, settings.task)
    runs = plan_runs(settings, arguments, tasks)
    published = read_published(settings.published) if settings.published else None

    output, name = Path(arguments.output_dir), name_of_model(settings.name, settings.model)
    reports = ("report.md", "report.json")
    inputs = ("model", "task_config", "data_dir", "hyperparameters", "published")
    check_inputs(output, (name, *reports), {each: getattr(settings, each) for each in inputs})

    # 2. The weights, data and earlier results of all tasks are checked before anything is trained
    evaluation = GlueEvaluation(settings, arguments, output / name, tasks, runs)
    evaluation.prepare()
    # Several processes may write the folder; each locks the folder of its run. Results say themselves whose they are.
    mark_folder(output, "run_glue.py", reports)

    # 3. Fine-tuning, run by run
    print(f"{name}: {len(runs)} runs on {len(tasks)} tasks; process {process + 1} of {processes}", flush=True)
    for run in runs[process::processes]:
        evaluation.complete(run)

    # 4. Report on all models in the folder, with the runs that other processes have finished so far
    print(write_report(output, published), flush=True)


if __name__ == "__main__":
    run_script(main)

"""Fine-tune and evaluate any encoder on GLUE as the paper does (section 5.1, appendix C), or on your own task.

    python examples/run_glue.py --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all
    python examples/run_glue.py --config configs/glue/paper.yaml --model chandar-lab/NeoBERT --task all --grid true

Without `--grid` each task gets the hyperparameters of Table 6. RTE, STS-B, MRPC and QNLI start from the best MNLI
model. After an interruption, run the same command again: finished runs are not repeated, and an interrupted run
resumes, on a CPU bit for bit. To use several GPUs, start the command for each with other tasks (MNLI before those that
start from it); all may write to the same folder. `output_dir` gets a folder for each model, with a JSON file for each
run and the best model of each task, and a report on all models, `report.md`.
"""

from pathlib import Path

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.run import check_inputs, mark_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.glue.recipe import GlueArguments, GlueEvaluation, GlueSettings, plan_runs
from neobert_hf.evaluation.glue.report import read_published, write_report
from neobert_hf.evaluation.glue.tasks import choose_tasks
from neobert_hf.evaluation.results import name_of_model
from neobert_hf.training.run import check_alone


def main(args: list[str] | None = None) -> None:
    # 1. Settings and all runs
    settings, arguments = parse_config(GlueSettings, GlueArguments, args=args)
    check_alone(arguments)
    tasks = choose_tasks(settings.task_config, settings.task)
    runs = plan_runs(settings, arguments, tasks)
    published = read_published(settings.published) if settings.published else None

    output, name = Path(arguments.output_dir), name_of_model(settings.name, settings.model)
    inputs = ("model", "task_config", "data_dir", "hyperparameters", "published")
    check_inputs(output, (name, "report.md"), {each: getattr(settings, each) for each in inputs})

    # 2. The weights, data and earlier results of all tasks are checked before anything is trained
    evaluation = GlueEvaluation(settings, arguments, output / name, tasks, runs)
    # Results say themselves whose they are, so that several commands may write the folder; each locks that of its run.
    mark_folder(output, "run_glue.py", ("report.md",))

    # 3. Fine-tuning, run by run
    print(f"{name}: {len(runs)} runs on {len(tasks)} tasks", flush=True)
    for run in runs:
        evaluation.complete(run)

    # 4. Report on all models in the folder
    print(write_report(output, published), flush=True)


if __name__ == "__main__":
    run_script(main)

"""Fine-tune any encoder to classify texts: your own CSV, TSV, JSON lines or Parquet, or a dataset of the Hub.

    python examples/run_classification.py --model chandar-lab/NeoBERT --data my/data.csv --output_dir runs/mine

The script guesses the columns and whether a row has one class or several, and prints its guess; settings can name
others. Bad rows are reported as errors before training. After an interruption, run the same command
again: it resumes from the newest complete checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best of all
evaluations, with a model card), a report with the scores, each label and the worst errors (`report.md`,
`report.json`), and beside them the scores of a bag of words.
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.tasks.classification import Classification, ClassificationSettings
from neobert_hf.tasks.recipe import fine_tune, task_folder, write_report
from neobert_hf.tasks.rows import read_splits
from neobert_hf.training.fine_tuning import FineTuningArguments


def main(args: list[str] | None = None) -> None:
    settings, arguments = parse_config(ClassificationSettings, FineTuningArguments, args=args)
    with task_folder(settings, arguments):
        # 1. The rows of all splits, checked
        task = Classification(settings, read_splits(settings))

        # 2. Training to the end; `model/` has the weights of the best evaluation
        trainer = fine_tune(task, settings, arguments)

        # 3. Scores on all held-out rows beside those of a baseline, and the model card
        print(write_report(task, settings, trainer), flush=True)


if __name__ == "__main__":
    run_script(main)

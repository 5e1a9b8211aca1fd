"""Fine-tune any encoder to classify texts: your own CSV, TSV, JSON lines or Parquet, or a dataset of the Hub.

    python examples/run_classification.py --config configs/tasks/classification.yaml --model chandar-lab/NeoBERT \\
        --data reviews.csv --output_dir runs/reviews

The script guesses the columns and the kind of labels (one class per row, several, or a number) and prints its guess;
settings can name others. Bad rows are reported as errors before training. After an interruption, run the same command
again: it resumes from the newest complete checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best of all
evaluations, with a model card), a report with the scores, each label and the worst errors (`report.md`,
`report.json`), and a confusion matrix as a picture.
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.script_errors import run_script
from neobert_hf.tasks.classification import Classification, ClassificationSettings
from neobert_hf.tasks.recipe import open_run


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and the rows of all splits
    with open_run(ClassificationSettings, args) as run:
        # 2. Columns and labels, checked
        task = Classification(run.settings, run.splits, run.arguments.label_smoothing_factor)

        # 3. Training to the end; the weights of the best evaluation are kept
        trainer, encoded = run.train(task)

        # 4. Scores on all held-out rows, the model with its card, and the report
        print(run.report(task, trainer, encoded), flush=True)


if __name__ == "__main__":
    run_script(main)

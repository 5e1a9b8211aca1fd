"""Fine-tune any encoder to tell classes of texts: your own CSV, TSV, JSON lines or Parquet, or a dataset of the Hub.

    python examples/run_classification.py --config configs/tasks/classification.yaml --model chandar-lab/NeoBERT \\
        --data reviews.csv --output_dir runs/reviews

Columns and the kind of labels (one class a row, several, or a number) are guessed and said; settings can name others.
Bad rows are errors before training. Run the same command again after an interruption: it resumes from the newest
complete checkpoint, to the bit on a CPU. `output_dir` gets `model/` with a card, the best of all evaluations, and a
report with scores, each label, the worst errors (`report.md`, `report.json`) and a picture of confused classes.
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.tasks.classification import Classification, ClassificationSettings
from neobert_hf.tasks.recipe import open_run


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and the rows of all splits
    with open_run(ClassificationSettings, args) as run:
        # 2. Columns and labels, checked
        task = Classification(run.settings, run.splits, run.arguments.label_smoothing_factor)

        # 3. Training to the end, and the best of all evaluations
        trainer, encoded = run.train(task)

        # 4. Scores on all held-out rows, the model with its card, the report
        print(run.report(task, trainer, encoded), flush=True)


if __name__ == "__main__":
    main()

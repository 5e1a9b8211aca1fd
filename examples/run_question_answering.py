"""Fine-tune any encoder to find answers in texts, as in SQuAD v1 and v2.

    python examples/run_question_answering.py --config configs/tasks/question_answering.yaml \\
        --model chandar-lab/NeoBERT --data rajpurkar/squad_v2 --output_dir runs/squad_v2

The data are a folder with train.* and validation.* (SQuAD's own JSON, Parquet or JSON lines), or a dataset of the Hub.
Texts longer than a window are read in several overlapping windows. If some training questions have no answer, the model
learns to say that there is none. After an interruption, run the same command again: it resumes from the newest complete
checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best of all evaluations, with a model card), a report
with exact match and F1 (`report.md`, `report.json`), a picture of F1 by length (`f1_by_length_validation.png`), and the
best answers to every question (`answers_validation.json`).
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.script_errors import run_script
from neobert_hf.tasks.question_answering import READERS, QuestionAnswering, QuestionAnsweringSettings
from neobert_hf.tasks.recipe import open_run


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and the rows of all splits
    with open_run(QuestionAnsweringSettings, args, READERS) as run:
        # 2. Questions, texts and answers, checked
        task = QuestionAnswering(run.settings, run.splits, run.arguments.label_smoothing_factor)

        # 3. Training to the end; the weights of the best evaluation are kept
        trainer, encoded = run.train(task)

        # 4. Scores on all held-out rows, the model with its card, and the report
        print(run.report(task, trainer, encoded), flush=True)


if __name__ == "__main__":
    run_script(main)

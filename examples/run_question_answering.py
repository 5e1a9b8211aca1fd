"""Fine-tune any encoder to find answers in texts, as in SQuAD v1 and v2.

    python examples/run_question_answering.py --model chandar-lab/NeoBERT --data my/questions.jsonl \\
        --output_dir runs/mine

The data are a folder with train.* and validation.* (SQuAD's own JSON, Parquet or JSON lines), or a dataset of the Hub.
Texts longer than a window are read in several overlapping windows. If some training questions have no answer, the model
learns to say that there is none. After an interruption, run the same command again: it resumes from the newest complete
checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best evaluation, with a model card) and a report with
exact match and F1, beside those of a baseline (`report.md`, `report.json`).
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.tasks.question_answering import READERS, QuestionAnswering, QuestionAnsweringSettings
from neobert_hf.tasks.recipe import fine_tune, task_folder, write_report
from neobert_hf.tasks.rows import read_splits
from neobert_hf.training.fine_tuning import FineTuningArguments


def main(args: list[str] | None = None) -> None:
    settings, arguments = parse_config(QuestionAnsweringSettings, FineTuningArguments, args=args)
    with task_folder(settings, arguments):
        # 1. The rows of all splits, checked
        task = QuestionAnswering(settings, read_splits(settings, READERS))

        # 2. Training to the end; `model/` has the weights of the best evaluation
        trainer = fine_tune(task, settings, arguments)

        # 3. Scores on all held-out rows beside those of a baseline, and the model card
        print(write_report(task, settings, trainer), flush=True)


if __name__ == "__main__":
    run_script(main)

"""Fine-tune any encoder to tag words: names of entities, parts of speech.

    python examples/run_token_classification.py --model chandar-lab/NeoBERT --data my/tags.conll \\
        --output_dir runs/mine

The data are a folder with train.*, validation.* and test.* (CoNLL files, Parquet or JSON lines), one file,
or a dataset of the Hub. Entities (tags such as B-PER) are scored by seqeval, other tags by accuracy. After an
interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets `model/` (the best of all evaluations, with a model card), a report with the scores and each tag
(`report.md`, `report.json`), and beside them the scores of giving every word its commonest tag.
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.tasks.recipe import fine_tune, task_folder, write_report
from neobert_hf.tasks.rows import read_splits
from neobert_hf.tasks.token_classification import READERS, TokenClassification, TokenClassificationSettings
from neobert_hf.training.fine_tuning import FineTuningArguments


def main(args: list[str] | None = None) -> None:
    settings, arguments = parse_config(TokenClassificationSettings, FineTuningArguments, args=args)
    with task_folder(settings, arguments):
        # 1. The rows of all splits, checked
        task = TokenClassification(settings, read_splits(settings, READERS))

        # 2. Training to the end; `model/` has the weights of the best evaluation
        trainer = fine_tune(task, settings, arguments)

        # 3. Scores on all held-out rows beside those of a baseline, and the model card
        print(write_report(task, settings, trainer), flush=True)


if __name__ == "__main__":
    run_script(main)

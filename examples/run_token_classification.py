"""Fine-tune any encoder to tag words: names of entities, parts of speech.

    python examples/run_token_classification.py --config configs/tasks/token_classification.yaml \\
        --model chandar-lab/NeoBERT --data conll2003/ --output_dir runs/ner

The data are a folder with train.*, validation.* and test.* (CoNLL or CoNLL-U files, Parquet or JSON lines), one file,
or a dataset of the Hub. Entities (tags such as B-PER) are scored by seqeval, other tags by accuracy. After an
interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets `model/` (the best of all evaluations, with a model card), a report with the scores and each tag
(`report.md`, `report.json`), and a confusion matrix of the tags as a picture (`confusion_validation.png`).
"""

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.script_errors import run_script
from neobert_hf.tasks.recipe import open_run
from neobert_hf.tasks.token_classification import READERS, TokenClassification, TokenClassificationSettings


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and the rows of all splits
    with open_run(TokenClassificationSettings, args, READERS) as run:
        # 2. Words and tags, checked
        task = TokenClassification(run.settings, run.splits)

        # 3. Training to the end; the weights of the best evaluation are kept
        trainer, encoded = run.train(task)

        # 4. Scores on all held-out rows, the model with its card, and the report
        print(run.report(task, trainer, encoded), flush=True)


if __name__ == "__main__":
    run_script(main)

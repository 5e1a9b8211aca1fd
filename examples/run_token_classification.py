"""Fine-tune any encoder to tag words: names of entities, parts of speech.

    python examples/run_token_classification.py --model chandar-lab/NeoBERT --data my/tags.conll \\
        --output_dir runs/mine

The data are a folder with train.*, validation.* and test.* (CoNLL files, Parquet or JSON lines), one file,
or a dataset of the Hub. Entities (tags such as B-PER) are scored by seqeval, other tags by accuracy. After an
interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets `model/` (the best of all evaluations, with a model card), a report with the scores and each tag
(`report.md`, `report.json`), and beside them the scores of giving every word its commonest tag.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("tag")

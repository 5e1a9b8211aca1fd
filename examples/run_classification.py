"""Fine-tune any encoder to classify texts: your own CSV, TSV, JSON lines or Parquet, or a dataset of the Hub.

    python examples/run_classification.py --model chandar-lab/NeoBERT --data my/data.csv --output_dir runs/mine

The script guesses the columns and whether a row has one class or several, and prints its guess; settings can name
others. Bad rows are reported as errors before training. After an interruption, run the same command
again: it resumes from the newest complete checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best of all
evaluations, with a model card), a report with the scores, each label and the worst errors (`report.md`,
`report.json`), and beside them the scores of a bag of words.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("classify")

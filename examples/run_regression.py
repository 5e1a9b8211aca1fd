"""Fine-tune any encoder to find a number for each text: a price, hours, a rating, how similar two texts are.

    python examples/run_regression.py --model chandar-lab/NeoBERT --data my/prices.csv --label_column price \\
        --output_dir runs/mine

The data are as for `run_classification.py`, with a number in the label column. After an interruption, run the same
command again: it resumes from the newest complete checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (that of
the smallest mean squared error, with a model card) and a report with the errors and correlations, beside those of a
linear model on a bag of words (`report.md`, `report.json`).
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("regress")

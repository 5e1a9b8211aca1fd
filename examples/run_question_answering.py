"""Fine-tune any encoder to find answers in texts, as in SQuAD v1 and v2.

    python examples/run_question_answering.py --model chandar-lab/NeoBERT --data my/questions.jsonl \\
        --output_dir runs/mine

The data are a folder with train.* and validation.* (SQuAD's own JSON, Parquet or JSON lines), or a dataset of the Hub.
Texts longer than a window are read in several overlapping windows. If some training questions have no answer, the model
learns to say that there is none. After an interruption, run the same command again: it resumes from the newest complete
checkpoint, on a CPU bit for bit. `output_dir` gets `model/` (the best evaluation, with a model card) and a report with
exact match and F1, beside those of a baseline (`report.md`, `report.json`).
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("answer")

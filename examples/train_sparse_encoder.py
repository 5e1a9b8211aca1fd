"""Train a sparse encoder (SPLADE) on the MLM head of a pretrained model: a text becomes weights of vocabulary entries.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_sparse_encoder.py \\
        --config configs/embeddings/sparse.yaml --model runs/small/model \\
        --pairs my/pairs.csv --query question --positive answer

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `SparseEncoder(...)`, with a model card) and `log.json`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("train_sparse_encoder")

"""Train a reranker (cross-encoder): it reads a query and a document together and gives the pair one score.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_reranker.py \\
        --config configs/embeddings/reranker.yaml --model runs/small/model \\
        --pairs my/pairs.csv --query question --positive answer

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("train_reranker")

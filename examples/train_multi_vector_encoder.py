"""Train a late-interaction model (ColBERT): it gives a vector for every token, and texts are compared by MaxSim.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_multi_vector_encoder.py \\
        --config configs/embeddings/multi_vector.yaml --model runs/small/model \\
        --pairs my/pairs.csv --query question --positive answer

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `MultiVectorEncoder(...)`, with a model card) and `log.json`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("train_multi_vector_encoder")

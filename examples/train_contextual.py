"""Contextual document embeddings (CDE) on any NeoBERT (paper, section 5.2.2 and appendix G).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_contextual.py \\
        --config configs/embeddings/contextual.yaml --model runs/embeddings/model

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets `clusters/`, checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("train_contextual")

"""Contrastive fine-tuning of any encoder into an embedding model (paper, section 5.2.1 and appendix D).

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/finetune_embeddings.py \\
        --config configs/embeddings/paper.yaml --model chandar-lab/NeoBERT

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (for `SentenceTransformer(...)`, with a model card) and `log.json`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("finetune_embeddings")

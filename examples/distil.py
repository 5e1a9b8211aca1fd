"""Distil a small NeoBERT from an embedding model, with nothing but texts of your own.

    python examples/distil.py --config configs/embeddings/distil.yaml \\
        --teacher sentence-transformers/all-MiniLM-L6-v2 --texts my_texts/ more.parquet --output_dir runs/distil

The student's vectors lie in the teacher's space, so it can search an index that the teacher made. After an
interruption, run the same command again: on a CPU it ends with the same weights, bit for bit. `output_dir` gets
`model/` (for `SentenceTransformer(...)`), `log.json`, checkpoints, and `teacher/`, which may be deleted afterwards.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("distil")

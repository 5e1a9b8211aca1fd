"""Index your documents with an embedding model that has learned from them, if this makes it better.

    python examples/retrieval_from_documents.py --documents my/documents --model models/distilled --output_dir runs/own
    python examples/retrieval_from_documents.py --documents my/documents --model models/distilled \\
        --output_dir runs/own --teacher sentence-transformers/all-MiniLM-L6-v2

The script runs other recipes: `make_pairs`, `finetune_embeddings` (or `distil`, with a teacher) and `index`. Each of
them can also be run by itself, with all of its settings. They need the extra `search`.

After an interruption, run the same command again: training continues where it stopped and gives the same numbers.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("retrieval_from_documents")

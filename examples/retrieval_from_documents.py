"""Search your documents with an embedding model that is trained on nothing but their own titles and sections.

    python examples/retrieval_from_documents.py --documents docs --model runs/small/model --output_dir runs/docs

The script runs other recipes: `make_pairs`, `finetune_embeddings` twice, `run_mteb` and `index`. Each of them can also
be run by itself on the files in `output_dir`, with all of its settings. They need the extras `eval` and `search`.

After an interruption, run the same command again: every step continues where it stopped and gives the same numbers. If
documents have changed since, the script refuses to mix old and new ones: choose another `output_dir`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("retrieval_from_documents")

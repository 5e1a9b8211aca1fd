"""Evaluate an embedding model on MTEB(eng, v1) with the paper's instructions, on its successor, or on your own data.

    python examples/run_mteb.py --config configs/mteb/eng_v1.yaml --model runs/embeddings/model
    python examples/run_mteb.py --config configs/mteb/eng_v1.yaml --model chandar-lab/NeoBERT --tasks STS Clustering
    python examples/run_mteb.py --config configs/mteb/eng_v2.yaml --model runs/embeddings/model
    python examples/run_mteb.py --config configs/mteb/local.yaml --local_tasks my/tasks.yaml \\
        --model runs/embeddings/model

The model is any dense Sentence Transformers model with a Transformers encoder, or a pretrained encoder, which gets mean
pooling (zero-shot). After an interruption, run the same command again: finished tasks are not repeated. `output_dir`
gets a folder for each model with a file for each task, and a report on all models, `report.md`.

References: section 5.2.1, appendix D, Tables 4, 5, 8 and 9.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("run_mteb")

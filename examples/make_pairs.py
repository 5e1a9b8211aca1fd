"""Pairs of texts from raw text without labels, for contrastive pretraining of embedding models.

    python examples/make_pairs.py --source corpus/ --output data/text_pairs.parquet
    python examples/finetune_embeddings.py --config configs/embeddings/contrastive.yaml --model runs/small/model

The pairs are headings with their text, sentences with their paragraph, and neighbouring paragraphs; see
`embeddings/text_pairs.py`. With `--held_out 0.1` the pairs of every tenth document go to a second file,
`data/text_pairs_held_out.parquet`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("make_pairs")

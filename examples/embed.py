"""Turns the texts of a corpus into vectors: one process, every GPU of a machine, or a Ray cluster.

    python examples/embed.py --model runs/embeddings/model --source 'corpus/*.parquet' --output_dir vectors
    python examples/embed.py --model runs/embeddings/model --source 's3://bucket/*.parquet' \\
        --output_dir s3://bucket/vectors --ray auto --gpus true --dtype bfloat16

Sources are those of `deduplicate.py`. Each part of the corpus becomes a Parquet file with the column `vector`, beside
`id_column` if there is one. An interrupted run goes on; the vectors are the same, to the bit, for any number of workers
with the same number of threads, and for parts of any size.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("embed")

"""Tokenise raw text into shards for pretraining: on every core or a Ray cluster, in constant memory, and resumable.

    python examples/prepare_data.py --config configs/data/refinedweb_validation.yaml
    python examples/prepare_data.py --config configs/data/refinedweb.yaml --workers 16
    python examples/prepare_data.py --config configs/data/refinedweb.yaml --ray auto

The first two commands make two folders. The validation folder holds the first 10,000 documents of the dataset, which
the other one leaves out. The text is a Hub dataset, a URL of fsspec (`hf://`, `s3://`) or local files (see
`neobert_hf.data.sources`), and the output a folder or a URL; its layout is described in `neobert_hf.data.shards`. The
shards are the same for any number of workers. After an interruption, run the same command again to continue.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("prepare_data")

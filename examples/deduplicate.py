"""Leaves out of a corpus what occurs twice, nearly twice, or in evaluation texts.

    python examples/deduplicate.py --source 'corpus/*.parquet' --output_dir data/clean --workers 8
    python examples/prepare_data.py --source 'data/clean/texts/*.parquet' --tokenizer bert-base-uncased \
        --output_dir data/train

Sources are Parquet or JSON lines, as files, folders or URLs of fsspec (`hf://`, `s3://`), or ids of Hub datasets. CSV
and text files are read from the beginning for each part, which suits small corpora. With `--ray auto` the CPUs of a
Ray cluster are the workers. The same rows stay for any number of workers, and an interrupted run goes on.
`texts/removed.json` has how many rows were removed, and why; `prepare_data.py` takes it over into its manifest.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("deduplicate")

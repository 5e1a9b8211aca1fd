"""Tokenise raw text into shards for pretraining: on every core or a Ray cluster, in constant memory, and resumable.

    python examples/prepare_data.py --config configs/data/refinedweb_validation.yaml
    python examples/prepare_data.py --config configs/data/refinedweb.yaml --workers 16
    python examples/prepare_data.py --config configs/data/refinedweb.yaml --ray auto

The first two commands make two folders. The validation folder holds the first 10,000 documents of the dataset, which
the other one leaves out. The text is a Hub dataset, a URL of fsspec (`hf://`, `s3://`) or local files (see
`neobert_hf.data.tables`), and the output a folder or a URL; its layout is described in `neobert_hf.data.shards`. The
shards are the same for any number of workers. After an interruption, run the same command again to continue.
"""

from contextlib import nullcontext

from neobert_hf.common.run import output_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.preparing import RECORDS, PrepareArguments, prepare
from neobert_hf.data.shards import MANIFEST, TOKENIZER


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and a folder that no other run writes; at a URL nothing can be locked
    (settings,) = parse_config(PrepareArguments, args=args)
    writes, inputs = (MANIFEST, TOKENIZER, RECORDS, "shard-*"), {"tokenizer": settings.tokenizer}
    folder = output_folder(settings.output_dir, "prepare_data.py", writes, inputs, {"source": settings.source})
    with nullcontext() if "://" in settings.output_dir else folder:
        # 2. The shards that are not there yet
        prepare(settings)


if __name__ == "__main__":
    run_script(main)

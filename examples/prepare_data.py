"""Tokenise raw text into shards for pretraining: on every core, in constant memory, and resumable.

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    python examples/prepare_data.py --config configs/data/refinedweb_validation.yaml

The two commands make two folders. The validation folder holds the first 10,000 documents of the dataset, which the
other one leaves out. The text is a Hub dataset or local files (see `neobert_hf.data.tables`); the layout of a
folder is described in `neobert_hf.data.shards`. After an interruption, run the same command again to continue:
the shards depend on the settings only.
"""

from neobert_hf.common.files import output_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.preparing import PrepareArguments, prepare
from neobert_hf.data.shards import MANIFEST, TOKENIZER


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and a folder that no other run writes
    (settings,) = parse_config(PrepareArguments, args=args)
    writes, inputs = (MANIFEST, TOKENIZER, "shard-*"), {"tokenizer": settings.tokenizer}
    with output_folder(settings.output_dir, "prepare_data.py", writes, inputs, {"source": settings.source}):
        # 2. The shards, from the beginning or from where an interrupted run stopped
        prepare(settings)


if __name__ == "__main__":
    run_script(main)

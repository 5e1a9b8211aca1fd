"""Tokenise raw text into shards for pretraining: on every core, in constant memory, and resumable.

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    python examples/prepare_data.py --config configs/data/refinedweb_validation.yaml

The two commands make two folders. The validation folder holds the first 10,000 documents of the dataset, which the
other one leaves out. The text is a Hub dataset or local files (see `neobert_hf.data.tables`); the layout of a
folder is described in `neobert_hf.data.shards`. After an interruption, run the same command again to continue.
The shards depend on the settings only, not on `num_proc` or interruptions.
"""

from pathlib import Path

from neobert_hf.common.files import check_inputs, folder_lock
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.preparing import PrepareArguments, prepare


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    (settings,) = parse_config(PrepareArguments, args=args)
    check_inputs(settings.output_dir, ["*"], {"tokenizer": settings.tokenizer}, {"source": settings.source})
    with folder_lock(Path(settings.output_dir)):
        # 2. The shards, from the beginning or from where an interrupted run stopped
        prepare(settings)


if __name__ == "__main__":
    run_script(main)

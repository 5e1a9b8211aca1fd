"""Publish a checkpoint on the Hub step by step: the steps of `neobert-hf publish`, as Python code to copy.

    python examples/push_to_hub.py runs/embeddings/model me/embeddings --output_dir hub/embeddings --dry_run

Look through the folder, then log in (`hf auth login`, or set `HF_TOKEN`) and run the command again without `--dry_run`
and `--output_dir`. The same command repeats an interrupted push.
"""

from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.hub.publish import (
    POSITIONAL,
    PublishSettings,
    built_folder,
    check_request,
    describe_dry_run,
    list_files,
    push_folder,
)


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and a check that the Hub would accept them
    (settings,) = parse_config(PublishSettings, args=args, positional=POSITIONAL)
    check_request(settings)

    # 2. A folder with weights, code, tokenizer and a model card. A check that fails raises an error.
    with built_folder(settings) as folder:
        print(list_files(folder), flush=True)

        # 3. The Hub
        if settings.dry_run:
            print(describe_dry_run(settings))
        else:
            print(push_folder(folder, settings))


if __name__ == "__main__":
    run_script(main)

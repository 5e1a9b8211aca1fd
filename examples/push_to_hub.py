"""Publish a checkpoint on the Hub, step by step: what `neobert-hf publish` does, in Python.

    python examples/push_to_hub.py --checkpoint runs/embeddings/model --repo_id me/embeddings --folder hub/embeddings

Look through the folder, then log in (`hf auth login`, or set `HF_TOKEN`) and add `--push true` to the same command,
which also repeats an interrupted push. Delete the folder to build it anew.
"""

from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.checkpoints.card import gather_facts
from neobert_hf.checkpoints.publish import build_folder, check_folder, check_request, list_folder, push_folder
from neobert_hf.common.atomic_writes import atomic_folder
from neobert_hf.common.settings import parse_config


@dataclass
class PublishArguments:
    """What is published, and where."""

    checkpoint: str = field(metadata={"help": "folder with config, safetensors and tokenizer"})
    repo_id: str = field(metadata={"help": "OWNER/NAME on the Hub"})
    folder: str = field(metadata={"help": "where the repository is built, unless it is there"})
    card: str | None = field(default=None, metadata={"help": "YAML file with fields of CardFacts, for the model card"})
    push: bool = field(default=False, metadata={"help": "send the folder; otherwise it is built and checked only"})
    private: bool = field(default=True, metadata={"help": "of a new repository"})


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    (settings,) = parse_config(PublishArguments, args=args)
    source, folder = Path(settings.checkpoint), Path(settings.folder)
    check_request(settings.repo_id, output_dir=folder)

    # 2. Folder, with a card that tells what is known
    if not folder.exists():
        facts = gather_facts(source, settings.card)
        with atomic_folder(folder) as partial:
            build_folder(source, partial, settings.repo_id, facts)

    # 3. Checks; an error ends the script
    check_folder(folder)
    print(list_folder(folder), flush=True)

    # 4. Hub
    if settings.push:
        print(push_folder(folder, settings.repo_id, settings.private).commit_url)


if __name__ == "__main__":
    main()

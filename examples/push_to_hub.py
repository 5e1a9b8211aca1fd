"""Publish a checkpoint on the Hub, step by step: what `neobert-hf publish` does, in Python.

    python examples/push_to_hub.py --checkpoint runs/embeddings/model --repo_id me/my-embeddings --folder hub/my-embeddings

Log in first (`hf auth login`), or set `HF_TOKEN`. Look through the folder, which is kept, and run the same command with
`--push true`. An interrupted push is repeated by the same command.
"""

from dataclasses import dataclass, field
from pathlib import Path

from neobert_hf.arguments import parse_config
from neobert_hf.model_card import gather_facts
from neobert_hf.publish import build_folder, check_folder, check_request, list_folder, push_folder
from neobert_hf.whole_files import folder_written_whole


@dataclass
class PublishArguments:
    """What is published, and where."""

    checkpoint: str = field(metadata={"help": "folder with config, safetensors and tokenizer"})
    repo_id: str = field(metadata={"help": "OWNER/NAME on the Hub"})
    folder: str = field(metadata={"help": "where the repository is built; written anew each time"})
    card: str | None = field(default=None, metadata={"help": "YAML file with fields of CardFacts, for the model card"})
    push: bool = field(default=False, metadata={"help": "send the folder; otherwise it is built and checked only"})
    private: bool = field(default=True, metadata={"help": "of a new repository"})


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    (settings,) = parse_config(PublishArguments, args=args)
    source = Path(settings.checkpoint)
    check_request(settings.repo_id)

    # 2. What the model card can tell
    facts = gather_facts(source, settings.card)

    # 3. Folder, kept only if it is healthy
    with folder_written_whole(Path(settings.folder)) as folder:
        build_folder(source, folder, settings.repo_id, facts)
        check_folder(folder)
    print(list_folder(Path(settings.folder)), flush=True)

    # 4. Hub
    if settings.push:
        print(push_folder(Path(settings.folder), settings.repo_id, settings.private).commit_url)


if __name__ == "__main__":
    main()

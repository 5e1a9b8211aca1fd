"""Raw text to tokenised shards for pretraining, on every core, in constant memory, resumable.

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    python examples/prepare_data.py --config configs/data/refinedweb_validation.yaml

Two commands make two folders: the second holds the first 10,000 documents, which the first leaves out. The text is a
Hub dataset or local files (see `neobert_hf.common.text_sources`), the folder's layout is in
`neobert_hf.pretraining.shards`. After an interruption the same command continues. The shards depend on the settings
only, not on `num_proc` or interruptions.
"""

from pathlib import Path

from neobert_hf.common.locks import folder_lock
from neobert_hf.common.settings import parse_config
from neobert_hf.pretraining import preparing


def main(args: list[str] | None = None) -> None:
    # 1. Settings and tokenizer: all that the shards depend on
    (settings,) = parse_config(preparing.PrepareArguments, args=args)
    with folder_lock(Path(settings.output_dir)):
        prepare(settings)


def prepare(settings: preparing.PrepareArguments) -> None:
    output = Path(settings.output_dir)
    tokenizer = preparing.load_fast_tokenizer(settings)
    manifest = preparing.plan_manifest(settings, tokenizer)

    # 2. A folder that is finished is left alone
    if (finished := preparing.find_finished(manifest, output)) is not None:
        print(f"{output} is finished already; nothing to do.")
        print(preparing.summary(finished, output))
        return

    # 3. Text, and a folder that knows from which settings it was begun
    stream = preparing.begin_folder(settings, manifest, tokenizer)

    # 4. Shards, each as soon as its documents are read
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    records = preparing.prepare_shards(stream, manifest, tokenizer_json, output, settings.num_proc)

    # 5. Tokenizer and manifest, which makes the folder complete
    preparing.finish(manifest, records, tokenizer, output)
    print(preparing.summary(manifest, output))


if __name__ == "__main__":
    main()

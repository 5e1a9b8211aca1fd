"""Pairs of texts from raw text without labels, for contrastive pretraining of embedding models.

    python examples/make_pairs.py --source corpus/ --output data/text_pairs.parquet
    python examples/finetune_embeddings.py --config configs/embeddings/contrastive.yaml --model runs/small/model

The pairs are headings with their text, sentences with their paragraph, and neighbouring paragraphs; see
`embeddings/text_pairs.py`. With `--held_out 0.1` the pairs of every tenth document go to a second file,
`data/text_pairs_held_out.parquet`.
"""

from collections import Counter

from neobert_hf.common.files import write_parquet
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.text_pairs import TextPairSettings, make_pairs


def main(args: list[str] | None = None) -> None:
    # 1. Settings, of which `output` names no file that exists
    (settings,) = parse_config(TextPairSettings, args=args)

    # 2. Pairs
    parts = make_pairs(settings)

    # 3. One file, or one for each part; each file is written completely or not at all
    for part, pairs in parts.items():
        file = settings.file_of(part)
        write_parquet(file, pairs)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(pairs["kind"]).items())
        print(f"{file}: {len(pairs):,} pairs ({kinds})", flush=True)


if __name__ == "__main__":
    run_script(main)

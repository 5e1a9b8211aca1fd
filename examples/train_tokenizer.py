"""Train a tokenizer on your own text.

    python examples/train_tokenizer.py --source 'corpus/*.parquet' --kind wordpiece --output_dir runs/tokenizer

`wordpiece` makes a tokenizer like bert-base-uncased (NeoBERT's tokenizer): lower case, 30,522 entries, special tokens
and unused entries at the same ids. `bpe` makes a byte-level, cased tokenizer with 32,000 entries, for the paper's
ablation M3; it has an entry for every byte, so no text gives [UNK].

The same text gives the same `wordpiece` entries each time, but not all at the same ids, since `tokenizers` breaks ties
by chance. So all models and data of one project must use the same tokenizer folder.
"""

from pathlib import Path

from neobert_hf.common.files import atomic_folder, folder_lock
from neobert_hf.common.run import check_inputs
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.tokenizer import TokenizerArguments, train_tokenizer


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    (settings,) = parse_config(TokenizerArguments, args=args)
    output = Path(settings.output_dir)
    if output.exists():
        raise ValueError(f"{output} exists already: choose another `output_dir`, or delete it.")

    check_inputs(output, ["*"], {}, {"source": settings.source})
    with folder_lock(output):
        # 2. The vocabulary, from all of the text or its first `max_documents` documents
        tokenizer = train_tokenizer(settings)

        # 3. A folder that `AutoTokenizer.from_pretrained` can load
        with atomic_folder(output) as partial:
            tokenizer.save_pretrained(partial)
    print(f"{output}: {len(tokenizer):,} entries", end="")
    if len(tokenizer) < settings.vocab_size:
        print(f" ({settings.vocab_size:,} were allowed; the text gave no more)", end="")
    print()


if __name__ == "__main__":
    run_script(main)

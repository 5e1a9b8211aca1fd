"""Train a tokenizer on your own text.

    python examples/train_tokenizer.py --source 'corpus/*.parquet' --kind wordpiece --output_dir runs/tokenizer

`wordpiece` makes a tokenizer like bert-base-uncased (NeoBERT's tokenizer): lower case, 30,522 entries, special tokens
and unused entries at the same ids. `bpe` makes a byte-level, cased tokenizer with 32,000 entries, for the paper's
ablation M3; it has an entry for every byte, so no text gives [UNK].

The same text gives the same `wordpiece` entries each time, but not all at the same ids, since `tokenizers` breaks ties
by chance. So all models and data of one project must use the same tokenizer folder.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("train_tokenizer")

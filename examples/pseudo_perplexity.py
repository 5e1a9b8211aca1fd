"""Pseudo-perplexity of masked language models against sequence length (section 5.3, Figures 2 and 6).

    python examples/pseudo_perplexity.py --models small=runs/small/model --source 'corpus/*.parquet' \\
        --lengths 64 256 1024 --sample 32 --output_dir runs/pseudo_perplexity
    python examples/pseudo_perplexity.py --models neobert=chandar-lab/NeoBERT bert=google-bert/bert-base-uncased \\
        --source articles.jsonl --max_length 512 --output_dir runs/two_models
    python examples/pseudo_perplexity.py --models neobert=chandar-lab/NeoBERT --source articles.jsonl --sample 64 \\
        --lengths 4096 8192 16384 32768 --rope native yarn:4 dynamic:8 --output_dir runs/long

This measures any masked language model of Transformers on any text, and needs `pip install 'neobert_hf[eval]'`. Every
position of a document is masked in turn, or only some of them with `--sample`. After an interruption, run
the same command again: at most one batch is lost, and no position is scored twice. `output_dir` gets `scores.parquet`
(a row for each model, RoPE setting, document and length), `pseudo_perplexity.md` and `pseudo_perplexity.png`. Compare
only models with the same tokenizer: another tokenizer divides a text into other tokens.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("pseudo_perplexity")

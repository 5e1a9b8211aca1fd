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

from pathlib import Path

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.run import output_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.pseudo_perplexity import PseudoPerplexityArguments, check_models, score_models, write_report


def main(args: list[str] | None = None) -> None:
    # 1. Settings and models, which are checked before anything is scored
    (settings,) = parse_config(PseudoPerplexityArguments, args=args)
    writes = (*settings.paths, "scores.parquet", "pseudo_perplexity.md", "pseudo_perplexity.png")
    inputs, sources = {"models": list(settings.paths.values())}, {"source": settings.source}
    with output_folder(settings.output_dir, "pseudo_perplexity.py", writes, inputs, sources):
        check_models(settings)

        # 2. Losses, continuing where an earlier run ended
        scores = score_models(settings)

        # 3. Scores, table and plot
        output = Path(settings.output_dir)
        print(write_report(output, scores))
        print(f"{output}: scores.parquet, pseudo_perplexity.md, pseudo_perplexity.png")


if __name__ == "__main__":
    run_script(main)

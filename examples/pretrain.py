"""Masked-language-model pretraining of NeoBERT (paper, sections 3.2, 3.3 and A).

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/pretrain.py \\
        --config configs/pretrain/neobert_1024.yaml

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (with tokenizer, for `from_pretrained`), `curves.png` and `log.json`.
"""

from neobert_hf_cli import run


if __name__ == "__main__":
    run("pretrain")

"""Train a NeoBERT to read longer texts, and measure it before and after.

    python examples/extend_length.py --config configs/adapt/length.yaml --model chandar-lab/NeoBERT \\
        --text books/ --max_length 16384 --output_dir runs/neobert_16k

The rotary frequencies are scaled by the same factor as the length (`--rope yarn`), or get another base
(`--rope theta:160000`), and the model is trained on a mixture that prefers long documents. After an interruption, run
the same command again to resume; on a CPU the result is the same bit for bit. `output_dir` gets the tokenised text
(`data/`), checkpoints, `model/` (the best of all evaluations, with its tokenizer), `curves.png`, and `report.md`,
`report.json` and `lengths.png`, which show the pseudo-perplexity and the share of facts found in a text at each length.
The script needs `pip install 'neobert_hf[eval]'` and runs in one process.
"""

from pathlib import Path

from transformers import set_seed

from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.evaluation.facts import measure_reading
from neobert_hf.evaluation.pseudo_perplexity.recipe import PseudoPerplexityArguments
from neobert_hf.pretraining.adapting import AdaptationArguments, adaptation_settings, load_masked_lm
from neobert_hf.pretraining.length import (
    LengthSettings,
    held_out_texts,
    new_config,
    prepare_long_text,
    untrained_rope,
    write_length_report,
)
from neobert_hf.pretraining.recipe import plot_curves, read_data
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.launching import check_alone, run_lock
from neobert_hf.training.run_checkpoints import newest_checkpoint
from neobert_hf.training.trainer import EarlyStopping


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(LengthSettings, AdaptationArguments, args=args)
    check_alone(arguments)
    with run_lock(arguments, settings.model):
        extend(settings, arguments)


def extend(settings: LengthSettings, arguments: AdaptationArguments) -> None:
    # 2. What changes in the model's config
    output = Path(arguments.output_dir)
    config = load_masked_lm(settings.model).config
    changes = new_config(settings, config)

    # 3. The model is measured at each length before training, on held-out documents
    held_out = held_out_texts(settings, output)

    def measure(state: str, model: str, rope: list[str]) -> dict[str, dict[int, dict[str, float]]]:
        given = PseudoPerplexityArguments(
            models=[f"{state}={model}"],
            source=str(held_out),
            output_dir=str(output / "lengths"),
            rope=rope,
            lengths=settings.lengths(config.max_length),
            min_tokens=settings.max_length,
            max_documents=settings.measured_documents,
            sample=settings.sample,
            batch_tokens=settings.micro_batch_tokens,
            device=str(arguments.device),
        )
        return measure_reading(given, settings.facts)

    measured = measure("before", settings.model, untrained_rope(settings, config))

    # 4. The text tokenised, with documents held out; the number of steps follows from its size
    places = prepare_long_text(settings, output)
    data = read_data(places, arguments)
    arguments = arguments.planned(settings, settings.epochs, data)

    # 5. The checkpoint to resume from, if there is one
    stored = adaptation_settings(places, arguments, data) | changes
    resume, progress = newest_checkpoint(output, stored)
    if resume is not None:
        data.train.sampler.cursor = progress.cursor

    # 6. Training, until the held-out loss stops falling
    model = load_masked_lm(settings.model, **changes)
    trainer = MLMTrainer(model, arguments, data, stored)
    print(
        f"{arguments.max_steps:,} steps of {settings.global_batch_tokens:,} tokens on {arguments.device}; "
        f"{f'resuming from {resume}' if resume else f'starting from {settings.model}'}",
        flush=True,
    )
    set_seed(arguments.seed)
    trainer.add_callback(EarlyStopping(arguments.early_stopping_patience))
    trainer.train_to_the_end(resume)

    # 7. The weights of the best evaluation, measured again, and the report
    trainer.load_best()
    model.config.sparse_prediction = False
    trainer.save_whole(output / "model")
    plot_curves(trainer.state.log_history, output / "curves.png")
    measured |= measure("after", str(output / "model"), ["native"])
    print(write_length_report(settings, measured, trainer.state.global_step, output), flush=True)


if __name__ == "__main__":
    run_script(main)

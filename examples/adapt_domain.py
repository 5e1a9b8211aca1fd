"""Continued pretraining of any NeoBERT on the text of a domain, measured before and after.

    python examples/adapt_domain.py --config configs/adapt/domain.yaml --model chandar-lab/NeoBERT \\
        --domain my_texts/ --general general.parquet --output_dir runs/my_domain

The adapted model keeps the architecture, tokenizer and maximum length of the original. `--new_words 1000` adds words to
its vocabulary. After an interruption, run the same command again to resume; on a CPU the result is the same bit for
bit. `output_dir` gets the tokenised text (`data/`), checkpoints, `model/` (the best of all evaluations, with its
tokenizer), `report.md`, `report.json`, `log.json` and `curves.png`. The script runs in one process; on several GPUs,
give `data/` and the model to examples/pretrain.py (`--init_from`).
"""

from pathlib import Path

from transformers import set_seed

from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.pretraining.adapting import AdaptationArguments, adaptation_settings
from neobert_hf.pretraining.domain import (
    DomainSettings,
    Looks,
    prepare_text,
    start_model,
    write_report,
)
from neobert_hf.pretraining.recipe import read_data
from neobert_hf.pretraining.trainer import MLMTrainer
from neobert_hf.training.launching import check_alone, run_lock
from neobert_hf.training.run_checkpoints import newest_checkpoint
from neobert_hf.training.trainer import EarlyStopping


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(DomainSettings, AdaptationArguments, args=args)
    check_alone(arguments)
    with run_lock(arguments, settings.model):
        adapt(settings, arguments)


def adapt(settings: DomainSettings, arguments: AdaptationArguments) -> None:
    # 2. The model, with new words in its vocabulary if `new_words` asks for them
    output = Path(arguments.output_dir)
    model, start = start_model(settings, output)

    # 3. Both texts tokenised, with documents held out of each; the number of steps follows from the size of the domain
    places = prepare_text(settings, start, model.config.max_length, output)
    data = read_data(places, arguments)
    arguments = arguments.planned(settings, settings.epochs, data)

    # 4. The checkpoint to resume from, if there is one
    stored = adaptation_settings(places, arguments, data)
    resume, progress = newest_checkpoint(output, stored)
    if resume is not None:
        data.train.sampler.cursor = progress.cursor

    # 5. The model is evaluated before training
    trainer = MLMTrainer(model, arguments, data, stored)
    looks = Looks(trainer)
    before = looks.look()
    print(
        f"{model.num_parameters():,} parameters; {arguments.max_steps:,} steps of {settings.global_batch_tokens:,} "
        f"tokens on {arguments.device}; held-out loss {before['loss']:.3f}; "
        f"{f'resuming from {resume}' if resume else f'starting from {start}'}",
        flush=True,
    )

    # 6. Training, until the held-out loss of the domain stops falling
    set_seed(arguments.seed)
    trainer.add_callback(EarlyStopping(arguments.early_stopping_patience))
    trainer.train_to_the_end(resume)

    # 7. The weights of the best evaluation, evaluated again, and the report
    trainer.load_best()
    after = looks.look()
    model.config.sparse_prediction = False
    trainer.save_whole(output / "model")
    print(write_report(settings, looks, before, after, output), flush=True)


if __name__ == "__main__":
    run_script(main)

"""Continued pretraining of any NeoBERT on the text of a domain, measured before and after.

    python examples/adapt_domain.py --config configs/adapt/domain.yaml --model chandar-lab/NeoBERT \\
        --domain my_texts/ --general general.parquet --output_dir runs/my_domain

Architecture, tokenizer and length are those of the model. `--new_words 1000` adds words to its vocabulary. Run the same
command again after an interruption: it goes on, to the bit on a CPU. `output_dir` gets the tokenised text (`data/`),
checkpoints, `model/` (with tokenizer, the best of all evaluations), `report.md`, `report.json`, `log.json` and
`curves.png`. It is one process; for several GPUs, give `data/` and the model to examples/pretrain.py (`--init_from`).
"""

from pathlib import Path

from transformers import set_seed

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
    # 2. The model, with more words if they are asked for
    output = Path(arguments.output_dir)
    model, start = start_model(settings, output)

    # 3. Both texts as tokens, documents held out of each, and as many steps as the domain is worth
    places = prepare_text(settings, start, model.config.max_length, output)
    data = read_data(places, arguments)
    arguments = arguments.planned(settings, settings.epochs, data)

    # 4. The checkpoint to resume from, if there is one
    stored = adaptation_settings(places, arguments, data)
    resume, progress = newest_checkpoint(output, stored)
    if resume is not None:
        data.train.sampler.cursor = progress.cursor

    # 5. A look at the model before
    trainer = MLMTrainer(model, arguments, data, stored)
    looks = Looks(trainer)
    before = looks.look()
    print(
        f"{model.num_parameters():,} parameters; {arguments.max_steps:,} steps of {settings.global_batch_tokens:,} "
        f"tokens on {arguments.device}; held-out loss {before['loss']:.3f}; "
        f"{f'resuming from {resume}' if resume else f'starting from {start}'}",
        flush=True,
    )

    # 6. Training, until the loss of the domain falls no more
    set_seed(arguments.seed)
    trainer.add_callback(EarlyStopping(arguments.early_stopping_patience))
    trainer.train_to_the_end(resume)

    # 7. The best of all evaluations, a look at it, the report
    trainer.load_best()
    after = looks.look()
    model.config.sparse_prediction = False
    trainer.save_whole(output / "model")
    print(write_report(settings, looks, before, after, output), flush=True)


if __name__ == "__main__":
    main()

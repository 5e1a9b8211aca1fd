"""Make a smaller model from a large one: cut layers and units of the MLPs, then distil the large model into the rest.

    python examples/shrink.py --config configs/adapt/shrink.yaml --model chandar-lab/NeoBERT --num_hidden_layers 14 \\
        --text texts/ --output_dir runs/shrink

If examples/prepare_data.py has already tokenised your text with the model's tokenizer, give its folders as
`--train_data` and `--validation_data` instead of `--text`. After an interruption, run the same command again to resume;
on a CPU the result is the same bit for bit. `output_dir` gets `data/` (the text as tokens), `start/` (the cut model),
checkpoints, `model/` (with its tokenizer), `report.md`, `report.json`, `log.json` and `shrink.png`. The script runs in
one process. For an embedding model, see examples/shrink_embeddings.py.
"""

from pathlib import Path

from transformers import set_seed

from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.pretraining.adapting import load_masked_lm
from neobert_hf.pretraining.arguments import PretrainingArguments
from neobert_hf.pretraining.shrinking import (
    Distiller,
    ShrinkSettings,
    distillation_settings,
    make_start,
    read_teacher,
    write_report,
)
from neobert_hf.training.launching import check_alone, run_lock
from neobert_hf.training.run_checkpoints import newest_checkpoint, step_of


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(ShrinkSettings, PretrainingArguments, args=args)
    check_alone(arguments)
    with run_lock(arguments, settings.model):
        shrink(settings, arguments)


def shrink(settings: ShrinkSettings, arguments: PretrainingArguments) -> None:
    # 2. The large model, and text tokenised with its tokenizer
    output = Path(arguments.output_dir)
    teacher, places, data = read_teacher(settings, arguments, output)

    # 3. The cut, which removes the layers and units that matter least on held-out text
    cut, losses = make_start(settings, teacher, places, data, output)

    # 4. The checkpoint to resume from, if there is one; that of a finished run is loaded as the model
    stored = distillation_settings(settings, places, arguments, data)
    resume, progress = newest_checkpoint(output, stored)
    if resume is not None:
        data.train.sampler.cursor = progress.cursor
    finished = resume is not None and step_of(resume) == arguments.max_steps
    model = load_masked_lm(str(resume) if finished else places.init_from)

    # 5. Distillation
    set_seed(arguments.seed)
    trainer = Distiller(model, arguments, data, stored, teacher, settings)
    print(
        f"{model.num_parameters():,} of {teacher.num_parameters():,} parameters; held-out loss {losses['cut']:.3f} "
        f"(large model: {losses['large']:.3f}); {arguments.max_steps:,} steps of {settings.global_batch_tokens:,} "
        f"tokens on {arguments.device}; {f'resuming from {resume}' if resume else f'starting from {places.init_from}'}",
        flush=True,
    )
    trainer.train_to_the_end(resume)

    # 6. The model, and the report
    model.config.sparse_prediction = False
    trainer.save_whole(output / "model")
    print(write_report(settings, trainer, cut, losses, output), flush=True)


if __name__ == "__main__":
    run_script(main)

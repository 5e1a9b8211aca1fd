"""Masked-language-model pretraining of NeoBERT (paper, sections 3.2, 3.3 and A).

    python examples/prepare_data.py --config configs/data/refinedweb.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml examples/pretrain.py \\
        --config configs/pretrain/neobert_1024.yaml

After an interruption, run the same command again: it resumes from the newest complete checkpoint, on a CPU bit for bit.
`output_dir` gets checkpoints, `model/` (with tokenizer, for `from_pretrained`), `curves.png` and `log.json`.
"""

import math
from pathlib import Path

from transformers import set_seed

from neobert_hf.common.files import write_json
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.configuration_neobert import NeoBERTConfig
from neobert_hf.data.batches import DataArguments
from neobert_hf.modeling_neobert import NeoBERTForMaskedLM
from neobert_hf.training.pretraining import (
    ModelArguments,
    PretrainingArguments,
    build_config,
    checkpoint_settings,
    find_source,
    load_model,
    plot_curves,
    read_data,
)
from neobert_hf.training.pretraining_trainer import MLMTrainer
from neobert_hf.training.run_checkpoints import newest_checkpoint, read_progress, training_folder
from neobert_hf.training.trainer import end_processes


def main(args: list[str] | None = None) -> None:
    # 1. Settings; the global batch is the same on any number of devices
    architecture, settings, arguments = parse_config(ModelArguments, DataArguments, PretrainingArguments, args=args)
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    inputs = {"init_from": settings.init_from, "train_data": settings.train_folders()}
    inputs |= {"validation_data": settings.validation_data}
    with training_folder(arguments, "pretrain.py", ["curves.png"], inputs):
        pretrain(architecture, settings, arguments)


def pretrain(architecture: ModelArguments, settings: DataArguments, arguments: PretrainingArguments) -> None:
    # 2. Data, and the number of steps, if it was given as passes over them
    output = Path(arguments.output_dir)
    data = read_data(settings, arguments)
    if arguments.max_steps < 0:
        micro_batches = data.train.sampler.micro_batches_in(arguments.num_train_epochs)
        arguments.max_steps = math.ceil(micro_batches / arguments.gradient_accumulation_steps / arguments.world_size)

    # 3. The checkpoint to resume from, if there is one; it must have been trained with the same settings
    stored = checkpoint_settings(architecture, settings, arguments, data.manifests)
    resume = newest_checkpoint(output, stored)
    if resume is not None:
        source, config = None, NeoBERTConfig.from_pretrained(resume)
        data.train.sampler.cursor = read_progress(resume).cursor
    else:
        source = find_source(settings)
        config = build_config(architecture, settings, data, source)

    # 4. The model; when a run is resumed, the Trainer loads the weights
    set_seed(arguments.seed)
    model = NeoBERTForMaskedLM(config) if source is None else load_model(source, config, data)

    # 5. Training
    optimizer_from = source if settings.continue_optimizer else None
    trainer = MLMTrainer(model, arguments, data, stored, optimizer_from)
    # Each process needs its own dropout, but the Trainer has just given all of them the same seed.
    set_seed(arguments.seed + arguments.process_index)
    if trainer.is_world_process_zero():
        print(
            f"{model.num_parameters():,} parameters; {arguments.max_steps:,} steps; {arguments.world_size} x "
            f"{arguments.device.type}, engine {trainer.accelerator.distributed_type.value}; "
            f"{arguments.gradient_accumulation_steps} micro-batches of {settings.micro_batch_tokens:,} tokens per step "
            f"and process; attention: {config._attn_implementation}; "
            + (f"resuming from {resume}" if resume else f"starting from {source or 'random weights'}"),
            flush=True,
        )
    trainer.train_to_the_end(resume)

    # 6. The saved model gives logits of every position, not only of the labelled ones as in training
    trainer.architecture.sparse_prediction = False
    trainer.save_whole(output / "model")
    trainer.architecture.sparse_prediction = True

    # 7. The held-out loss after the last step, the log and the curves
    evaluated = {entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry}
    if data.held_out and trainer.state.global_step not in evaluated:
        trainer.evaluate()
    if trainer.is_world_process_zero():
        write_json(output / "log.json", trainer.state.log_history)
        plot_curves(trainer.state.log_history, output / "curves.png")
        print(f"{output / 'model'}, {output / 'curves.png'}, {output / 'log.json'}", flush=True)
    end_processes(trainer.accelerator)


if __name__ == "__main__":
    run_script(main)

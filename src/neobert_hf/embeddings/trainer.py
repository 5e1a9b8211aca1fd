"""Sentence Transformers' trainers with the paper's mixture of datasets, and resuming from complete checkpoints only."""

import re
from pathlib import Path
from typing import Any

import torch
from datasets import DatasetDict
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    MultiVectorEncoderTrainer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoderTrainer,
)
from sentence_transformers.base.evaluation import BaseEvaluator, SequentialEvaluator
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.model_card import BaseModelCardCallback
from torch.utils.data import BatchSampler, ConcatDataset
from transformers.trainer_utils import IntervalStrategy

from neobert_hf.common.files import write_json
from neobert_hf.common.recipe import Result
from neobert_hf.embeddings.arguments import NDCG, EmbeddingArguments
from neobert_hf.embeddings.batches import (
    ContrastiveCollator,
    FullBatchSampler,
    MixtureBatchSampler,
    MultiVectorCollator,
    RerankingCollator,
    sampling_probabilities,
)
from neobert_hf.embeddings.datasets import PairDataset
from neobert_hf.embeddings.recipe import PairTraining
from neobert_hf.training.adapters import LoraArguments, add_adapters, describe_adapters, merge_adapters
from neobert_hf.training.trainer import EarlyStopping, ResumableTrainer, is_measured


# Endings of the metrics that the end of a run and the model card name first, one of each evaluator.
MAIN_METRICS = (NDCG, "spearman_cosine", "scores_spearman")


class MixtureTrainer(ResumableTrainer):
    """What the trainers of all kinds of models share: training on a mixture of datasets, and LoRA if the run has it.

    Sentence Transformers' trainer of the kind stands behind this class. It calls `get_batch_sampler` for each dataset
    and `get_multi_dataset_batch_sampler` for all of them, makes tensors of a batch with `data_collator_class`, and
    gives these to the `loss`, column by column.

    Args:
        kwargs: for Sentence Transformers' trainer of this kind of model, such as `loss` and `evaluator`.

    Raises:
        ValueError: if a dataset does not have enough different rows for a batch. For more, see `ResumableTrainer`.
    """

    # Every kind of model has a class of its own with the same fields.
    training_args_class = SentenceTransformerTrainingArguments
    # What the best weights are chosen by unless the user names a metric.
    best_by = f"eval_retrieval_cosine_{NDCG}"
    # Divides the rows of one dataset into batches.
    batch_sampler_class = FullBatchSampler

    def __init__(self, model: BaseModel, training: PairTraining, evaluator: BaseEvaluator | None = None, **kwargs):
        self.settings, self.data, arguments = training.settings, training.data, training.arguments
        # The step whose weights `model/` gets.
        self.saved_step = arguments.max_steps
        self.batch_sizes = {
            name: self.rows_of_batch(dataset, arguments.per_device_train_batch_size)
            for name, dataset in self.data.train.items()
        }
        self.use_prompts(model, arguments)
        self.has_adapters = isinstance(self.settings, LoraArguments) and self.settings.lora_rank is not None
        if self.has_adapters:
            # A reranker's head is new, so all of its weights are trained.
            head = isinstance(model, CrossEncoder)
            add_adapters(model.transformers_model, self.settings, arguments.seed, with_head=head)
        if evaluator is None and arguments.eval_strategy != IntervalStrategy.NO:
            raise ValueError(
                f"`eval_strategy` is {arguments.eval_strategy.value!r}, but there are no data for an evaluation: set "
                "it to no, hold out a share of `pairs`, or describe a dataset for `retrieval` in the file `datasets`."
            )
        # The score before training.
        arguments.eval_on_start = evaluator is not None
        if arguments.metric_for_best_model == NDCG:
            arguments.metric_for_best_model = self.best_by
        rows = DatasetDict({name: dataset.rows for name, dataset in self.data.train.items()})
        super().__init__(model, arguments, rows, run=training.run, evaluator=evaluator, **kwargs)
        if arguments.load_best_model_at_end and (arguments.eval_steps or 0) > arguments.max_steps:
            raise ValueError(
                f"`load_best_model_at_end` chooses among evaluations, of which there are none: `eval_steps` is "
                f"{arguments.eval_steps:,} and `max_steps` {arguments.max_steps:,}."
            )
        if arguments.early_stopping_patience is not None:
            self.add_callback(EarlyStopping(arguments.early_stopping_patience))
        if self.engine != "plain":
            # Sentence Transformers saves the module as it is: with these engines, a shard.
            raise ValueError(
                "FSDP and DeepSpeed would save incomplete models here: use DDP (configs/accelerate/ddp.yaml)."
            )

    def rows_of_batch(self, dataset: PairDataset, batch_size: int) -> int:
        return dataset.rows_of_batch(batch_size)

    def use_prompts(self, model: BaseModel, arguments: EmbeddingArguments) -> None:
        """Train with the prompts of the datasets, and save them in the model in place of those that it came with."""
        model.prompts, model.default_prompt_name = self.data.prompts(), None
        arguments.prompts = {}
        for name, dataset in self.data.train.items():
            negatives = (f"negative_{number}" for number in range(dataset.most_negatives()))
            documents = dict.fromkeys(["positive", "hard_negative", *negatives], dataset.document_prompt)
            of_columns = {"query": dataset.prompt} | documents
            arguments.prompts[name] = {column: prompt for column, prompt in of_columns.items() if prompt}

    def get_batch_sampler(self, dataset, batch_size, drop_last, valid_label_columns=None, generator=None, seed=0):
        # Sentence Transformers gives the rows without their name, and in a format that adds it to each row.
        name = next(name for name, rows in self.train_dataset.items() if rows is dataset)
        sampler = self.batch_sampler_class(dataset.with_format(None), self.batch_sizes[name], seed)
        if not next(iter(sampler), None):
            raise ValueError(
                f"Dataset {name} has {len(dataset):,} rows, but not {self.batch_sizes[name]} without a text in "
                "common, which a batch needs. Set a smaller `per_device_train_batch_size`, or in the description of "
                "the dataset a smaller `batch_size`, or add data."
            )
        return sampler

    def get_multi_dataset_batch_sampler(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], generator=None, seed=0
    ) -> MixtureBatchSampler:
        batches_per_step = self.args.world_size * self.args.gradient_accumulation_steps
        alpha, steps = self.settings.alpha, self.args.max_steps
        return MixtureBatchSampler(dataset, batch_samplers, alpha, steps, batches_per_step, seed)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        # The loader of an evaluation draws a random number, and dropout must not depend on when there are evaluations.
        with torch.random.fork_rng(devices=[]):
            metrics = super().evaluate(*args, **kwargs)
        if self.args.load_best_model_at_end:
            chosen = self.args.metric_for_best_model.removeprefix("eval_")
            if f"eval_{chosen}" not in metrics:
                found = ", ".join(self.scores_of(metrics))
                raise ValueError(f"`metric_for_best_model` is {chosen!r}, but the evaluation measures {found}.")
        return metrics

    def complete(self) -> Result:
        """Train to the end, evaluate, and write `model/` and `log.json`; the scores are those of the evaluator."""
        output = self.run.folder
        if self.is_world_process_zero():
            print(self.describe(), flush=True)
        self.train_to_the_end()
        if self.args.load_best_model_at_end:
            self._load_from_checkpoint(str(Path(self.args.output_dir) / f"checkpoint-{self.state.best_global_step}"))
            self.model.to(self.args.device)
            self.saved_step = self.state.best_global_step
        # After the last step, unless `eval_steps` has done so.
        elif self.evaluator is not None and not self.scores_after(self.args.max_steps):
            self.evaluate()
        if self.has_adapters:
            merge_adapters(self.model.transformers_model)
        self.save_whole(output / "model")
        if self.is_world_process_zero():
            write_json(output / "log.json", self.measured())
            print(f"{output / 'model'}{self.describe_scores()}; the log is {output / 'log.json'}", flush=True)
        return Result(output / "model", self.scores_after(self.saved_step), before=self.scores_after(0))

    def _load_best_model(self) -> None:
        """`complete` does it, also for a run that had ended before, and not for one that was stopped by a signal."""

    def scores_after(self, step: int) -> dict[str, float]:
        """The metrics of the evaluation after this step, by name; empty if there was none."""
        found = [
            scores for entry in self.state.log_history if entry["step"] == step and (scores := self.scores_of(entry))
        ]
        return found[-1] if found else {}

    @staticmethod
    def scores_of(entry: dict[str, float]) -> dict[str, float]:
        """The metrics in an entry of the log that is of an evaluation; empty if it is of something else."""
        names = [name for name in entry if is_measured(name) and name != "loss"]
        # In an order of their own, since that of entries that were read from a checkpoint is another one; 5 before 10.
        names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
        return {name.removeprefix("eval_"): entry[name] for name in names}

    def describe_scores(self) -> str:
        """The main metrics of the model that is saved, and before training."""
        scores, before = self.scores_after(self.saved_step), self.scores_after(0)
        found = [
            f"{name} {score:.4f}" + (f" ({before[name]:.4f} before training)" if name in before else "")
            for name, score in scores.items()
            if name.endswith(MAIN_METRICS)
        ]
        best = f" of step {self.saved_step:,}, the best" if self.args.load_best_model_at_end else ""
        return f"{best}: {', '.join(found)}" if found else best

    def fill_card(self) -> None:
        """Fill the model card from the log: a part of a run that was interrupted knows nothing of those before it."""
        card, callbacks = self.model.model_card_data, self.callback_handler.callbacks
        several = self.evaluator.evaluators if isinstance(self.evaluator, SequentialEvaluator) else [self.evaluator]
        self.args.eval_on_start = self.evaluator is not None
        (of_card,) = [callback for callback in callbacks if isinstance(callback, BaseModelCardCallback)]
        of_card.on_train_begin(self.args, self.state, self.control, model=self.model)
        # The times would be those of this part alone.
        card._training_start_time, card.evaluation_duration = None, 0.0
        card.training_logs, card.eval_results_dict, of_saved = [], {}, {}
        for entry in self.state.log_history:
            epoch, step = entry["epoch"], entry["step"]
            if "loss" in entry:
                card.training_logs.append({"Epoch": epoch, "Step": step, "Training Loss": entry["loss"]})
            for evaluator in several if self.scores_of(entry) else ():
                scores = {
                    name: value
                    for name, value in self.scores_of(entry).items()
                    if name.startswith(f"{evaluator.name}_")
                }
                (evaluator.primary_metric,) = [name for name in scores if name.endswith(MAIN_METRICS)]
                card.set_evaluation_metrics(evaluator, scores, epoch, step)
                if step == self.saved_step:
                    of_saved[evaluator] = scores
        if self.args.load_best_model_at_end:
            card.set_best_model_step(self.saved_step)
            card.eval_results_dict |= of_saved

    def describe(self) -> str:
        """The datasets with their sizes, shares and batches, the model, the machine, and the start."""
        sizes = {name: len(dataset.rows) for name, dataset in self.data.train.items()}
        shares = sampling_probabilities(list(sizes.values()), self.settings.alpha).tolist()
        lines = [
            f"{name}: {size:,} rows, {share:.1%} of the steps, {self.batch_sizes[name]} rows in a batch"
            for (name, size), share in zip(sizes.items(), shares)
        ]
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        lines.append(
            f"{parameters:,} parameters; {self.args.world_size} x {self.args.device.type}; "
            f"{self.args.gradient_accumulation_steps} batches per step and process"
        )
        if self.has_adapters:
            lines.append(describe_adapters(self.model))
        if prompt := self.model.prompts.get("query"):
            lines.append(f"queries get the prompt {prompt!r}, that of {self.data.dataset_of_queries().name}")
        checkpoint = self.run.checkpoint
        lines.append(f"resuming from {checkpoint}" if checkpoint else f"starting from {self.settings.model}")
        return "\n".join(lines)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        # Transformers calls this on every process. Its own `_save` checks; that of Sentence Transformers does not.
        if self.args.should_save:
            self.fill_card()
            super()._save(output_dir, state_dict)

    def since_log(self) -> dict[str, Any]:
        # Losses such as that of SPLADE log the parts that they are the sum of.
        parts = {
            name: self.accelerator.reduce(value.clone(), "sum")
            for name, value in self.accum_loss_components["train"].items()
        }
        return super().since_log() | {"parts": {name: value.item() for name, value in parts.items()}}

    def go_on_since_log(self, measured: dict[str, Any]) -> None:
        super().go_on_since_log(measured)
        # The log adds up those of all processes.
        share = self.is_world_process_zero()
        self.accum_loss_components["train"] = {
            name: torch.tensor(value * share, device=self.args.device) for name, value in measured["parts"].items()
        }


class EmbeddingTrainer(MixtureTrainer, SentenceTransformerTrainer):
    """Trains dense embeddings."""

    data_collator_class = ContrastiveCollator


class SparseTrainer(MixtureTrainer, SparseEncoderTrainer):
    """Trains sparse embeddings (SPLADE)."""

    best_by = f"eval_retrieval_dot_{NDCG}"
    data_collator_class = ContrastiveCollator


class MultiVectorTrainer(MixtureTrainer, MultiVectorEncoderTrainer):
    """Trains late-interaction models (ColBERT)."""

    best_by = f"eval_retrieval_maxsim_{NDCG}"
    data_collator_class = MultiVectorCollator


class RerankerTrainer(MixtureTrainer, CrossEncoderTrainer):
    """Trains rerankers. The settings have `negatives`."""

    best_by = f"eval_reranking_{NDCG}"
    data_collator_class = RerankingCollator

    def __init__(self, model: BaseModel, training: PairTraining, **kwargs):
        if training.arguments.ddp_find_unused_parameters is None:
            # The Trainer would set it to True for models that are not Transformers' own. DDP does not find the tensors
            # in the output of a reranker, so it would take all weights as unused and fail in the first backward pass.
            training.arguments.ddp_find_unused_parameters = False
        super().__init__(model, training, **kwargs)

    def use_prompts(self, model: CrossEncoder, arguments: EmbeddingArguments) -> None:
        """A reranker reads no instructions: with them, a small one learned nothing (benchmarks/NOTES.md)."""
        model.prompts, model.default_prompt_name = {}, None

    def get_data_collator(self, **kwargs) -> RerankingCollator:
        collator = super().get_data_collator(**kwargs)
        collator.negatives = self.settings.negatives
        return collator

    def rows_of_batch(self, dataset: PairDataset, batch_size: int) -> int:
        """Every row becomes equally many pairs, however many hard negatives it has."""
        return min(batch_size, dataset.batch_size or batch_size)

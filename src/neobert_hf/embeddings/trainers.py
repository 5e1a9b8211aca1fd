"""Sentence Transformers' trainers with the paper's mixture of datasets, and resuming from complete checkpoints only."""

from pathlib import Path

import torch
from sentence_transformers import (
    CrossEncoderTrainer,
    MultiVectorEncoderTrainer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    SparseEncoderTrainer,
)
from sentence_transformers.base.model import BaseModel
from torch.utils.data import BatchSampler, ConcatDataset

from neobert_hf.common.files import write_json
from neobert_hf.embeddings.batches import (
    ContrastiveCollator,
    FullBatchSampler,
    MixtureBatchSampler,
    MultiVectorCollator,
    RerankingCollator,
    draw_datasets,
    sampling_probabilities,
)
from neobert_hf.embeddings.descriptions import PairDataset
from neobert_hf.embeddings.models import describe_reranker
from neobert_hf.embeddings.pairs import most_negatives
from neobert_hf.embeddings.prompts import add_to_card, describe_choice, set_prompts
from neobert_hf.embeddings.recipe import Run, TrainingData
from neobert_hf.training.adapters import describe_adapters, load_adapters, merge_adapters
from neobert_hf.training.launching import check_launch, end_processes
from neobert_hf.training.trainer import ResumableTrainer


class MixtureTrainer(ResumableTrainer):
    """Training on a mixture of datasets: the part that all kinds of models share.

    Args:
        kwargs: for Sentence Transformers' trainer of this kind of model, such as `loss` and `evaluator`.

    Raises:
        ValueError: if a dataset does not have enough different rows for a batch. For more, see `ResumableTrainer`.
    """

    # Every kind of model has a class of its own with the same fields.
    training_args_class = SentenceTransformerTrainingArguments

    def __init__(self, model: BaseModel, run: Run, **kwargs):
        self.run = run
        # The number of rows in each dataset, and in a batch of it.
        self.sizes = [len(rows) for rows in run.data.train.values()]
        self.batch_sizes = self.choose_batch_sizes(run.data, run.arguments.per_device_train_batch_size)
        run.arguments.prompts = {
            name: self.prompt_setting(description, most_negatives(run.data.train[name]))
            for name, description in run.data.descriptions.items()
        }
        set_prompts(model, run.data)
        self.check_room(model)
        super().__init__(model, run.arguments, run.data.train, settings=run.values, **kwargs)
        if self.engine != "plain":
            # Sentence Transformers saves the module as it is: with these engines, a shard.
            raise ValueError(
                "FSDP and DeepSpeed would save incomplete models here: use DDP (configs/accelerate/ddp.yaml)."
            )

    @staticmethod
    def choose_batch_sizes(data: TrainingData, batch_size: int) -> dict[str, int]:
        """Rows of a batch by dataset: fewer with more hard negatives, so that every batch has the same number of texts.

        Args:
            batch_size: rows of a dataset without hard negatives.

        Raises:
            ValueError: if a batch has fewer than 2 rows, so that no row has others to be contrasted with.
        """
        batch_sizes = {}
        for name, description in data.descriptions.items():
            texts = 2 + most_negatives(data.train[name])
            batch_sizes[name] = min(2 * batch_size // texts, description.batch_size or batch_size)
            if batch_sizes[name] < 2:
                raise ValueError(
                    f"Dataset {name}: a batch of {2 * batch_size} texts cannot hold 2 rows with up to {texts - 2} hard "
                    "negatives each, and every row is contrasted with the others of its batch. Set a smaller "
                    f"`max_negatives`, or a `per_device_train_batch_size` of {texts} or more."
                )
        return batch_sizes

    def prompt_setting(self, description: PairDataset, negatives: int) -> dict[str, str] | str:
        """The prompts of a dataset as Sentence Transformers' setting `prompts` takes them: by column of a batch.

        Args:
            negatives: the largest number of hard negatives that a row of the dataset has.
        """
        documents = ["positive", "hard_negative", *(f"negative_{number}" for number in range(negatives))]
        prompts = {"query": description.prompt} | dict.fromkeys(documents, description.document_prompt)
        return {column: prompt for column, prompt in prompts.items() if prompt}

    @staticmethod
    def check_room(model: BaseModel) -> None:
        """Refuse prompts that leave no room for a text."""
        for prompt in model.prompts.values():
            length = len(model.tokenizer(prompt)["input_ids"])
            if model.max_seq_length is not None and length >= model.max_seq_length:
                raise ValueError(
                    f"The prompt {prompt!r} has {length} tokens with the special ones, and texts are cut at "
                    f"{model.max_seq_length}, so nothing would be left of a text. Shorten the instruction or set a "
                    "higher `max_length`."
                )

    def complete(self) -> None:
        """Train to the end, evaluate, write `model/` and `log.json`, and leave the process group."""
        check_launch(self.accelerator)
        output = Path(self.args.output_dir)
        if self.is_world_process_zero():
            print(self.describe(), flush=True)
        self.train_to_the_end(self.run.checkpoint)
        evaluated = {entry["step"] for entry in self.state.log_history if "eval_runtime" in entry}
        if self.evaluator is not None and self.args.max_steps not in evaluated:
            self.evaluate()
        if self.has_adapters:
            merge_adapters(self.model.transformers_model)
        self.save_whole(output / "model")
        if self.is_world_process_zero():
            write_json(output / "log.json", self.state.log_history)
        if self.is_world_process_zero():
            print(f"{output / 'model'}, {output / 'log.json'}", flush=True)
        end_processes(self.accelerator)

    def describe(self) -> str:
        """The datasets with their sizes, probabilities and batches, the model, the machine, and the start."""
        lines = [f"{'dataset':<20}{'rows':>12}{'drawn':>8}{'rows of a batch':>17}"]
        probabilities = sampling_probabilities(self.sizes, self.run.settings.alpha).tolist()
        for name, rows, probability in zip(self.batch_sizes, self.sizes, probabilities):
            lines.append(f"{name:<20}{rows:>12,}{probability:>8.1%}{self.batch_sizes[name]:>17}")
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        lines.append(
            f"{parameters:,} parameters; {self.args.world_size} x {self.args.device.type}; "
            f"{self.args.gradient_accumulation_steps} batches per step and process"
        )
        if (warmup := self.args.get_warmup_steps(steps := self.args.max_steps)) >= steps > 0:
            lines.append(
                f"note: the learning rate warms up over {warmup:,} steps and training has {steps:,} steps, so it never "
                "reaches its peak; set --warmup_steps 0.1, a tenth of the steps."
            )
        if self.has_adapters:
            lines.append(describe_adapters(self.model))
        lines.append(describe_choice(self.run.data))
        lines.append(f"resuming from {self.run.checkpoint}" if self.run.checkpoint else f"starting from {self.start()}")
        return "\n".join(lines)

    def start(self) -> str:
        """The model that training starts from, for the printed description."""
        return self.run.settings.model

    def get_batch_sampler(self, dataset, batch_size, drop_last, valid_label_columns=None, generator=None, seed=0):
        name = next(name for name, rows in self.train_dataset.items() if rows is dataset)
        batch_size = self.batch_sizes[name]
        # Without the hard negatives: two rows that have none would count as having a text in common.
        texts = dataset.with_format(None).select_columns(["query", "positive"])
        hashed = self.args.batch_sampler == "no_duplicates_hashed"
        options = {"generator": torch.Generator(), "seed": seed, "precompute_hashes": hashed}
        sampler = FullBatchSampler(texts, batch_size, **options)
        if len(next(iter(sampler), [])) < batch_size:
            raise ValueError(
                f"Dataset {name} has {len(dataset):,} rows, but not {batch_size} without a text in common, which a "
                "batch needs. Give it a smaller `batch_size`, or add data."
            )
        return sampler

    def get_multi_dataset_batch_sampler(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], generator=None, seed=0
    ) -> MixtureBatchSampler:
        draws = draw_datasets(self.sizes, self.run.settings.alpha, self.args.max_steps, seed)
        batches_per_step = self.args.world_size * self.args.gradient_accumulation_steps
        return MixtureBatchSampler(dataset, batch_samplers, draws, batches_per_step)

    @property
    def has_adapters(self) -> bool:
        """Whether this run trains adapters in place of the weights."""
        return getattr(self.run.settings, "lora_rank", None) is not None

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        if self.has_adapters:
            # Sentence Transformers would load the frozen weights again, in the dtype that they are stored in.
            load_adapters(self.model.transformers_model, Path(checkpoint_path))
        else:
            super()._load_from_checkpoint(checkpoint_path)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        # Transformers calls this on every process. Its own `_save` checks; that of Sentence Transformers does not.
        if self.args.should_save:
            super()._save(output_dir, state_dict)
            add_to_card(Path(output_dir or self.args.output_dir) / "README.md", self.model, self.run.data)


class EmbeddingTrainer(MixtureTrainer, SentenceTransformerTrainer):
    """Trains dense embeddings. See `MixtureTrainer`."""

    data_collator_class = ContrastiveCollator


class SparseTrainer(MixtureTrainer, SparseEncoderTrainer):
    """Trains sparse embeddings (SPLADE). See `MixtureTrainer`."""

    data_collator_class = ContrastiveCollator


class MultiVectorTrainer(MixtureTrainer, MultiVectorEncoderTrainer):
    """Trains late-interaction models (ColBERT). See `MixtureTrainer`."""

    data_collator_class = MultiVectorCollator


def check_negatives(run: Run) -> None:
    """Refuse batches with too few rows to supply the negatives of a query.

    Raises:
        ValueError: naming the dataset, if it has a smaller batch than others.
    """
    wanted, rows = run.settings.negatives, run.arguments.per_device_train_batch_size
    for name, size in RerankerTrainer.choose_batch_sizes(run.data, rows).items():
        # The loss counts on this many negatives of each query: a query's own, and documents of the other rows.
        most = most_negatives(run.data.train[name]) + size - 1
        if wanted > most:
            whose = "" if size == rows else f"dataset {name}, with `batch_size` {size} of its own: "
            raise ValueError(f"{whose}`negatives` is {wanted}; batches of {size} rows allow 1 to {most}.")


def check_mined_negatives(run: Run) -> None:
    """Refuse, before they are mined, more hard negatives than two rows of a batch have room for.

    Raises:
        ValueError: if `negatives` is too large.
    """
    most = run.arguments.per_device_train_batch_size - 2
    if run.settings.negatives > most and not all(map(most_negatives, run.data.train.values())):
        raise ValueError(
            f"`negatives` is {run.settings.negatives}; batches of {2 * (most + 2)} texts have room for two rows with "
            f"up to {most} each: give less, or a higher `per_device_train_batch_size`."
        )


class RerankerTrainer(MixtureTrainer, CrossEncoderTrainer):
    """Trains rerankers. The settings of the run are `RerankerArguments`. See `MixtureTrainer`."""

    data_collator_class = RerankingCollator

    def __init__(self, model: BaseModel, run: Run, **kwargs):
        if run.arguments.ddp_find_unused_parameters is None:
            # The Trainer would set it to True for models that are not Transformers' own. DDP does not find the tensors
            # in the output of a reranker, so it would take all weights as unused and fail in the first backward pass.
            run.arguments.ddp_find_unused_parameters = False
        super().__init__(model, run, **kwargs)

    def get_data_collator(self, **kwargs) -> RerankingCollator:
        collator = super().get_data_collator(**kwargs)
        collator.negatives = self.run.settings.negatives
        return collator

    @staticmethod
    def choose_batch_sizes(data: TrainingData, batch_size: int) -> dict[str, int]:
        """Every row becomes equally many pairs, however many hard negatives it has."""
        return {name: min(batch_size, each.batch_size or batch_size) for name, each in data.descriptions.items()}

    def prompt_setting(self, description: PairDataset, negatives: int) -> str:
        """The prompt before pairs of query and document."""
        if description.document_prompt:
            raise ValueError(
                f"Dataset {description.name} has a `document_instruction`. A reranker reads query and document as one "
                "text, with one instruction before it: leave `document_instruction` out."
            )
        return description.prompt

    def start(self) -> str:
        return describe_reranker(self.run.settings.model, self.run.settings.trust_remote_code)

"""Training a reranker (cross-encoder): query and document are read together and get one score.

    accelerate launch --config_file configs/accelerate/ddp.yaml examples/train_reranker.py \\
        --config configs/embeddings/reranker.yaml --model runs/pretrain/model

Run the same command again after an interruption: it resumes from the newest complete checkpoint, to the bit on a CPU.
`output_dir` gets checkpoints, `model/` (for `CrossEncoder(...)`, with a model card) and `log.json`.

References:
    Passage re-ranking with BERT: https://arxiv.org/abs/1901.04085.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from datasets.fingerprint import Hasher
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.util import mine_hard_negatives
from torch import tensor
from transformers import AutoConfig, set_seed

import neobert_hf  # noqa: F401  (registers the architecture)
from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.settings import parse_config
from neobert_hf.embeddings.batches import RerankingCollator
from neobert_hf.embeddings.datasets import most_negatives
from neobert_hf.embeddings.recipe import (
    RecipeArguments,
    RecipeData,
    find_resume,
    positives_of_queries,
    read_data,
    result_settings,
)
from neobert_hf.embeddings.trainers import EmbeddingArguments, RerankerTrainer, load_transformer


@dataclass
class RerankerArguments(RecipeArguments):
    """What is trained, on which data, against which documents."""

    negatives: int = field(default=4, metadata={"help": "wrong documents of a query: its hard negatives, then others"})
    miner: str | None = field(
        default=None, metadata={"help": "embedding model that finds hard negatives where a dataset has none"}
    )


def mine(pairs: Dataset, prompt: str, settings: RerankerArguments, folder: Path) -> Dataset:
    """The pairs with the documents most like their queries as hard negatives, from a file once that is written."""
    name = Hasher.hash([pairs["query"][:], pairs["positive"][:], prompt, settings.miner, settings.negatives])
    file = folder / f"{name}.parquet"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        labelled = mine_hard_negatives(
            pairs.select_columns(["query", "positive"]),
            SentenceTransformer(settings.miner, trust_remote_code=settings.trust_remote_code),
            num_negatives=settings.negatives,
            query_prompt=prompt or None,
            # What comes closer to the score of the right document may well be right, too (arXiv 2407.15831).
            relative_margin=0.05,
            # The formats with one row a query drop those with fewer.
            output_format="labeled-pair",
        )
        found = positives_of_queries(labelled.filter(lambda row: row["label"] == 0))
        mined = pairs.map(lambda row: {"negatives": sorted(found.get(row["query"], ()))})
        with atomic_write(file) as partial:
            mined.to_parquet(partial)
    return Dataset.from_parquet(str(file))


def build_reranker(model: str, max_length: int, trust_remote_code: bool = False) -> CrossEncoder:
    """Query and document in one row, and one score from NeoBERT's classification head."""
    return CrossEncoder(modules=[load_transformer(model, max_length, trust_remote_code, "sequence-classification")])


def describe_head(model: str, trust_remote_code: bool) -> str:
    names = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).architectures or []
    trained = any(name.endswith("ForSequenceClassification") for name in names)
    return f"{model}, with {'its own' if trained else 'a new'} classification head"


def reranking_evaluator(data: RecipeData) -> CrossEncoderRerankingEvaluator | None:
    """The right documents of the first 200 queries, each among 20 others, the same in every run."""
    if data.retrieval is None:
        return None
    prompt, texts, chooser = data.evaluation["retrieval"].prompt, data.retrieval.unique("positive"), random.Random(0)
    samples = []
    for query, right in list(positives_of_queries(data.retrieval).items())[:200]:
        wrong = [text for text in chooser.sample(texts, min(20 + len(right), len(texts))) if text not in right]
        samples.append({"query": prompt + query, "positive": sorted(right), "negative": wrong[:20]})
    return CrossEncoderRerankingEvaluator(samples, name="reranking", write_csv=False)


def main(args: list[str] | None = None) -> None:
    # 1. Settings
    settings, arguments = parse_config(RerankerArguments, EmbeddingArguments, args=args)
    set_seed(arguments.seed)
    rows = arguments.per_device_train_batch_size
    if not 0 < settings.negatives < rows:
        raise ValueError(f"`negatives` is {settings.negatives}; batches of {rows} rows allow 1 to {rows - 1}.")

    # 2. Data, with one instruction for the queries of each dataset
    data = read_data(settings, arguments)
    arguments.prompts = {one.name: one.prompt for one in data.descriptions}
    batch_sizes = {one.name: min(rows, one.batch_size or rows) for one in data.descriptions}
    evaluator = reranking_evaluator(data)

    # 3. Hard negatives for the datasets that have none
    values = result_settings(settings, arguments, data)
    resume, source = find_resume(settings.model, arguments, values)
    if settings.miner is not None:
        folder = Path(arguments.output_dir) / "mined"
        with arguments.main_process_first(desc="mining hard negatives"):
            for name, prompt in arguments.prompts.items():
                if not most_negatives(data.train[name]):
                    data.train[name] = mine(data.train[name], prompt, settings, folder)

    # 4. Model
    start = describe_head(settings.model, settings.trust_remote_code)
    model = build_reranker(source, settings.max_length, settings.trust_remote_code)
    loss = BinaryCrossEntropyLoss(model, pos_weight=tensor(float(settings.negatives)))

    # 5. Training, evaluation, model with its card, and numbers
    collator = RerankingCollator(model.preprocess, prompts=arguments.prompts, negatives=settings.negatives)
    trainer = RerankerTrainer(
        model,
        arguments,
        data.train,
        batch_sizes,
        settings.alpha,
        values,
        loss=loss,
        evaluator=evaluator,
        data_collator=collator,
    )
    trainer.run(resume, start)


if __name__ == "__main__":
    main()

"""Hard negatives for training datasets that have none, found by an embedding model.

The documents most similar to a query are the most instructive negatives, but some of them are right answers that nobody
has labelled. So a document whose similarity comes too close to that of the right document is not used as a negative.
"""

from functools import partial
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from neobert_hf.common.files import write_parquet
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.embeddings.arguments import MiningSettings
from neobert_hf.embeddings.datasets import PairDataset, positives_of_queries
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.embeddings.recipe import PairTraining


# A negative scores at most 95% of what the right document does: the best of the filters that NV-Retriever compares
# (arXiv 2407.15831, TopK-PercPos), and what Sentence Transformers recommends.
RELATIVE_MARGIN = 0.05


def add_mined_negatives(training: PairTraining) -> None:
    """Give hard negatives to the training datasets that have none. They are mined once, into `output_dir/mined`.

    Raises:
        FileNotFoundError: if training has begun, and the negatives that it began with are missing.
        ValueError: if the miner is no trained embedding model.
    """
    settings = training.settings
    identity = [model_fingerprint(settings.miner), settings.negatives, RELATIVE_MARGIN]
    for dataset in training.data.train.values():
        if not dataset.most_negatives():
            training.replace_rows(dataset, "mined", identity, partial(mine_negatives, settings, dataset))


def mine_negatives(settings: MiningSettings, dataset: PairDataset, file: Path) -> None:
    """Store the rows of a dataset, each with up to `negatives` of the documents most similar to its query."""
    miner = load_trained_model(settings.miner, "miner", settings.trust_remote_code)
    query_prompt, document_prompt = prompts_of_helper("miner", miner, dataset)
    labelled = mine_hard_negatives(
        dataset.rows.select_columns(["query", "positive"]),
        miner,
        num_negatives=settings.negatives,
        query_prompt=query_prompt,
        corpus_prompt=document_prompt,
        relative_margin=RELATIVE_MARGIN,
        # The formats with one row per query drop queries with fewer negatives.
        output_format="labeled-pair",
    )
    found = positives_of_queries(labelled.filter(lambda row: row["label"] == 0))
    queries = len(set(dataset.rows["query"]))
    print(f"mined: hard negatives for {len(found):,} of {queries:,} queries of {dataset.name}", flush=True)
    write_parquet(file, dataset.rows.map(lambda row: {"negatives": sorted(found.get(row["query"], ()))}))


def prompts_of_helper(who: str, model: SentenceTransformer, dataset: PairDataset) -> list[str]:
    """The prompts with which a trained model, such as a miner, reads the queries and documents of a dataset.

    They are those of the dataset if the model was saved with them, and otherwise its own. A note says so.
    """
    prompts = []
    for kind, prompt in (("query", dataset.prompt), ("document", dataset.document_prompt)):
        own = prompt_of(model, kind)
        if prompt != own and (not prompt or prompt not in model.prompts.values()):
            print(f"note: the {who} reads each {kind} with its own prompt {own!r}, not with {prompt!r}.", flush=True)
            prompt = own
        prompts.append(prompt)
    return prompts

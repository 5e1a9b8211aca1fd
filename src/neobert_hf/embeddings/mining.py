"""Hard negatives for training datasets that have none, found by an embedding model.

The documents most similar to a query are the most instructive negatives, but some of them are right answers that nobody
has labelled. So a document whose similarity comes too close to that of the right document is not used as a negative
(`relative_margin`).
"""

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from transformers import set_seed

from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.data.stored_rows import load_rows, store_rows
from neobert_hf.embeddings.arguments import MiningArguments
from neobert_hf.embeddings.datasets import PairDataset, positives_of_queries
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.embeddings.recipe import Run


def add_mined_negatives(run: Run) -> None:
    """Give hard negatives to the training datasets that have none. They are mined once, into `output_dir/mined`.

    A query gets `negatives` of the run's settings at most.

    Raises:
        FileNotFoundError: if training has begun, and the negatives that it began with are missing.
        ValueError: if the miner is no trained embedding model.
    """
    settings, miner = run.settings, model_fingerprint(run.settings.miner)
    options = [settings.negatives, settings.relative_margin]
    with run.arguments.main_process_first(desc="mining hard negatives"):
        for dataset in run.data.train.values():
            if not dataset.most_negatives():
                pairs = dataset.rows.select_columns(["query", "positive"])
                prompts = [dataset.name, dataset.prompt, dataset.document_prompt]
                file = run.stored_rows_file("mined", pairs, miner, prompts, options)
                if not file.exists():
                    store_rows(mine_negatives(dataset, settings), file)
                dataset.rows = load_rows(file)
    # Loading the miner may have drawn random numbers, on which a new head must not depend.
    set_seed(run.arguments.seed)


def mine_negatives(dataset: PairDataset, settings: MiningArguments) -> Dataset:
    """The rows of a dataset with the documents most similar to their queries as hard negatives."""
    miner = load_trained_model(settings.miner, "miner", settings.trust_remote_code)
    query_prompt, document_prompt = prompts_of_helper("miner", miner, dataset)
    labelled = mine_hard_negatives(
        dataset.rows.select_columns(["query", "positive"]),
        miner,
        num_negatives=settings.negatives,
        query_prompt=query_prompt,
        corpus_prompt=document_prompt,
        relative_margin=settings.relative_margin,
        # The formats with one row per query drop queries with fewer negatives.
        output_format="labeled-pair",
    )
    found = positives_of_queries(labelled.filter(lambda row: row["label"] == 0))
    queries = len(set(dataset.rows["query"]))
    print(f"mined: hard negatives for {len(found):,} of {queries:,} queries of {dataset.name}", flush=True)
    if not found:
        print("note: every document scores too near the right one; lower `relative_margin`, or change the miner.")
    return dataset.rows.map(lambda row: {"negatives": sorted(found.get(row["query"], ()))})


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

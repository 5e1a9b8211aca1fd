"""Hard negatives for training datasets that have none, found by an embedding model and checked by a reranker.

The documents most similar to a query are the most instructive negatives, but some of them are right answers that nobody
has labelled. Two checks leave those out. A document whose score comes too close to that of the right document is not
used as a negative (`relative_margin`, `absolute_margin`). With a reranker (`cross_encoder`), both scores are those of
the reranker, which reads query and document together and judges better than the miner.
"""

from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from transformers import set_seed

from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.data.stored_rows import rows_once, store_rows
from neobert_hf.embeddings.arguments import MiningArguments
from neobert_hf.embeddings.datasets import PairDataset, most_negatives, positives_of_queries
from neobert_hf.embeddings.models import load_trained_model, load_trained_reranker
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.embeddings.recipe import Run


def add_mined_negatives(run: Run) -> None:
    """Give hard negatives to the training datasets that have none, and keep them in `output_dir/mined`."""
    folder = Path(run.arguments.output_dir) / "mined"
    with run.arguments.main_process_first(desc="mining hard negatives"):
        for name, pairs in run.data.train.items():
            if not most_negatives(pairs):
                description, begun = run.data.descriptions[name], run.checkpoint is not None
                run.data.train[name] = mine_negatives(pairs, description, run.settings, folder, begun)
    # Loading the miner may have drawn random numbers, on which a new head must not depend.
    set_seed(run.arguments.seed)


def mine_negatives(
    pairs: Dataset, description: PairDataset, settings: MiningArguments, folder: Path, begun: bool = False
) -> Dataset:
    """The pairs with the documents most similar to their queries as hard negatives. They are mined once, into a file.

    Args:
        pairs: rows of `query`, `positive` and `negatives`.
        description: of the dataset; see `prompts_of_helper`.
        settings: `negatives` is the most that a row gets.
        folder: of the file, whose name depends on what was mined and how.
        begun: whether training has begun, so that its hard negatives must have been mined already.

    Raises:
        FileNotFoundError: if training has begun, and the file is missing.
        ValueError: if `cross_encoder` is no trained reranker.
    """
    helpers = [model_fingerprint(path) for path in (settings.miner, settings.cross_encoder) if path]
    prompts = [description.name, description.prompt, description.document_prompt]
    options = [settings.negatives, settings.relative_margin, settings.absolute_margin]
    identity = fingerprint(pairs.select_columns(["query", "positive"]), helpers, prompts, options)

    def mine(file: Path) -> None:
        found = _find_negatives(pairs, description, settings)
        print(f"mined: hard negatives for {len(found):,} of {len(set(pairs['query'])):,} queries", flush=True)
        if not found:
            print("note: every document scores too near the right one; lower the margins, or change the miner.")
        store_rows(pairs.map(lambda row: {"negatives": sorted(found.get(row["query"], ()))}), file)

    return rows_once(folder / f"{identity}.parquet", begun, mine)


def _find_negatives(pairs: Dataset, description: PairDataset, settings: MiningArguments) -> dict[str, set[str]]:
    """The hard negatives of each query that has some."""
    miner = load_trained_model(settings.miner, "miner", settings.trust_remote_code)
    reranker = None
    if settings.cross_encoder is not None:
        reranker = load_trained_reranker(settings.cross_encoder, "cross_encoder", settings.trust_remote_code)
    query_prompt, document_prompt = prompts_of_helper("miner", miner, description)
    labelled = mine_hard_negatives(
        pairs.select_columns(["query", "positive"]),
        miner,
        cross_encoder=reranker,
        num_negatives=settings.negatives,
        query_prompt=query_prompt,
        corpus_prompt=document_prompt,
        relative_margin=settings.relative_margin,
        absolute_margin=settings.absolute_margin,
        # The formats with one row per query drop queries with fewer negatives.
        output_format="labeled-pair",
    )
    return positives_of_queries(labelled.filter(lambda row: row["label"] == 0))


def prompts_of_helper(who: str, model: SentenceTransformer, description: PairDataset) -> list[str]:
    """The prompts with which a trained model, such as a miner, reads the queries and documents of a dataset.

    They are those of the dataset if the model was saved with them, and otherwise its own. A note says so.
    """
    prompts = []
    for kind, prompt in (("query", description.prompt), ("document", description.document_prompt)):
        own = prompt_of(model, kind)
        if prompt != own and (not prompt or prompt not in model.prompts.values()):
            print(f"note: the {who} reads each {kind} with its own prompt {own!r}, not with {prompt!r}.", flush=True)
            prompt = own
        prompts.append(prompt)
    return prompts

"""Hard negatives for training datasets that have none, found by an embedding model and checked by a reranker.

The documents most similar to a query are the most instructive negatives, but some of them are right answers that nobody
has labelled. Two checks leave those out. A document whose score comes too close to that of the right document is not
used as a negative (`relative_margin`, `absolute_margin`). With a reranker (`cross_encoder`), both scores are those of
the reranker, which reads query and document together and judges better than the miner.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from datasets import Dataset
from sentence_transformers.base.model import BaseModel
from sentence_transformers.util import mine_hard_negatives
from transformers import set_seed

from neobert_hf.common.fingerprints import fingerprint, model_fingerprint
from neobert_hf.data.stored_rows import rows_once, store_rows
from neobert_hf.embeddings.arguments import MiningArguments
from neobert_hf.embeddings.descriptions import PairDataset
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.models import load_trained_model, load_trained_reranker
from neobert_hf.embeddings.pairs import most_negatives, positives_of_queries
from neobert_hf.embeddings.recipe import Run, read_beside_model


def add_mined_negatives(run: Run) -> None:
    """Give hard negatives to training datasets that have none, and keep them in `output_dir/mined`."""
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
        description: of the dataset. The miner and the reranker get its prompts if they were saved with them, and their
            own otherwise.
        settings: `negatives` is the most that a row gets.
        folder: of the file, whose name depends on what was mined and how.
        begun: whether training has begun, so that its hard negatives must have been mined already.

    Raises:
        FileNotFoundError: if training has begun, and the file is missing.
        ValueError: if `cross_encoder` is no trained reranker.
    """
    miner = model_fingerprint(settings.miner)
    file = folder / f"{_name_of_file(pairs, description, miner, settings)}.parquet"

    def store(file: Path) -> None:
        store_rows(pairs.map(_find_negatives(pairs, description, settings)), file)

    return rows_once(file, begun, store)


def _find_negatives(pairs: Dataset, description: PairDataset, settings: MiningArguments) -> Callable[[dict], dict]:
    """A function that gives a row its `negatives`."""
    model = load_trained_model(settings.miner, "miner", settings.trust_remote_code)
    reranker = None
    if settings.cross_encoder is not None:
        reranker = load_trained_reranker(settings.cross_encoder, "cross_encoder", settings.trust_remote_code)
        # `mine_hard_negatives` takes no prompt for the reranker.
        reranker.prompts["mining"] = prompt_of_helper("reranker", reranker, description.prompt)
        reranker.default_prompt_name = "mining"
    query_prompt, document_prompt = prompts_of_helper("miner", model, description)
    labelled = mine_hard_negatives(
        pairs.select_columns(["query", "positive"]),
        model,
        cross_encoder=reranker,
        num_negatives=settings.negatives,
        query_prompt=query_prompt,
        corpus_prompt=document_prompt,
        relative_margin=settings.relative_margin,
        absolute_margin=settings.absolute_margin,
        # The formats with one row per query drop queries with fewer negatives.
        output_format="labeled-pair",
    )
    found = positives_of_queries(labelled.filter(lambda row: row["label"] == 0))
    print(f"mined: hard negatives for {len(found):,} of {len(set(pairs['query'])):,} queries", flush=True)
    if not found:
        print("note: every document scores too near the right one; lower the margins, or change the miner.", flush=True)
    return lambda row: {"negatives": sorted(found.get(row["query"], ()))}


def _name_of_file(pairs: Dataset, description: PairDataset, miner: str, settings: MiningArguments) -> str:
    prompts = [description.prompt, description.document_prompt, *name_for_prompts(settings.miner, description)]
    reranker = settings.cross_encoder and model_fingerprint(settings.cross_encoder)
    options = [settings.negatives, settings.relative_margin, settings.absolute_margin]
    return fingerprint(pairs.select_columns(["query", "positive"]), prompts, miner, reranker, options)


def name_for_prompts(helper: str, description: PairDataset) -> list[str]:
    """The dataset's name if a helper was saved with prompts for it, otherwise nothing: see `prompts_of_helper`.

    It belongs to the identity of a helper's stored results, which depend on the prompts.
    """
    stored = json.loads(read_beside_model(helper, "config_sentence_transformers.json") or "{}")
    return [description.name] if f"{description.name}-document" in stored.get("prompts", {}) else []


def prompts_of_helper(who: str, model: BaseModel, description: PairDataset) -> tuple[str, str]:
    """The prompts with which a helper reads the queries and documents of a dataset; see `prompt_of_helper`."""
    name = description.name
    if model.prompts.get(name) == description.prompt and f"{name}-document" in model.prompts:
        # It was trained on this dataset among others, and gets the prompts of that training, even an empty one.
        return description.prompt, model.prompts[f"{name}-document"]
    query = prompt_of_helper(who, model, description.prompt)
    return query, prompt_of_helper(who, model, description.document_prompt, "document")


def prompt_of_helper(who: str, model: BaseModel, prompt: str, kind: Literal["query", "document"] = "query") -> str:
    """The prompt with which a helper, such as a miner, reads texts that have this one. Prints a note if they differ."""
    if prompt and prompt in model.prompts.values():
        return prompt
    own = prompt_of(model, kind)
    if own != prompt:
        texts = {"query": "queries", "document": "documents"}[kind]
        print(f"note: the {who} reads {texts} with its own prompt {own!r}, not with {prompt!r}.", flush=True)
    return own

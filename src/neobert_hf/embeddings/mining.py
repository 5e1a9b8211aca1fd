"""Hard negatives for training datasets that have none, found by an embedding model."""

from pathlib import Path

from datasets import Dataset
from datasets.fingerprint import Hasher
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.fingerprints import checkpoint_fingerprint, files_fingerprint
from neobert_hf.embeddings.arguments import RerankerArguments
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.pairs import most_negatives, positives_of_queries
from neobert_hf.embeddings.recipe import Run


def add_mined_negatives(run: Run) -> None:
    """Give hard negatives to training datasets of a reranker that have none, and keep them in `output_dir/mined`."""
    folder = Path(run.arguments.output_dir) / "mined"
    with run.arguments.main_process_first(desc="mining hard negatives"):
        for name, pairs in run.data.train.items():
            if not most_negatives(pairs):
                prompt = run.data.descriptions[name].prompt
                run.data.train[name] = mine_negatives(pairs, prompt, run.settings, folder)


def mine_negatives(pairs: Dataset, prompt: str, settings: RerankerArguments, folder: Path) -> Dataset:
    """The pairs with the documents most like their queries as hard negatives, from a file once that is written.

    Args:
        pairs: rows of `query`, `positive` and `negatives`.
        prompt: of the dataset's queries. The miner gets it if it was saved with it, and its own otherwise.
        folder: where the file is, under a name that tells what was mined and how.
    """
    miner = miner_fingerprint(settings.miner)
    name = Hasher.hash([pairs["query"][:], pairs["positive"][:], prompt, miner, settings.negatives])
    file = folder / f"{name}.parquet"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        model = SentenceTransformer(settings.miner, trust_remote_code=settings.trust_remote_code)
        labelled = mine_hard_negatives(
            pairs.select_columns(["query", "positive"]),
            model,
            num_negatives=settings.negatives,
            query_prompt=prompt_of_miner(model, prompt),
            corpus_prompt=prompt_of(model, "document"),
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


def prompt_of_miner(model: SentenceTransformer, prompt: str) -> str:
    """What a miner puts before the queries of a dataset with this prompt; another one than that is said aloud."""
    if prompt and prompt in model.prompts.values():
        return prompt
    own = prompt_of(model, "query")
    if own != prompt:
        print(f"note: the miner mines with its own prompt {own!r}, not with {prompt!r}.", flush=True)
    return own


def miner_fingerprint(miner: str) -> str:
    """A hash of all that the embeddings of a miner depend on: of a folder its files, of a Hub id its commit."""
    folder = Path(miner)
    if not folder.is_dir():
        return checkpoint_fingerprint(miner)
    files = [file for pattern in ("*.safetensors", "*.bin", "*.json", "*.txt") for file in folder.rglob(pattern)]
    return files_fingerprint({str(file.relative_to(folder)): file for file in files})

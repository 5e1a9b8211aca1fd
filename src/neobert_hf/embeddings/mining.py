"""Hard negatives for training datasets that have none, found by an embedding model."""

from pathlib import Path

from datasets import Dataset
from datasets.fingerprint import Hasher
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from neobert_hf.common.atomic_writes import atomic_write
from neobert_hf.common.fingerprints import model_files_fingerprint
from neobert_hf.embeddings.arguments import DenseArguments, RerankerArguments
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.models import load_trained_model
from neobert_hf.embeddings.pairs import most_negatives, positives_of_queries
from neobert_hf.embeddings.recipe import Run
from neobert_hf.training.run_checkpoints import CheckpointError


def add_mined_negatives(run: Run) -> None:
    """Give hard negatives to training datasets that have none, and keep them in `output_dir/mined`."""
    folder = Path(run.arguments.output_dir) / "mined"
    with run.arguments.main_process_first(desc="mining hard negatives"):
        for name, pairs in run.data.train.items():
            if not most_negatives(pairs):
                prompt = run.data.descriptions[name].prompt
                begun = run.checkpoint is not None
                run.data.train[name] = mine_negatives(pairs, prompt, run.settings, folder, begun)


def mine_negatives(
    pairs: Dataset, prompt: str, settings: DenseArguments | RerankerArguments, folder: Path, begun: bool = False
) -> Dataset:
    """The pairs with the documents most like their queries as hard negatives, from a file once that is written.

    Args:
        pairs: rows of `query`, `positive` and `negatives`.
        prompt: of the dataset's queries. The miner gets it if it was saved with it, and its own otherwise.
        folder: where the file is, under a name that tells what was mined and how.
        begun: whether training has begun, with what was mined then.

    Raises:
        CheckpointError: if training has begun, and with other negatives.
    """
    miner = model_files_fingerprint(settings.miner)
    file = folder / f"{_name_of_file(pairs, prompt, miner, settings)}.parquet"
    if begun and not file.exists():
        # Earlier versions knew the miner by its path.
        file = folder / f"{_name_of_file(pairs, prompt, settings.miner, settings)}.parquet"
        if not file.exists():
            raise CheckpointError(
                f"The run in {folder.parent} has begun with other hard negatives: {folder} has none that "
                f"{settings.miner} mined as it is now. Start anew with another `output_dir`."
            )
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        model = load_trained_model(settings.miner, settings.trust_remote_code)
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


def _name_of_file(pairs: Dataset, prompt: str, miner: str, settings: DenseArguments | RerankerArguments) -> str:
    return Hasher.hash([pairs["query"][:], pairs["positive"][:], prompt, miner, settings.negatives])


def prompt_of_miner(model: SentenceTransformer, prompt: str) -> str:
    """What a miner puts before the queries of a dataset with this prompt; another one than that is said aloud."""
    if prompt and prompt in model.prompts.values():
        return prompt
    own = prompt_of(model, "query")
    if own != prompt:
        print(f"note: the miner mines with its own prompt {own!r}, not with {prompt!r}.", flush=True)
    return own

"""What the benchmarks of embeddings share: settings, the pairs to train on, and how scores become tables."""

import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from pretraining import ROOT, run

from neobert_hf.common.files import write_text
from neobert_hf.common.report import mean_interval


# Columns of the tables, by the keys of `embedding_scores.evaluate`.
COLUMNS = {"test FOLDOC": "FOLDOC", "test WordNet": "WordNet", "similarity": "similarity of news"}
TESTS = (
    "Retrieval (nDCG@10): each of 1,000 terms searches 1,000 entries of FOLDOC, and each of 316 sentences searches "
    "1,000 definitions of WordNet. The pretraining text contains nearly all definitions, but none of those that answer "
    "a query. No model was fine-tuned on any of the 1,000."
)
SIMILARITY = "Similarity: Spearman's correlation of the cosine with human judgements of 1,225 pairs of news."


@dataclass(kw_only=True)
class EmbeddingBenchmarkSettings:
    """The settings that every benchmark has, beside its own."""

    data: str = field(metadata={"help": "folder with pairs/ and the test sets", "path": True})
    results: str = field(default="benchmarks/results", metadata={"help": "folder of the report", "path": True})
    seeds: int = field(default=5, metadata={"help": "number of seeds, of all that is random"})
    processes: int = field(default=2, metadata={"help": "runs at a time, of one thread each"})
    limit: str = field(default="", metadata={"help": "further flags of every training, for a trial"})
    test_rows: int | None = field(default=None, metadata={"help": "rows to develop and to test on, for a trial"})


def train_once(script: str, config: str, folder: Path, flags: str) -> Path:
    """Train with a configuration of configs/embeddings unless it is done already, and return the folder of the run."""
    if not (folder / "log.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shared = "--eval_strategy no --save_steps 200 --report_to none"
        flags = f"--config {ROOT}/configs/embeddings/{config} {shared} {flags} --output_dir {folder}"
        run(script, flags, folder / "output.txt", threads=1)
    return folder


def describe_pairs(name: str, data: str, split: Path, text_pairs: str | None = None) -> Path:
    """Write a copy of a shipped description that names the files of a run, and return its path.

    Args:
        name: of the description in configs/embeddings.
        data: folder with the test sets.
        split: folder with the pairs that `split_pairs` left to train on.
        text_pairs: file that make_pairs.py wrote.
    """
    places = {"shared/data/pairs": split, "shared/data": data, "data/text_pairs.parquet": text_pairs or ""}
    text = (ROOT / "configs/embeddings" / name).read_text()
    text = re.sub(rf"[./]*({'|'.join(places)})", lambda found: str(Path(places[found[1]]).resolve()), text)
    file = split / name
    write_text(file, text)
    return file.resolve()


def development_mean(scores: dict[str, float]) -> float:
    """The score by which a learning rate is chosen."""
    return statistics.mean(value for key, value in scores.items() if key.startswith("development"))


def interval(values: list[float], digits: int = 3) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    mean, lower, _ = mean_interval(values)
    return f"{mean:.{digits}f} ± {mean - lower:.{digits}f}"


def gain_interval(better: list[dict], worse: list[dict], key: str) -> tuple[float, float, float]:
    """Mean and 95% interval of what one way of training adds to another, seed by seed."""
    return mean_interval([first[key] - second[key] for first, second in zip(better, worse)])


def gain_cell(better: list[dict], worse: list[dict], key: str) -> str:
    """The result of `gain_interval`, and in a word what it says."""
    mean, lower, upper = gain_interval(better, worse, key)
    verdict = "better" if lower > 0 else "worse" if upper < 0 else "undecided"
    return f"{mean:+.3f} ({lower:+.3f} to {upper:+.3f}): {verdict}"

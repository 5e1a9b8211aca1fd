r"""What training on nothing but one's own documents gains. Writes benchmarks/results/own_documents.md.

    python -c "import pandas; parts = [f'../shared/data/text/{part}.parquet' for part in ('train', 'validation')]; \
        texts = pandas.concat(map(pandas.read_parquet, parts)); \
        texts[texts.source == 'postgresql-docs'].to_parquet('postgresql.parquet')"
    python benchmarks/own_documents.py --documents postgresql.parquet --start benchmarks/models/small

Every run does what examples/retrieval_from_documents.py does until it makes an index: pairs from the documents, then
two trainings, the second one with hard negatives that the first model finds. The ways differ in the pairs that are made
of the documents. All are tested on the same documents, which no way has trained on: with a title that must find its
section, and with a sentence that must find the rest of its paragraph, among the texts of all documents. An interrupted
command goes on when it is run again, even on another machine: see stored_runs.py.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from circumstances import circumstances
from datasets import Dataset, DatasetDict
from embedding_report import gain_cell, interval, train_once
from embedding_scores import KEYWORD_WEIGHT, Retrieval, hybrid, load_model, ndcg_at_10
from matplotlib.figure import Figure
from stored_runs import StoredRuns

from neobert_hf.common.atomic_writes import write_json, write_png, write_text
from neobert_hf.common.fingerprints import file_checksum, model_files_fingerprint
from neobert_hf.common.report import markdown_table, mean_interval
from neobert_hf.common.settings import Count, LocalPath, RangedSettings, parse_config
from neobert_hf.embeddings.text_pairs import TextPairSettings, make_pairs


SHIPPED = "as shipped"
# The pairs of each way: how many of each kind a document gives at most, and the kinds.
ALL_KINDS = ["title", "unmarked_title", "sentence"]
WAYS = {
    SHIPPED: (64, ALL_KINDS),
    "8 pairs of a kind per document": (8, ALL_KINDS),
    "8 pairs of a kind, marked titles only": (8, ["title", "sentence"]),
}
HELD_OUT = 0.1
# The models that every run makes, by their folders, and what the report calls them.
STAGES = {"pairs_alone": "on the pairs", "hard_negatives": "then with hard negatives"}
TITLES, SENTENCES = "titles", "sentences"
WITH_WORDS = "{}, with BM25"
COLUMNS = [TITLES, WITH_WORDS.format(TITLES), SENTENCES, WITH_WORDS.format(SENTENCES)]


@dataclass(kw_only=True)
class OwnDocumentsArguments(RangedSettings):
    documents: LocalPath = field(metadata={"help": "Parquet file with the column `text`"})
    start: LocalPath = field(metadata={"help": "folder of a pretrained model"})
    output_dir: LocalPath = field(default="runs/own_documents_benchmark", metadata={"help": "runs and logs"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})
    seeds: Count = field(default=5, metadata={"help": "runs of each way"})
    processes: Count = field(default=2, metadata={"help": "runs at a time, of one thread each"})
    ways: list[str] = field(default_factory=lambda: list(WAYS), metadata={"help": f"some of {', '.join(WAYS)}"})
    training: str = field(
        default="--max_steps 100 --max_length 64 --learning_rate 1e-3 --use_cpu true",
        metadata={"help": "flags of both trainings, beside configs/embeddings/small.yaml"},
    )

    def __post_init__(self):
        super().__post_init__()
        if SHIPPED not in self.ways or not set(self.ways) <= set(WAYS):
            raise ValueError(f"`ways` is {self.ways}; it must name {SHIPPED!r}, and may name others of {list(WAYS)}.")


def pairs_of(settings: OwnDocumentsArguments, way: str) -> DatasetDict:
    """The pairs that the recipe makes in one of the ways, `train` and `held_out`."""
    count, kinds = WAYS[way]
    own = TextPairSettings(
        settings.documents, "unused.parquet", kinds=kinds, pairs_per_document=count, held_out=HELD_OUT
    )
    return make_pairs(own)


def make_tests(pairs: dict[str, DatasetDict]) -> dict[str, Retrieval]:
    """Titles and sentences of the held-out documents, each with its text and all others to find it among.

    Args:
        pairs: those of each way. The shipped ones are asked, without those that another way has trained on.
    """
    read = {text for one in pairs.values() for name in ("query", "positive") for text in one["train"][name]}
    held_out = [pair for pair in pairs[SHIPPED]["held_out"] if read.isdisjoint((pair["query"], pair["positive"]))]
    texts = [pair["positive"] for pair in held_out] + pairs[SHIPPED]["train"]["positive"][:]
    tests = {}
    for name in (TITLES, SENTENCES):
        own = [pair for pair in held_out if (pair["kind"] == "sentence") == (name == SENTENCES)]
        # The same text under several titles would be the wrong answer to all but one of them: one is asked.
        asked = {pair["positive"]: pair["query"] for pair in own}
        documents = list(dict.fromkeys([*asked, *texts]))
        tests[name] = Retrieval(list(asked.values()), documents, "documents")
    return tests


def train(settings: OwnDocumentsArguments, way: str, pairs: Dataset, seed: int) -> dict[str, Path]:
    """Do both trainings, unless they are done already, and return the folders of their models."""
    folder = Path(settings.output_dir) / "".join(letter if letter.isalnum() else "_" for letter in f"{way} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    pairs.to_parquet(folder / "pairs.parquet")
    columns = {"source": "pairs.parquet", "query": "query", "positive": "positive", "instruction": ""}
    write_text(folder / "datasets.yaml", yaml.safe_dump({"train": {"documents": columns}}))
    flags = f"{settings.training} --seed {seed} --datasets {folder}/datasets.yaml"
    models, start = {}, settings.start
    for stage, own in {"pairs_alone": "", "hard_negatives": " --miner {start} --negatives 4"}.items():
        own_flags = f"{flags} --model {start}{own.format(start=start)}"
        start = models[stage] = train_once("finetune_embeddings.py", "small.yaml", folder / stage, own_flags) / "model"
    return models


def score(model: Path, tests: dict[str, Retrieval]) -> dict[str, float]:
    """nDCG@10 of a model, alone and together with BM25."""
    encoder, scores = load_model(model), {}
    # Both tests search the same texts, in another order. They are embedded once.
    texts = {text: number for number, text in enumerate(tests[TITLES].documents)}
    embedded = encoder.encode(list(texts), normalize_embeddings=True)
    for name, test in tests.items():
        queries = encoder.encode(test.queries, normalize_embeddings=True)
        cosines = queries @ embedded[[texts[text] for text in test.documents]].T
        scores[name] = ndcg_at_10(cosines)
        scores[WITH_WORDS.format(name)] = ndcg_at_10(hybrid(cosines, test.bm25_scores))
    return scores


def run_all(
    settings: OwnDocumentsArguments, pairs: dict[str, DatasetDict], tests: dict[str, Retrieval], stored: StoredRuns
) -> dict[str, list[dict]]:
    """For each way the scores of every seed, after each of the two trainings."""
    told = f"documents {file_checksum(Path(settings.documents))[:8]}; {model_files_fingerprint(settings.start)[:8]}"

    def train_and_score(way: str, seed: int) -> dict[str, dict[str, float]]:
        models = train(settings, way, pairs[way]["train"], seed)
        return {stage: score(model, tests) for stage, model in models.items()}

    def result(job: tuple[str, int]) -> dict[str, dict[str, float]]:
        way, seed = job
        return stored.result(f"{told}; {settings.training}; {way}; seed {seed}", lambda: train_and_score(way, seed))

    with ThreadPoolExecutor(settings.processes) as executor:
        found = list(executor.map(result, [(way, seed) for seed in range(settings.seeds) for way in pairs]))
    return {way: found[number :: len(pairs)] for number, way in enumerate(pairs)}


def of_stage(results: list[dict], stage: str) -> list[dict[str, float]]:
    return [result[stage] for result in results]


def gains(results: dict[str, list[dict]]) -> dict[str, tuple[list, list]]:
    """Scores to compare seed by seed, better one first: the ways after both trainings, and the two trainings."""
    shipped = results[SHIPPED]
    found = {
        f"{SHIPPED}, against {way}": (of_stage(shipped, "hard_negatives"), of_stage(results[way], "hard_negatives"))
        for way in results
        if way != SHIPPED
    }
    return found | {"hard negatives": (of_stage(shipped, "hard_negatives"), of_stage(shipped, "pairs_alone"))}


def scores_table(results: dict[str, list[dict]], alone: dict[str, dict[str, float]]) -> list[str]:
    """Scores of what needs no training, and then of each way after each training."""
    rows = [[name, *(f"{found[key]:.3f}" if key in found else "-" for key in COLUMNS)] for name, found in alone.items()]
    for way in results:
        for stage, words in STAGES.items():
            runs = of_stage(results[way], stage)
            rows.append([f"{way}, {words}", *(interval([one[key] for one in runs]) for key in COLUMNS)])
    return markdown_table(["nDCG@10", *COLUMNS], rows)


def plot(results: dict[str, list[dict]], alone: dict[str, dict[str, float]], file: Path) -> None:
    """For titles and for sentences: each way after both trainings, alone and with BM25, and what needs no training."""
    figure = Figure(figsize=(11, 1.5 + 0.8 * len(results)), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), (TITLES, SENTENCES)):
        for place, key in ((0.2, name), (-0.2, WITH_WORDS.format(name))):
            scores = [mean_interval([one[key] for one in of_stage(results[way], "hard_negatives")]) for way in results]
            axes.barh(
                [number + place for number in range(len(results))],
                [mean for mean, *_ in scores],
                xerr=[mean - lower for mean, lower, _ in scores],
                height=0.4,
                capsize=3,
                label="model with BM25" if place < 0 else "model",
            )
        for (words, found), style in zip(alone.items(), (":", "--")):
            axes.axvline(found[name], color="black", linestyle=style, linewidth=1, label=words)
        axes.set_yticks(range(len(results)), list(results))
        axes.set(xlabel="nDCG@10", title=f"{name} find their text", xlim=(0, 1))
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    write_png(file, figure)


def report(
    settings: OwnDocumentsArguments,
    pairs: dict[str, DatasetDict],
    tests: dict[str, Retrieval],
    results: dict[str, list[dict]],
    alone: dict[str, dict[str, float]],
    stored: StoredRuns,
) -> str:
    count = {name: len(test.queries) for name, test in tests.items()}
    made = ", ".join(f"{len(one['train']):,} ({way})" for way, one in pairs.items())
    rows = [[name, *(gain_cell(*scores, key) for key in COLUMNS)] for name, scores in gains(results).items()]
    sections = (
        "# Trained on nothing but one's own documents",
        "![how well the text of a title or a sentence is found](own_documents.png)",
        circumstances("own_documents", "sentence-transformers", runs=stored.circumstances()),
        f"Every run does what `examples/retrieval_from_documents.py` does with {settings.documents} and the model "
        f"{settings.start} until it makes an index, with another seed. Both trainings have "
        f"`configs/embeddings/small.yaml` and `{settings.training}`. Pairs to train on: {made}. "
        f"{HELD_OUT:.0%} of the documents are held out: "
        f"{count[TITLES]:,} of their titles and {count[SENTENCES]:,} sentences are asked, and the right text of each "
        f"is one of {len(tests[TITLES].documents):,}. BM25 has a weight of {KEYWORD_WEIGHT} where it is added to the "
        f"cosine. {settings.seeds} seeds; intervals are 95% by Student's t, and gains are computed seed by seed.",
        "\n".join(markdown_table(["what it adds", *COLUMNS], rows)),
        "\n".join(scores_table(results, alone)),
    )
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(OwnDocumentsArguments, args=args)

    # 1. The pairs of each way, and those that all are tested on
    pairs = {way: pairs_of(settings, way) for way in WAYS if way in settings.ways}
    tests = make_tests(pairs)

    # 2. What needs no training: the start, and BM25
    folder = Path(settings.results)
    stored = StoredRuns(folder / "single_runs" / "own_documents.json")
    bm25 = {name: ndcg_at_10(test.bm25_scores) for name, test in tests.items()}
    alone = {"not trained": score(Path(settings.start), tests), "BM25": bm25}

    # 3. Trainings and scores
    results = run_all(settings, pairs, tests, stored)

    # 4. Report
    folder.mkdir(parents=True, exist_ok=True)
    plot(results, alone, folder / "own_documents.png")
    write_json(
        folder / "own_documents.json", {"settings": asdict(settings), "without_training": alone, "results": results}
    )
    write_text(folder / "own_documents.md", report(settings, pairs, tests, results, alone, stored))


if __name__ == "__main__":
    main()

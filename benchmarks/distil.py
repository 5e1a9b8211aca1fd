"""How near a distilled model comes to its teacher. Writes benchmarks/results/distil.md.

    python benchmarks/distil.py --data ../shared/data --teacher TEACHER --models student=runs/distil/model

Beside the models stand the teacher, BM25, and static vectors: the teacher's state of each token alone, averaged over a
text with weights, as in model2vec. Models are scored on what embedding_scores.py describes, and by a logistic
regression on the vectors of descriptions of Debian packages, which tells their section. In the column `teacher's
index`, the model embeds the queries of FOLDOC and the teacher the entries. A model that was scored already is not
scored again. With `--speed true` all models are also timed, in turns, on an idle machine.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from circumstances import circumstances
from datasets import Dataset
from embedding_report import SIMILARITY, TESTS
from embedding_scores import Retrieval, TestData, bm25_alone, hybrid, ndcg_at_10, split_pairs
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.fingerprints import model_files_fingerprint
from neobert_hf.common.report import markdown_table
from neobert_hf.common.settings import LocalPath, PathOrId, parse_config
from neobert_hf.embeddings.inference import prompt_of
from neobert_hf.embeddings.teacher import load_teacher, states_alone
from neobert_hf.modeling_neobert import NeoBERTModel


TEACHER, STATIC, BM25 = "teacher", "static vectors", "BM25"
RETRIEVAL = ("FOLDOC", "FOLDOC, with BM25", "teacher's index", "WordNet", "WordNet, with BM25")
COLUMNS = (*RETRIEVAL, "similarity of news", "sections")
PROBE_ROWS = 10_000
# Texts at a time, and how often each model is timed.
SPEED = {"12 tokens": (12, 64), "256 tokens": (256, 16)}
ROUNDS = 7


@dataclass(kw_only=True)
class DistilBenchmarkSettings:
    data: LocalPath = field(metadata={"help": "folder with pairs/ and the test sets"})
    teacher: PathOrId = field(metadata={"help": "the embedding model that the others were distilled from"})
    models: list[str] = field(metadata={"help": "NAME=FOLDER of each student"})
    speed: bool = field(default=False, metadata={"help": "also measure texts a second"})
    results: LocalPath = field(default="benchmarks/results", metadata={"help": "folder of the report"})


def static_model(teacher: SentenceTransformer) -> SentenceTransformer:
    """Token vectors as model2vec makes them (https://github.com/MinishLab/model2vec): 256 principal components of what
    the teacher says of single tokens, of which frequent ones, by Zipf's law the first of the vocabulary, weigh less."""
    size = 1 + max(teacher.tokenizer.get_vocab().values())
    vectors = PCA(256).fit_transform(states_alone(teacher, range(size)).numpy())
    shares = 1 / np.arange(1, size + 1)
    weights = 1e-4 / (1e-4 + shares / shares.sum())
    module = StaticEmbedding(teacher.tokenizer.backend_tokenizer, (vectors * weights[:, None]).astype(np.float32))
    return SentenceTransformer(modules=[module], prompts=teacher.prompts, device="cpu")


def embed(model: SentenceTransformer, kind: str, texts: list[str]) -> np.ndarray:
    return model.encode(texts, prompt=prompt_of(model, kind), normalize_embeddings=True)


def similarity(model: SentenceTransformer, pairs: Dataset) -> float:
    """Spearman's correlation of the cosines with people's judgements. Each of the 50 texts is read once."""
    texts = list(dict.fromkeys(pairs["sentence1"][:] + pairs["sentence2"][:]))
    vectors = dict(zip(texts, embed(model, "document", texts)))
    cosines = [vectors[first] @ vectors[second] for first, second in zip(pairs["sentence1"], pairs["sentence2"])]
    return float(spearmanr(cosines, pairs["score"][:]).statistic)


def score(model: SentenceTransformer, index: np.ndarray, tests: TestData, sections: dict[str, Dataset]) -> dict:
    """All quality columns of a model.

    Args:
        index: the teacher's vectors of the entries of FOLDOC.
    """
    found = {}
    for name, data in tests.test.items():
        queries, documents = embed(model, "query", data.queries), embed(model, "document", data.documents)
        found[name] = ndcg_at_10(queries @ documents.T)
        found[f"{name}, with BM25"] = ndcg_at_10(hybrid(queries @ documents.T, data.bm25_scores))
        if name == "FOLDOC" and queries.shape[1] == index.shape[1]:
            found["teacher's index"] = ndcg_at_10(queries @ index.T)
    found["similarity of news"] = similarity(model, tests.similarity)
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    learned, tested = (embed(model, "document", sections[part]["sentence"][:]) for part in ("train", "validation"))
    probe.fit(learned, sections["train"]["label"][:])
    found["sections"] = float(probe.score(tested, sections["validation"]["label"][:]))
    return found


def read_tests(data: Path) -> tuple[TestData, dict[str, Dataset]]:
    with TemporaryDirectory() as folder:
        tests = split_pairs(data, Path(folder))
    files = {part: data / f"classification_debian_sections/{part}.parquet" for part in ("train", "validation")}
    sections = {part: Dataset.from_parquet(str(file)) for part, file in files.items()}
    return tests, sections | {"train": sections["train"].shuffle(seed=0).select(range(PROBE_ROWS))}


def texts_of_length(teacher: SentenceTransformer, data: Retrieval, tokens: int, count: int) -> list[str]:
    """Texts of exactly this many tokens for the teacher, cut from the documents laid end to end."""
    tokenizer = teacher.tokenizer
    ids = tokenizer(" ".join(data.documents[:400]), add_special_tokens=False, verbose=False)["input_ids"]
    size = tokens - len(tokenizer("")["input_ids"])
    return [tokenizer.decode(ids[start * size : (start + 1) * size]) for start in range(count)]


def texts_per_second(models: dict[str, SentenceTransformer], texts: list[str]) -> dict[str, float]:
    """The median of several rounds, in each of which all models take their turn."""
    times = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            model.encode(texts, batch_size=len(texts))
            times[name].append(time.perf_counter() - start)
    return {name: len(texts) / statistics.median(found) for name, found in times.items()}


def report(settings: DistilBenchmarkSettings, scores: dict[str, dict], speeds: dict[str, dict]) -> str:
    rows = []
    for name, found in scores.items():
        rows.append([name, *(f"{found[key]:.3f}" if key in found else "-" for key in COLUMNS)])
        if speeds:
            rows[-1] += [f"{speed[name]:,.0f}" if name in speed else "-" for speed in speeds.values()]
    titles = ["", *COLUMNS, *(f"texts a second, {name}" for name in speeds)]
    sections = (
        "# What a distilled model keeps of its teacher",
        circumstances("distil", "sentence-transformers"),
        f"{TESTS} {SIMILARITY} Sections: accuracy of a logistic regression on the vectors of {PROBE_ROWS:,} one-line "
        "descriptions. Teacher's index: FOLDOC, where the model embeds the queries and the teacher the entries. Static "
        "vectors: weighted means of the teacher's states of single tokens, as in model2vec.",
        "\n".join(markdown_table(titles, rows)),
    )
    if speeds:
        sections += (f"Speed on {torch.get_num_threads()} threads, texts of one length in a batch, NeoBERTs prepared.",)
    return "\n\n".join(sections) + "\n"


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(DistilBenchmarkSettings, args=args)
    results = Path(settings.results)
    results.mkdir(parents=True, exist_ok=True)

    # 1. Models
    teacher = load_teacher(settings.teacher, torch.device("cpu"))
    models = {TEACHER: teacher, STATIC: static_model(teacher)}
    folders = {TEACHER: settings.teacher, STATIC: settings.teacher} | dict(one.split("=", 1) for one in settings.models)
    models |= {
        name: SentenceTransformer(folder, device="cpu") for name, folder in folders.items() if name not in models
    }

    # 2. Scores, unless the file has those of the same weights
    file = results / "distil.json"
    stored = json.loads(file.read_text())["fingerprints"] if file.exists() else {}
    scores = json.loads(file.read_text())["scores"] if file.exists() else {}
    tests, sections = read_tests(Path(settings.data))
    scores[BM25] = {name.removeprefix("test "): value for name, value in bm25_alone(tests).items()}
    index = embed(teacher, "document", tests.test["FOLDOC"].documents)
    fingerprints = {name: model_files_fingerprint(folder) for name, folder in folders.items()}
    for name, model in models.items():
        if stored.get(name) != fingerprints[name]:
            scores[name] = score(model, index, tests, sections)
        print(name, {key: round(value, 3) for key, value in scores[name].items()}, flush=True)
    scores = {name: scores[name] for name in (BM25, *models)}

    # 3. Speed, with weights packed for inference
    speeds = {}
    if settings.speed:
        for name, model in models.items():
            if name not in (TEACHER, STATIC) and isinstance(model[0].model, NeoBERTModel):
                model[0].model.prepare_for_inference()
        for title, (tokens, count) in SPEED.items():
            texts = texts_of_length(teacher, tests.test["FOLDOC"], tokens, count)
            speeds[title] = texts_per_second(models, texts)

    # 4. Report
    found = {"fingerprints": fingerprints, "scores": scores, "speeds": speeds}
    write_json(file, {"settings": asdict(settings)} | found)
    write_text(results / "distil.md", report(settings, scores, speeds))


if __name__ == "__main__":
    main()

"""How near a distilled model comes to its teacher.

    python benchmarks/data.py --output_dir data/benchmark
    python benchmarks/distil.py --speed models/distilled

Models search two dictionaries. FOLDOC explains computing terms: a query is a term, and its answer is the term's entry,
which often contains the term. WordNet explains words: a query is a sentence that uses a word, and its answer is the
definition of the word, which seldom shares a word with the sentence. In the column `teacher's index`, the model embeds
the queries of FOLDOC and the teacher the entries.

Beside the models stand the teacher, BM25, and static vectors: the teacher's state of each token alone, averaged over a
text with weights, as in model2vec. `sections` is the accuracy of a logistic regression on the vectors of descriptions
of Debian packages, which tells their section. The models that `--speed` names and the teacher are also timed, in turns,
which needs an idle machine.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from runner import Settings, medians, run_benchmark, table
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from neobert_hf.cpu_neobert import Int8Linear, PackedLinear, pack_linear_layers
from neobert_hf.distillation.teacher import states_alone
from neobert_hf.embeddings.prompts import prompt_of
from neobert_hf.modeling_neobert import NeoBERTModel
from neobert_hf.search.keywords import bm25_shares, ndcg, ranks_of


TEACHER, STATIC, BM25 = "teacher", "static vectors", "BM25"
INDEX, FAR, NEWS, SECTIONS = "teacher's index", "far sentences", "similarity of news", "sections"
COLUMNS = ("FOLDOC", "FOLDOC, with BM25", INDEX, "WordNet", "WordNet, with BM25", FAR, NEWS, SECTIONS)
# Definitions of WordNet that are searched, and those before them, which earlier experiments chose learning rates on.
TEST, DEVELOPMENT = 1000, 500
# Weight of BM25 in a search by vectors and words. Chosen on the development pairs, with one fine-tuned NeoBERT.
KEYWORD_WEIGHT = 0.5
# Tokens of a document, and after how many of them the sentence comes that is to find it.
FAR_LENGTH, FAR_START = 1020, 400
PROBE_ROWS = 10_000
# How many texts of this many tokens are embedded at a time, and how often each model is timed.
SPEED = {12: 64, 256: 16}
ROUNDS = 7


@dataclass(kw_only=True)
class DistilSettings(Settings):
    data: str = field(default="data/benchmark", metadata={"help": "folder that data.py wrote", "path": True})
    teacher: str = field(
        default="sentence-transformers/all-MiniLM-L6-v2",
        metadata={"help": "the embedding model that the others were distilled from", "path": "or Hub id"},
    )
    models: list[str] = field(
        default_factory=lambda: ["models/distilled=models/distilled"], metadata={"help": "NAME=FOLDER of each student"}
    )
    speed: list[str] = field(
        default_factory=list, metadata={"help": "names of models to time beside the teacher, on an idle machine"}
    )


@dataclass
class Retrieval:
    """Queries, and as many documents or more. The right document of a query is the one with the same number."""

    queries: list[str]
    documents: list[str]

    @cached_property
    def bm25_shares(self) -> np.ndarray:
        return bm25_shares(self.queries, self.documents)

    def ndcg(self, scores: np.ndarray) -> np.ndarray:
        """nDCG@10 of each query, by the scores of all documents (queries, documents).

        If other documents have the same score, the right one counts as last: embeddings that are all alike find
        nothing.
        """
        return ndcg(ranks_of(scores, np.arange(len(self.queries))))


def read_retrievals(data: Path) -> dict[str, Retrieval]:
    """The two dictionaries.

    The text in `data`, which models are trained on, holds nearly all of WordNet's definitions. So only those that it
    does not hold are answers to queries. The others are only searched, as wrong documents.
    """
    foldoc = Dataset.from_parquet(str(data / "retrieval_foldoc_test.parquet"))
    usage = Dataset.from_parquet(str(data / "pairs/wordnet_usage.parquet")).shuffle(seed=0)
    first_rows = {definition: row for row, definition in reversed(list(enumerate(usage["positive"])))}
    places = Dataset.from_parquet(str(data / "text/train.parquet"))["text"]
    asked = sorted(first_rows[definition] for definition in unread_texts(sorted(first_rows), places))
    asked = asked[: DEVELOPMENT + TEST]
    others = sorted(set(first_rows.values()) - set(asked))[: DEVELOPMENT + TEST - len(asked)]
    to_develop = len(asked) // 3
    rows = usage.select([*asked[to_develop:], *others[max(0, DEVELOPMENT - to_develop) :]])
    return {
        "FOLDOC": Retrieval(foldoc["query"][:], foldoc["document"][:]),
        "WordNet": Retrieval(rows["query"][: len(asked) - to_develop], rows["positive"][:]),
    }


def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def unread_texts(texts: list[str], places: Iterable[str]) -> list[str]:
    """The texts whose words do not occur in sequence in any of the `places`, ignoring case and punctuation."""
    texts_by_start: dict[tuple[str, ...], list[str]] = {}
    for text in texts:
        texts_by_start.setdefault(words_of(text)[:3], []).append(text)
    read = set()
    for words in map(words_of, places):
        for start, size in product(range(len(words)), (1, 2, 3)):
            for text in texts_by_start.get(words[start : start + size], ()):
                found = words_of(text)
                if words[start : start + len(found)] == found:
                    read.add(text)
    return [text for text in texts if text not in read]


def far_sentences(teacher: SentenceTransformer, texts: list[str]) -> Retrieval:
    """Documents of 1,020 tokens, each with a sentence from behind its 400th token that is to find it."""
    documents, queries, generator = [], [], np.random.default_rng(0)
    for text in texts:
        offsets = teacher.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = offsets["offset_mapping"]
        for start in range(0, min(len(places) - FAR_LENGTH, 4 * FAR_LENGTH), FAR_LENGTH):
            end = places[start + FAR_LENGTH - 1][1]
            sentences = re.split(r"(?<=[.!?])\s+", text[places[start + FAR_START][0] : end])[1:-1]
            if sentences := [sentence for sentence in sentences if 60 < len(sentence) < 200]:
                documents.append(text[places[start][0] : end])
                queries.append(sentences[generator.integers(len(sentences))])
    return Retrieval(queries, documents)


def static_model(teacher: SentenceTransformer) -> SentenceTransformer:
    """Token vectors as model2vec makes them (https://github.com/MinishLab/model2vec): 256 principal components of what
    the teacher says of single tokens, of which frequent ones, by Zipf's law the first of the vocabulary, weigh less."""
    size = 1 + max(teacher.tokenizer.get_vocab().values())
    states = states_alone(teacher, range(size)).numpy()
    vectors = PCA(min(256, *states.shape)).fit_transform(states)
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


def probe(model: SentenceTransformer, train: Dataset, test: Dataset) -> float:
    """The accuracy of a logistic regression on the vectors of some of the sentences."""
    train = train.shuffle(seed=0).select(range(min(PROBE_ROWS, len(train))))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    classifier.fit(embed(model, "document", train["sentence"][:]), train["label"][:])
    return float(classifier.score(embed(model, "document", test["sentence"][:]), test["label"][:]))


def score(
    model: SentenceTransformer, index: np.ndarray, retrievals: dict[str, Retrieval], data: Path
) -> dict[str, float]:
    """All quality columns of a model.

    Args:
        index: the teacher's vectors of the entries of FOLDOC.
    """
    found = {}
    for name, retrieval in retrievals.items():
        queries, documents = embed(model, "query", retrieval.queries), embed(model, "document", retrieval.documents)
        found[name] = retrieval.ndcg(queries @ documents.T).mean()
        # As `VectorIndex.search_hybrid`, but over all documents.
        both = queries @ documents.T + KEYWORD_WEIGHT * retrieval.bm25_shares
        found[f"{name}, with BM25"] = retrieval.ndcg(both).mean()
        if name == "FOLDOC" and queries.shape[1] == index.shape[1]:
            found[INDEX] = retrieval.ndcg(queries @ index.T).mean()
    found[NEWS] = similarity(model, Dataset.from_parquet(str(data / "sts_lee.parquet")))
    sections = data / "classification_debian_sections"
    parts = (Dataset.from_parquet(str(sections / f"{part}.parquet")) for part in ("train", "validation"))
    found[SECTIONS] = probe(model, *parts)
    return found


def texts_of_length(teacher: SentenceTransformer, data: Retrieval, tokens: int, count: int) -> list[str]:
    """Texts of exactly this many tokens for the teacher, cut from the documents laid end to end."""
    tokenizer = teacher.tokenizer
    ids = tokenizer(" ".join(data.documents), add_special_tokens=False, verbose=False)["input_ids"]
    size = tokens - len(tokenizer("")["input_ids"])
    texts = (tokenizer.decode(ids[start : start + size]) for start in range(0, len(ids), size))
    # A piece that begins within a word, for example, is cut into other tokens when it is read again.
    exact = (text for text in texts if len(tokenizer(text, verbose=False)["input_ids"]) == tokens)
    return list(islice(exact, count))


def prepared(folder: str, int8: bool) -> SentenceTransformer:
    """A model prepared for a CPU as well as PyTorch can: packed weights in float32, or products in int8."""
    model = SentenceTransformer(folder, device="cpu").float().eval().requires_grad_(False)
    encoder = model[0].model
    if isinstance(encoder, NeoBERTModel):
        encoder.prepare_for_inference(int8=int8)
    else:
        pack_linear_layers(encoder, Int8Linear if int8 else PackedLinear)
    return model


def measure_speed(
    models: dict[str, SentenceTransformer], teacher: SentenceTransformer, data: Retrieval
) -> dict[str, dict[str, float]]:
    """Texts a second by model and column. All models take turns."""
    found, threads = {name: {} for name in models}, torch.get_num_threads()
    for tokens, count in SPEED.items():
        texts = texts_of_length(teacher, data, tokens, count)
        turns = {name: partial(model.encode, texts, batch_size=count) for name, model in models.items()}
        for number, words in ((1, "one thread"), (2, "two threads")):
            torch.set_num_threads(number)
            for name, seconds in medians(turns, ROUNDS).items():
                found[name][f"{tokens} tokens, {words}"] = count / seconds
    torch.set_num_threads(threads)
    return found


def measure(settings: DistilSettings) -> dict:
    teacher, data = SentenceTransformer(settings.teacher, device="cpu").float(), Path(settings.data)
    folders = dict(one.split("=", 1) for one in settings.models)
    models = {TEACHER: teacher, STATIC: static_model(teacher)}
    models |= {name: SentenceTransformer(folder, device="cpu") for name, folder in folders.items()}
    folders[TEACHER] = settings.teacher
    texts = Dataset.from_parquet(str(data / "text/validation.parquet"))["text"][:]
    retrievals = read_retrievals(data) | {FAR: far_sentences(teacher, texts)}
    scores = {BM25: {name: retrieval.ndcg(retrieval.bm25_shares).mean() for name, retrieval in retrievals.items()}}
    index = embed(teacher, "document", retrievals["FOLDOC"].documents)
    for name, model in models.items():
        scores[name] = score(model, index, retrievals, data)
        print(name, {column: round(value, 3) for column, value in scores[name].items()}, flush=True)
    speeds = {}
    if settings.speed:
        timed = {STATIC: models[STATIC]}
        for name in (TEACHER, *settings.speed):
            timed |= {name: prepared(folders[name], int8=False), f"{name}, int8": prepared(folders[name], int8=True)}
        speeds = measure_speed(timed, teacher, retrievals["FOLDOC"])
    return {"scores": scores, "speeds": speeds}


def speed_table(speeds: dict[str, dict[str, float]]) -> list[str]:
    if not speeds:
        return []
    columns = list(next(iter(speeds.values())))
    rows = [[name, *(f"{found[column]:,.0f}" for column in columns)] for name, found in speeds.items()]
    return [
        "Texts a second, texts of one length in a batch, with their tokenization. Weights are packed; int8 is "
        "`prepare_for_inference(int8=True)`, and for the teacher the same layers, with a scale for each token.",
        table(["", *columns], rows),
    ]


def page(found: dict) -> list[str]:
    rows = [
        [name, *(f"{scores[column]:.3f}" if column in scores else "-" for column in COLUMNS)]
        for name, scores in found["scores"].items()
    ]
    return [
        "# What a distilled model keeps of its teacher",
        "Both searches are of dictionaries; [the card](../../models/distilled/README.md) also has questions with long "
        "answers, of which the small model keeps less.",
        table(
            ["Column", "What it is"],
            [
                ["FOLDOC", "nDCG@10: each of 1,000 terms searches 1,000 entries"],
                [
                    "WordNet",
                    "nDCG@10: sentences search 1,000 definitions. The text for training holds nearly all of them, "
                    "but none of those that answer a query",
                ],
                ["with BM25", f"the cosine + {KEYWORD_WEIGHT} x BM25 / the query's highest BM25"],
                [INDEX, "FOLDOC, where the model embeds the queries and the teacher the entries"],
                [
                    FAR,
                    f"nDCG@10: documents of {FAR_LENGTH:,} tokens, each searched by a sentence that begins behind its "
                    f"{FAR_START}th",
                ],
                [NEWS, "Spearman's correlation of the cosine with human judgements of pairs of news"],
                [SECTIONS, f"accuracy of a logistic regression on the vectors of {PROBE_ROWS:,} one-line descriptions"],
            ],
        ),
        "Static vectors are weighted means of the teacher's states of single tokens, as in model2vec.",
        table(["", *COLUMNS], rows),
        *speed_table(found["speeds"]),
    ]


def main(args: list[str] | None = None) -> None:
    run_benchmark("distil", measure, page, None, ("sentence-transformers",), DistilSettings, args)


if __name__ == "__main__":
    main()

"""Search one's own documents with an embedding model that learns from them, if this makes it better.

With a teacher the model goes on learning what the teacher computes for the documents, and is taken if its vectors of
held-out texts have come nearer to the teacher's. Without one it learns from pairs that the documents hold: a title and
its section, a sentence and its paragraph. They also make a model forget, so that the mean of the weights before and
after is taken, which answered real questions better than either; and only if the pairs of held-out sections, searched
among all texts, alone and with BM25, show by more than chance that it helps (benchmarks/NOTES.md). Otherwise the model
is left as it was.

It calls other recipes, each of which can also be run by itself: `make_pairs`, `distil` or `finetune_embeddings`, and
`index`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset

from neobert_hf.common.files import atomic_folder, write_json, write_text
from neobert_hf.common.paths import check_model_exists
from neobert_hf.common.recipe import Result, recipe
from neobert_hf.common.run import output_folder
from neobert_hf.common.settings import settings_of_keywords
from neobert_hf.common.tokenizers import clear_truncation
from neobert_hf.data.sources import is_table, local_files, stream_text
from neobert_hf.distillation import distil
from neobert_hf.embeddings import finetune_embeddings, make_pairs
from neobert_hf.embeddings.text_pairs import HEADING, HEADING_LINE
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.keywords import bm25_shares, ndcg, ranks_of
from neobert_hf.search.recipe import index


# The models that are compared, and what the report calls them.
STAGES = {"before": "the model as it was", "after": "after learning"}
# A short line above a paragraph is a title, too, in documents that do not mark theirs.
KINDS = ["title", "unmarked_title", "sentence"]
# Of BM25, added to the cosine, where pairs are searched and in the command at the end.
KEYWORD_WEIGHT = 0.5
# The least gain that is taken for one, in standard errors of the mean over the held-out pairs.
STANDARD_ERRORS = 2.0
WRITES = ("pairs*", "datasets.yaml", "trained", "half", "index", "report.json")


@dataclass
class OwnDocumentsSettings:
    """The documents, the model, and what it learns from."""

    documents: str = field(
        metadata={"help": "text or Markdown files, Parquet or JSON lines: a file, pattern or folder", "path": True}
    )
    model: str = field(
        metadata={"help": "an embedding model or an encoder on a NeoBERT: path or Hub id", "path": "or Hub id"}
    )
    output_dir: str = field(metadata={"help": "folder for the pairs, models, numbers and the index", "path": True})
    teacher: str | None = field(
        default=None,
        metadata={"help": "the embedding model that `model` was distilled from; pairs if unset", "path": "or Hub id"},
    )
    column: str = field(default="text", metadata={"help": "column of the text, unless the documents are text files"})
    id_column: str | None = field(default=None, metadata={"help": "column that identifies a row in the index"})
    held_out: float = field(
        default=0.2, metadata={"help": "share of the sections that give no pair to learn from, but questions to ask"}
    )
    training: str | None = field(
        default=None,
        metadata={
            "help": "YAML file with settings of finetune_embeddings, or with a teacher of distil; "
            "embeddings/own_documents.yaml or embeddings/own_documents_teacher.yaml if unset",
            "path": True,
        },
    )
    max_steps: int | None = field(default=None, metadata={"help": "optimizer steps; as in `training` if unset"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run code from the model's repository"})

    @property
    def output(self) -> Path:
        return Path(self.output_dir)

    def training_settings(self) -> dict[str, Any]:
        """The settings of the training."""
        name = "own_documents" if self.teacher is None else "own_documents_teacher"
        settings = {"config": self.training or f"embeddings/{name}.yaml", "output_dir": str(self.output / "trained")}
        if self.teacher is None:
            settings |= {"datasets": str(self.output / "datasets.yaml"), "model": self.model}
            settings |= {"trust_remote_code": self.trust_remote_code, "eval_strategy": "no"}
        else:
            settings |= {"teacher": self.teacher, "student": self.model, "texts": self.documents, "column": self.column}
        settings |= {} if self.max_steps is None else {"max_steps": self.max_steps}
        return settings if torch.accelerator.is_available() else settings | {"use_cpu": True}


@recipe
def retrieval_from_documents(settings: OwnDocumentsSettings) -> Result:
    """Index your documents with an embedding model that has learned from them, if this makes it better.

    It learns from a `teacher`, or from the documents' titles and sections alone. Sections that are held out from this
    ask what it finds before and after; a model that is not better by more than chance is left as it was. Called again
    after an interruption, the training goes on where it stopped and gives the same numbers.

    Returns:
        The model that was indexed, which may be the one that was given; nDCG@10 of the held-out pairs, also
        `with_words` (BM25), for it (`scores`), for the model `before`, and of BM25 alone (`baseline`); the folder of
        the index is `output`.
    """
    # 1. Settings, including those of the training
    check_model_exists(settings.model, "model")
    if settings.teacher is not None:
        check_model_exists(settings.teacher, "teacher")
    local_files(settings.documents)
    learn = finetune_embeddings if settings.teacher is None else distil
    settings_of_keywords(learn.kinds, settings.training_settings(), learn.__name__)
    inputs, sources = {"model": settings.model, "training": settings.training}, {"documents": settings.documents}
    inputs |= {"teacher": settings.teacher}
    with output_folder(settings.output, "retrieval_from_documents", WRITES, inputs, sources):
        # 2. Pairs of a title and its section, or of a sentence and its paragraph; those of some sections are held out
        print("1. Pairs of texts from the documents", flush=True)
        held_out = make_pairs_of_sections(settings)

        # 3. What the model finds before training
        print("2. The held-out pairs before training", flush=True)
        encoder = load(settings, settings.model)
        found = {"before": held_out.ranks(encoder)}
        describe_pairs(settings.output, encoder)

        # 4. Training; after pairs, half of the way back
        print(f"3. Training {'on the pairs' if settings.teacher is None else 'with the teacher'}", flush=True)
        trained = learn(**settings.training_settings())
        model, other = trained.model, load(settings, trained.model)
        if settings.teacher is None:
            go_half_way(other, encoder)
        found["after"] = held_out.ranks(other)
        helped, verdict = nearer_to_teacher(trained) if settings.teacher else finds_more(found)

        # 5. The index, with the model that has learned if this helped
        print("4. The index", flush=True)
        if not helped:
            model = settings.model
        elif settings.teacher is None:
            model = settings.output / "half"
            save(other, model)
        index_documents(settings, model)

        # 6. Numbers, and the command for a search
        print("5. Numbers", flush=True)
        report(settings, held_out, found, helped, verdict)
    scores, before = (scores_of(found[name]) for name in ("after" if helped else "before", "before"))
    print(f"Ask it:\n  {query_command(settings, scores)}")
    baseline = {"ndcg_at_10": ndcg(found["before"]["words"]).mean()}
    return Result(Path(model), scores, before, baseline, output=settings.output / "index")


class HeldOutPairs:
    """What is asked: pairs of sections that are not trained on.

    Args:
        texts: all that is searched: the positives of all pairs, each once.

    Attributes:
        by_words: BM25 of each text for each query, as a share of the query's highest.
    """

    def __init__(self, queries: list[str], positives: list[str], texts: list[str]):
        number = {text: number for number, text in enumerate(texts)}
        self.queries, self.texts = queries, texts
        self.right = np.array([number[text] for text in positives])
        self.by_words = bm25_shares(queries, texts)

    def ranks(self, encoder: PassageEncoder) -> dict[str, np.ndarray]:
        """The rank of each query's text for the model `alone`, `with_words` (BM25), and for the `words` alone."""
        cosines = encoder.embed("query", self.queries) @ encoder.embed("document", self.texts).T
        scores = {"alone": cosines, "with_words": cosines + KEYWORD_WEIGHT * self.by_words, "words": self.by_words}
        return {name: ranks_of(each, self.right) for name, each in scores.items()}


def make_pairs_of_sections(settings: OwnDocumentsSettings) -> HeldOutPairs:
    """Write `pairs.parquet` and `pairs_held_out.parquet`, again if an earlier run has done so."""
    files = [settings.output / name for name in ("pairs.parquet", "pairs_held_out.parquet")]
    for file in files:
        file.unlink(missing_ok=True)
    # Of a document `make_pairs` takes few pairs, and all of them are held out or none; a long page has many sections.
    rows = [
        {"text": section} for text in stream_text(settings.documents, settings.column) for section in sections_of(text)
    ]
    make_pairs(source=rows, output=files[0], kinds=KINDS, held_out=settings.held_out)
    train, held_out = (Dataset.from_parquet(str(file)) for file in files)
    texts = list(dict.fromkeys([*held_out["positive"], *train["positive"]]))
    return HeldOutPairs(held_out["query"][:], held_out["positive"][:], texts)


def sections_of(text: str) -> Iterator[str]:
    """A document, cut before each of its marked headings."""
    section: list[str] = []
    for paragraph in re.split(r"\n\s*\n", HEADING_LINE.sub(r"\n\g<0>\n", text)):
        if section and HEADING.fullmatch(" ".join(paragraph.split())):
            yield "\n\n".join(section)
            section = []
        section.append(paragraph)
    yield "\n\n".join(section)


def describe_pairs(output: Path, encoder: PassageEncoder) -> None:
    """Describe the pairs for the training, in which texts get the prompts that the model has."""
    prompts = {
        "instruction": encoder.identity["query_prompt"],
        "document_instruction": encoder.identity["document_prompt"],
    }
    described = {"source": "pairs.parquet", "query": "query", "positive": "positive"} | prompts
    write_text(output / "datasets.yaml", yaml.safe_dump({"train": {"documents": described}}, sort_keys=False))


def load(settings: OwnDocumentsSettings, model: str | Path) -> PassageEncoder:
    return PassageEncoder(EmbeddingSettings(str(model)), trust_remote_code=settings.trust_remote_code)


@torch.no_grad()
def go_half_way(trained: PassageEncoder, before: PassageEncoder) -> None:
    """Give a model the mean of its weights and those before training."""
    weights = before.model.state_dict()
    for name, tensor in trained.model.state_dict().items():
        tensor.lerp_(weights[name], 0.5)


def save(encoder: PassageEncoder, folder: Path) -> None:
    clear_truncation(encoder.model.tokenizer)
    with atomic_folder(folder) as partial:
        encoder.model.save_pretrained(str(partial), create_model_card=False)


def nearer_to_teacher(trained: Result) -> tuple[bool, str]:
    """Whether training with a teacher helped, and a line on it.

    Held-out pairs do not decide here: in trials on three collections they found 0.00 to 0.02 more after training, and
    real questions 0.01 to 0.05. On one of the three the recipe's own training was taken, and questions found no more.
    """
    before, after = (found["cosine"] for found in (trained.before, trained.scores))
    measured = f"the cosine to the teacher's vectors of held-out texts was {before:.3f} and is {after:.3f}"
    return after > before, verdict_of(after > before, measured)


def finds_more(found: dict[str, dict[str, np.ndarray]]) -> tuple[bool, str]:
    """Whether the right texts surely stand farther up after training, and a line on how much.

    Ranks are compared by their logarithm, alone and with BM25 on average: nDCG@10, which does not see what happens
    below the tenth text, needs three times as many pairs to tell two models apart.
    """
    before, after = (np.log2(ranks["alone"] * ranks["with_words"]) / 2 for ranks in (found["before"], found["after"]))
    gains = before - after
    gain, chance = gains.mean(), STANDARD_ERRORS * gains.std() / len(gains) ** 0.5
    measured = f"the right text stands {2**gain:.3f} times as far up, and {2**chance:.3f} times may be chance"
    return bool(gain > chance), verdict_of(gain > chance, measured)


def verdict_of(helped: bool, measured: str) -> str:
    if helped:
        return f"Training helped: {measured}."
    return f"Training did not help, and the model is left as it was: {measured}."


def index_documents(settings: OwnDocumentsSettings, model: str | Path) -> None:
    index(
        index=settings.output / "index",
        model=model,
        source=settings.documents,
        name="documents" if is_table(settings.documents) else None,
        column=settings.column,
        id_column=settings.id_column,
        trust_remote_code=settings.trust_remote_code,
    )


def scores_of(ranks: dict[str, np.ndarray]) -> dict[str, float]:
    names = {"alone": "ndcg_at_10", "with_words": "ndcg_at_10_with_words"}
    return {name: ndcg(ranks[way]).mean() for way, name in names.items()}


def report(settings: OwnDocumentsSettings, held_out: HeldOutPairs, found: dict, helped: bool, verdict: str) -> None:
    """Print nDCG@10 of the held-out pairs before and after, alone and with BM25, and write it to `report.json`."""
    scores = {words: scores_of(found[name]) for name, words in STAGES.items()}
    words = ndcg(found["before"]["words"]).mean()
    file = settings.output / "report.json"
    counts = {"queries": len(held_out.queries), "texts": len(held_out.texts)}
    write_json(file, counts | {"bm25": words, "models": scores, "indexed": STAGES["after" if helped else "before"]})
    print(f"nDCG@10 of {counts['queries']:,} held-out pairs among {counts['texts']:,} texts, also in {file}:")
    print(f"  {'':<30}alone  with BM25")
    for name, (alone, both) in ((name, score.values()) for name, score in scores.items()):
        print(f"  {name:<30}{alone:.3f}  {both:.3f}")
    print(f"  {'BM25, which knows words only':<30}{words:.3f}\n{verdict}")
    if not helped and settings.teacher is None:
        print("What may help: its teacher (`teacher`), more documents, real questions (`finetune_embeddings`).")
    if settings.teacher is not None:
        print("An index of the teacher may find more still, with questions from this model: `query_model` of `query`.")


def query_command(settings: OwnDocumentsSettings, scores: dict[str, float]) -> str:
    query = ["neobert-hf", "query", "--index", str(settings.output / "index"), "--text", "..."]
    by_both = scores["ndcg_at_10_with_words"] > scores["ndcg_at_10"]
    query += ["--keyword_weight", f"{KEYWORD_WEIGHT:g}"] if by_both else []
    query += ["--trust_remote_code", "true"] if settings.trust_remote_code else []
    return shlex.join(query)

"""What a model is worth in a domain with few labels, which are made from the markup of its reStructuredText.

Retrieval: a heading or a sentence is the query for the text under it or around it. Tags: find the words of a sentence
that its author marked as code. The marks are removed, so the model has only a word and its neighbours to go by.
"""

import json
import re
from pathlib import Path

import yaml
from datasets import Dataset
from embedding_scores import Retrieval, dense_scores, load_model, ndcg_at_10
from pretraining import ROOT, run

from neobert_hf.common.atomic_writes import write_json, write_text
from neobert_hf.common.fingerprints import is_held_out
from neobert_hf.embeddings.text_pairs import SENTENCE_END


# This share of the domain's documents is for tests alone: no model reads them before.
TEST_SHARE, TEST_SEED = 0.1, 1
QUERIES = 1000
LABELLED, DEVELOPMENT = 300, 500
LEAST_WORDS, MOST_WORDS = 6, 60

# ``code``, and the text between the marks of directives for C functions, types and members.
CODE = re.compile(r"``([^`]+)``|:c:\w+:`([^`<]+)(?: <[^>]+>)?`")
# Marks of other markup, or of a list or table, that remain in a sentence when code is taken out.
MARKUP = re.compile(r"[`*|]|:\w+:|--|==|^\W")
WORD = re.compile(r"\w+|[^\w\s]")


def is_test_document(text: str) -> bool:
    return is_held_out(text, TEST_SHARE, TEST_SEED)


def prepare_tasks(whole: Path, folder: Path) -> None:
    """Make pairs and tags out of all documents of the domain, and keep those for tests apart."""
    if (folder / "tags_test.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    flags = f"--source {whole} --kinds title sentence --held_out {TEST_SHARE} --seed {TEST_SEED}"
    run("make_pairs.py", f"{flags} --output {folder}/pairs.parquet", folder / "log.txt")
    columns = {"source": "pairs.parquet", "query": "query", "positive": "positive", "instruction": ""}
    write_text(folder / "pairs.yaml", yaml.safe_dump({"train": {"domain": columns}}))
    rows = {"train": [], "test": []}
    for text in Dataset.from_parquet(str(whole))["text"]:
        rows["test" if is_test_document(text) else "train"] += tagged_sentences(text)
    trained = {tuple(row["tokens"]) for row in rows["train"]}
    rows["test"] = [row for row in rows["test"] if tuple(row["tokens"]) not in trained]
    for part, found in rows.items():
        Dataset.from_list(found).to_parquet(folder / f"tags_{part}.parquet")


def tagged_sentences(text: str) -> list[dict[str, list[str]]]:
    """The sentences of running text in which something is marked as code: their words, each tagged B-, I- or O."""
    rows = []
    for paragraph in re.split(r"\n\s*\n", text):
        # What is indented is an example or part of a directive, and two dots begin a comment or a directive.
        if paragraph.startswith((" ", "\t", "..")):
            continue
        for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
            words, tags, end = [], [], 0
            if MARKUP.search(CODE.sub("x", sentence)):
                continue
            for mark in CODE.finditer(sentence):
                before, inside = WORD.findall(sentence[end : mark.start()]), WORD.findall(mark[1] or mark[2])
                words += before + inside
                tags += ["O"] * len(before) + ["B-CODE", *["I-CODE"] * len(inside)][: len(inside)]
                end = mark.end()
            words += (rest := WORD.findall(sentence[end:]))
            tags += ["O"] * len(rest)
            if "B-CODE" in tags and LEAST_WORDS <= len(words) <= MOST_WORDS:
                rows.append({"tokens": words, "tags": tags})
    return rows


def retrieval_score(model: Path, tasks: Path, folder: Path, seed: int, flags: str) -> float:
    """nDCG@10 on the pairs of the test documents, after fine-tuning on those of the other documents."""
    if not (folder / "score.json").exists():
        common = f"--config {ROOT}/configs/embeddings/small.yaml --datasets {tasks}/pairs.yaml --model {model}"
        common += f" --output_dir {folder} --max_length 64 --eval_strategy no --save_steps 100 --seed {seed}"
        folder.mkdir(parents=True, exist_ok=True)
        run("finetune_embeddings.py", f"{common} --report_to none {flags}", folder / "output.txt", threads=1)
        write_json(folder / "score.json", ndcg_at_10(dense_scores(load_model(folder / "model"), test_pairs(tasks))))
    return json.loads((folder / "score.json").read_text())


def test_pairs(tasks: Path) -> Retrieval:
    pairs = Dataset.from_parquet(str(tasks / "pairs_held_out.parquet")).shuffle(seed=0)
    # If a text occurred twice, one copy would be a right answer that counts as a wrong one.
    first = {text: row for row, text in reversed(list(enumerate(pairs["positive"])))}
    pairs = pairs.select(sorted(first.values()))
    return Retrieval(pairs["query"][:QUERIES], pairs["positive"][:], "domain")


def tags_score(model: Path, tasks: Path, folder: Path, seed: int, flags: str) -> float:
    """F1 of whole spans of code on the test documents, after fine-tuning on a few sentences of the others."""
    if not (folder / "report.json").exists():
        data = folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        rows = Dataset.from_parquet(str(tasks / "tags_train.parquet")).shuffle(seed=0)
        count = min(DEVELOPMENT, len(rows) // 2)
        rows.select(range(count)).to_parquet(data / "validation.parquet")
        drawn = rows.select(range(count, len(rows))).shuffle(seed=seed)
        drawn.select(range(min(LABELLED, len(drawn)))).to_parquet(data / "train.parquet")
        Dataset.from_parquet(str(tasks / "tags_test.parquet")).to_parquet(data / "test.parquet")
        common = f"--config {ROOT}/configs/tasks/token_classification.yaml --model {model} --data {data} --seed {seed}"
        common += f" --max_length 128 --output_dir {folder} --bf16 false --use_cpu true {flags}"
        run("run_token_classification.py", common, folder / "output.txt", threads=1)
    return json.loads((folder / "report.json").read_text())["scores"]["test"]["f1"]

"""Make three collections of documents with real questions: the documentation of packages, and their FAQs.

    python benchmarks/own_documents_data.py packages data/own_documents

Each folder gets `documents.jsonl` (`id`, `text`), pages of documentation and the answers of the FAQ without their
questions, and `questions.parquet`: each `query` with the id of its answer, `document`. No document holds a question as
a heading. Of each collection all answers are taken, and pages up to 90,000 words. Paragraphs on Perl are left out.
It needs a Debian or Ubuntu machine, whose `apt-get download` fetches what is missing.
"""

import json
import random
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from kinds_data import NUMBER, OTHER_LANGUAGES, fetch, is_question, paragraphs, sections


# A folder of pages in a package, and the pages that are its FAQ.
COLLECTIONS = {
    "python_libraries": [
        ("python-sqlalchemy-doc/usr/share/doc/python-sqlalchemy-doc/html", r"faq/"),
        ("python-celery-doc/usr/share/doc/python-celery-doc/html", r"faq\.html"),
        ("python-django-doc/usr/share/doc/python-django-doc/html", r"faq/"),
        ("docutils-doc/usr/share/doc/docutils-doc", r"FAQ"),
    ],
    "r": [("r-doc-html/usr/share/R/doc/manual", r"R-FAQ")],
    "programs": [
        ("zsh-doc/usr/share/doc/zsh-common/html", r"FAQ"),
        ("mplayer-doc/usr/share/doc/mplayer/HTML/en", r"faq"),
        ("privoxy/usr/share/doc/privoxy", r"faq/"),
        ("xterm/usr/share/doc/xterm", r"faq"),
    ],
}
NO_PAGES = re.compile(r"_modules|index_|_sources|changelog|releases/|modindex|search\.html|genindex|-Index|Index\.html")
MOST_WORDS = 90_000
SHORTEST_ANSWER, SHORTEST_PAGE = 100, 300


def answers(pieces: list[tuple[str, bool]]):
    for question, answer in sections(pieces, is_question):
        readable = 3 * sum(map(str.isalpha, answer)) > len(answer) >= SHORTEST_ANSWER
        # Not the last line of a table of contents.
        if question and readable and not answer.split("\n")[0].endswith("?"):
            yield question, answer.strip()


def collect(packages: Path, places: list[tuple[str, str]]) -> tuple[list[dict], list[tuple[str, str]]]:
    """The documents and the questions of a collection."""
    by_question, pages = {}, []
    for folder, faq in places:
        for file in sorted((packages / folder).rglob("*.htm*")):
            name = str(file.relative_to(packages / folder))
            if NO_PAGES.search(name) or OTHER_LANGUAGES.search("/" + name):
                continue
            pieces = [piece for piece in paragraphs(file) if "perl" not in piece[0].lower()]
            if re.search(faq, name):
                for question, answer in answers(pieces):
                    by_question.setdefault(question, answer)
            else:
                pages.append((f"{folder.split('/')[0]}/{name}", pieces))
    beginnings = {answer[:100]: question for question, answer in by_question.items()}
    asked = sorted(beginnings.values())
    documents = [
        {"id": f"answer {number}", "text": by_question[question].replace("\n", "\n\n")}
        for number, question in enumerate(asked)
    ]
    size = sum(len(document["text"].split()) for document in documents)
    headings = {question.lower().strip(" ?") for question in asked}
    random.Random(0).shuffle(pages)
    for name, pieces in pages:
        numbered = [(NUMBER.sub("", text) if heading else text, heading) for text, heading in pieces]
        kept = [(text, heading) for text, heading in numbered if text.lower().strip(" ?") not in headings]
        text = "\n\n".join(f"## {text}" if heading else text for text, heading in kept)
        if len(text) >= SHORTEST_PAGE and size < MOST_WORDS:
            documents.append({"id": name, "text": text})
            size += len(text.split())
    print(f"{len(documents)} documents, {size:,} words, {len(asked)} questions", flush=True)
    return documents, [(question, f"answer {number}") for number, question in enumerate(asked)]


def main(packages: Path, output: Path) -> None:
    fetch(packages, sorted({folder.split("/")[0] for places in COLLECTIONS.values() for folder, _ in places}))
    for name, places in COLLECTIONS.items():
        print(name, end=": ")
        documents, questions = collect(packages, places)
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(document) + "\n" for document in documents]
        (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
        queries, right = zip(*questions)
        pq.write_table(pa.table({"query": queries, "document": right}), folder / "questions.parquet")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

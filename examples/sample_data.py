"""The data of the guides, from texts that every Python installation carries: no download is needed.

    python examples/sample_data.py

Writes into the current folder `corpus/` (docstrings of the standard library and the language reference behind
`help()`) and `data/` (the same texts labelled by their package, Python's source code with a tag for every word, and
questions about what functions return). A file that is there and holds something else is not replaced.
"""

import ast
import json
import keyword
import re
import sys
import sysconfig
import tokenize
import zlib
from pathlib import Path
from pydoc_data.topics import topics


SKIPPED = ("test", "idlelib", "lib2to3", "site-packages", "dist-packages")
PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
KINDS = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator"}


def docstrings(library: Path) -> list[dict]:
    """Rows of `text`, `name` (of the function or class) and `package`, for every docstring of 60 characters or more."""
    rows = {}
    for file in sorted(library.rglob("*.py")):
        package = file.relative_to(library).parts[0].removesuffix(".py")
        if package in SKIPPED:
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, DOCUMENTED) and len(text := " ".join((ast.get_docstring(node) or "").split())) >= 60:
                rows[text] = {"text": text, "name": node.name.replace("_", " ").strip(), "package": package}
    return list(rows.values())


def questions(rows: list[dict]) -> list[dict]:
    """What does a function return? The answer is a sentence of its docstring, or there is none."""
    asked = []
    for row in rows:
        found = re.search(r"Returns? [^.]{5,100}\.", row["text"])
        answers = [{"text": found[0], "answer_start": found.start()}] if found else []
        asked.append({"question": f"What does {row['name']} return?", "context": row["text"], "answers": answers})
    return asked


def tagged_code(package: Path) -> list[str]:
    """Each line of the package's code as CoNLL: a word and the kind of token that it is."""
    lines = {}
    for file in sorted(package.glob("*.py")):
        with open(file, "rb") as source:
            for token in tokenize.tokenize(source.readline):
                kind = "keyword" if keyword.iskeyword(token.string) else KINDS.get(token.type, "name")
                if token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.ENCODING):
                    word = "".join(token.string.split())[:30]
                    lines.setdefault((file, token.start[0]), []).append(f"{word} {kind}")
    return ["\n".join(line) + "\n" for line in dict.fromkeys(map(tuple, lines.values()))]


def as_lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    rows = docstrings(library)
    # Unlike hash(), the checksum of a text is the same in every process, so the same texts are always held out.
    held_out = [row for row in rows if zlib.crc32(row["text"].encode()) % 10 == 0]
    train = [row for row in rows if zlib.crc32(row["text"].encode()) % 10]
    files = {
        "corpus/docstrings.jsonl": as_lines(train),
        "corpus/docstrings_held_out.jsonl": as_lines(held_out),
        "corpus/reference.jsonl": as_lines([{"text": text} for text in topics.values()]),
        "data/packages/train.jsonl": as_lines([row for row in train if row["package"] in PACKAGES]),
        "data/packages/validation.jsonl": as_lines([row for row in held_out if row["package"] in PACKAGES]),
        "data/returned.jsonl": as_lines(questions(train)),
        "data/code.conll": "\n".join(tagged_code(library / "asyncio")),
    }
    for file, text in files.items():
        if Path(file).exists() and Path(file).read_text(encoding="utf-8") != text:
            sys.exit(f"{file} is there and holds something else: move it away, or run this in another folder.")
    for file, text in files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text, encoding="utf-8")
        print(f"{file}: {text.count(chr(10)):,} lines")


if __name__ == "__main__":
    main()

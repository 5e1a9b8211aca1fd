"""Make six retrieval tests of kinds that no dictionary is: Parquet files with the columns `query` and `document`.

    apt-get install mandoc lz4
    python benchmarks/kinds_data.py packages data/kinds

Questions of FAQs and their answers, twice, titles and their sections, a command's purpose and its manual page, a
package's short and its long description, and a function's docstring and its code. The document with the query's number
is the right one. `later_questions` were collected when the models of 1 December 2026 were there, and what they showed
led to the further texts of `models/minilm_3_layers`. It needs a Debian or Ubuntu machine, whose `apt-get download` and
`pip download` fetch what is missing. Nothing about Perl is used.
"""

import ast
import gzip
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq


# Questions and manual pages are tests; the other three kinds are for choosing. No text to learn from is from these
# packages, is a manual page or a description of a package; of FAQs it has those of Python, SQLite and anarchism.
FAQ_PACKAGES = (
    "docutils-doc exim4-doc-html fetchmail fvwm gramps hugin-data inn2 leafnode libfftw3-doc libstdc++-12-doc "
    "lyx-common mplayer-doc mutt ncurses-doc privoxy procps python-django-doc r-doc-html slrn xfig-doc xterm zsh-doc"
).split()
LATER_FAQ_PACKAGES = (
    "bacula-doc chrony cvs ffmpeg-doc freeciv-data irssi jed-common nano netcdf-doc tcllib texinfo w3m"
).split()
MANUAL_PACKAGES = "coreutils git-man inn2 manpages mandoc ncurses-doc netpbm procps psmisc util-linux".split()
SECTION_PACKAGES = "gimp-help-en octave-doc gnuplot-doc".split()
CODE_PACKAGES = "py_django py_networkx py_scrapy py_nltk py_beautifulsoup4 py_soupsieve".split()
DESCRIPTIONS = "*_main_i18n_Translation-en.lz4"
SHORTEST, LONGEST = 150, 1_500
MOST_QUERIES = 600
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6", "title"}
BLOCKS = HEADINGS | set("p div li dt dd pre tr td th table ul ol dl br blockquote".split())
OTHER_LANGUAGES = re.compile(r"/(ca|cs|da|de|el|es|fi|fr|hu|it|ja|ko|nb|nl|pl|pt|ro|ru|sv|tr|uk|zh)([-_]\w+)?/")
# Of a section or a question.
NUMBER = re.compile(r"^(Chapter |Question |Q: *|Q?[\d.A-Z]{0,8}\d[.):]*[\d.]*\s+|[\d.]+\)?\s*)")
LEFT_OUT = {"script", "style", "nav", "head", "header", "footer"}


def fetch(packages: Path, names: list[str]) -> None:
    """Fetch and unpack the packages of Debian, and those of PyPI (`py_NAME`), that have no folder yet."""
    packages.mkdir(parents=True, exist_ok=True)
    for name in names:
        folder = packages / name
        if folder.exists():
            continue
        with TemporaryDirectory(dir=packages) as fetched:
            debian = ["apt-get", "download", name]
            python = [sys.executable, "-m", "pip", "download", "--no-deps", name.removeprefix("py_")]
            # Another release of Debian may not have one of them.
            if subprocess.run(python if name.startswith("py_") else debian, cwd=fetched).returncode:
                print(f"{name} was not fetched: its texts are left out")
                continue
            (file,) = Path(fetched).iterdir()
            unpack = ["dpkg-deb", "-x"] if file.suffix == ".deb" else [sys.executable, "-m", "zipfile", "-e"]
            subprocess.run([*unpack, file, Path(fetched) / name], check=True)
            (Path(fetched) / name).rename(folder)


def fetch_descriptions(lists: Path) -> None:
    """Fetch the English descriptions of all packages of Debian."""
    if not any(lists.glob(DESCRIPTIONS)):
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        options = ("Acquire::Languages=en", "Acquire::GzipIndexes=true", f"Dir::State::lists={lists.resolve()}")
        subprocess.run(["apt-get", "update", *(word for option in options for word in ("-o", option))], check=True)


class Paragraphs(HTMLParser):
    """The paragraphs of a page, and which of them are headings."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.text, self.heading, self.left_out, self.code = "", False, "", False
        self.feed(page)
        self.end()

    def end(self) -> None:
        text = self.text.strip("\n") if self.code else " ".join(self.text.split())
        # Sphinx and JavaDoc write a sign for a link behind each heading.
        text = text.removesuffix("¶").strip() if self.heading else text
        if text.strip():
            self.found.append((text, self.heading))
        self.text = ""

    def handle_starttag(self, tag, attributes):
        if tag in LEFT_OUT and not self.left_out:
            self.left_out = tag
        if tag in BLOCKS:
            self.end()
            self.heading, self.code = tag in HEADINGS, tag == "pre" or self.code

    def handle_endtag(self, tag):
        if tag == self.left_out:
            self.left_out = ""
        if tag in BLOCKS:
            self.end()
            self.heading, self.code = False, self.code and tag != "pre"

    def handle_data(self, data):
        if not self.left_out:
            self.text += data


def read(file: Path) -> str:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return content.decode(errors="replace")


def paragraphs(file: Path) -> list[tuple[str, bool]]:
    if re.search(r"\.(x?html?|page)(\.gz)?$", file.name):
        return Paragraphs(read(file).replace("<![", "<")).found
    return [(part.strip(), False) for part in re.split(r"\n\s*\n", read(file))]


def sections(pieces: list[tuple[str, bool]], is_title: Callable[[str, bool], bool]) -> Iterator[tuple[str, str]]:
    """Each title with the text up to the next title or heading."""
    title, section = "", []
    for text, heading in [*pieces, ("", True)]:
        words = NUMBER.sub("", " ".join(text.split()))
        if heading or is_title(words, heading):
            yield title, "\n".join(section)
            title, section = words if is_title(words, heading) else "", []
        else:
            section.append(text)


def is_question(text: str, heading: bool) -> bool:
    return text.endswith("?") and 3 <= len(text.split()) <= 30 and not re.search(r"[.!?:] ", text)


def files_of(packages: Path, names: list[str], pattern: str) -> Iterator[Path]:
    """The English files of packages whose names match, in a fixed order."""
    for name in names:
        for file in sorted((packages / name).rglob("*")):
            if re.search(pattern, file.name) and file.is_file() and not file.is_symlink():
                if not OTHER_LANGUAGES.search(str(file.relative_to(packages))):
                    yield file


def questions(packages: Path, names: list[str]) -> Iterator[tuple[str, str]]:
    for file in files_of(packages, names, r"(?i)(\.x?html?|faq[^/]*)(\.gz)?$"):
        if "faq" in str(file).lower() and not file.name.endswith((".py", ".1.gz")):
            for question, answer in sections(paragraphs(file), is_question):
                # Not the last line of a table of contents.
                if not answer.split("\n")[0].endswith("?"):
                    yield question, answer


def titles(packages: Path) -> Iterator[tuple[str, str]]:
    def is_title(text: str, heading: bool) -> bool:
        return heading and 2 <= len(text.split()) <= 12 and not text.endswith("?")

    for file in files_of(packages, SECTION_PACKAGES, r"\.x?html?$"):
        yield from sections(paragraphs(file), is_title)


def manual_pages(packages: Path) -> Iterator[tuple[str, str]]:
    for file in files_of(packages, MANUAL_PACKAGES, r"\.\d\w*\.gz$"):
        command = ["mandoc", "-T", "utf8", "-O", "width=200"]
        page = subprocess.run(command, input=gzip.decompress(file.read_bytes()), stdout=subprocess.PIPE).stdout
        # Bold letters are written twice, with a backspace between them.
        page = re.sub(r".\x08", "", page.decode(errors="replace"))
        named = re.search(r"\nNAME\n+\s+(.+?) [-–—] (.+?)\n\n([A-Z].*?)\n[^\n]*$", page.strip(), re.S)
        if named:
            yield named[2], "\n".join(line.strip() for line in named[3].split("\n"))


def package_descriptions(lists: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(lists.glob(DESCRIPTIONS)):
        for entry in subprocess.run(["lz4", "-dc", file], capture_output=True, text=True).stdout.split("\n\n"):
            found = re.search(r"Package: (\S+)\n(?:.*\n)*?Description-en: (.+)\n((?: .*\n?)+)", entry)
            if found:
                name, short, long = found.groups()
                yield short, "\n".join(line.strip().removeprefix(".") for line in long.split("\n"))


def docstrings(packages: Path) -> Iterator[tuple[str, str]]:
    for file in files_of(packages, CODE_PACKAGES, r"\.py$"):
        if "test" in str(file):
            continue
        code = read(file)
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                lines, docstring = code.split("\n"), node.body[0]
                without = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
                yield ast.get_docstring(node).split("\n\n")[0], "\n".join(without)


def chosen(pairs: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Some of the pairs in a fixed order, whose queries and beginnings of documents all differ."""
    by_query: dict[str, tuple[str, str]] = {}
    for query, document in pairs:
        query, document = " ".join(query.split()), document.strip()[:LONGEST]
        readable = len(query.split()) > 1 and 3 * sum(map(str.isalpha, document)) > len(document) >= SHORTEST
        longest = len(by_query.get(query.lower(), ("", ""))[1])
        if readable and "perl" not in (query + document).lower() and len(document) > longest:
            by_query[query.lower()] = (query, document)
    by_document = {document[:100]: (query, document) for query, document in by_query.values()}
    found = sorted(by_document.values())
    random.Random(0).shuffle(found)
    return found[:MOST_QUERIES]


def main(packages: Path, output: Path) -> None:
    fetch(packages, FAQ_PACKAGES + LATER_FAQ_PACKAGES + MANUAL_PACKAGES + SECTION_PACKAGES + CODE_PACKAGES)
    fetch_descriptions(packages / "lists")
    output.mkdir(parents=True, exist_ok=True)
    kinds = {
        "test_questions": questions(packages, FAQ_PACKAGES),
        "test_later_questions": questions(packages, LATER_FAQ_PACKAGES),
        "test_manual_pages": manual_pages(packages),
        "choose_titles": titles(packages),
        "choose_packages": package_descriptions(packages / "lists"),
        "choose_code": docstrings(packages),
    }
    for name, pairs in kinds.items():
        queries, documents = zip(*chosen(pairs))
        pq.write_table(pa.table({"query": queries, "document": documents}), output / f"{name}.parquet")
        words = sum(len(document.split()) for document in documents) / len(documents)
        print(f"{name}: {len(queries)} queries, documents of {words:.0f} words")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

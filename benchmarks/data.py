"""Make the data of the benchmarks from packages of Debian and Python.

    pip install gensim nltk && python -c "import nltk; nltk.download('brown'); nltk.download('universal_tagset')"
    python benchmarks/data.py --output_dir data/benchmark

It needs a Debian or Ubuntu machine, but not root: `apt-get download` fetches the packages into a folder. The sources
carry their own licences: manuals (GPL and others), WordNet 3.0, FOLDOC (GFDL), the Brown corpus (for non-commercial
purposes) and 50 news texts with human judgements (Lee, Pincombe and Welsh, 2005; in gensim).

    text/                            manuals of Linux, Python, PostgreSQL and SQLite, and WordNet's definitions
    pairs/, retrieval_foldoc_test    a computing term and its entry in FOLDOC; a sentence and the definition of its word
    sts_lee                          pairs of news, and how alike people find them
    classification_debian_sections/  a one-line description of a package and its section
    pos_brown/                       sentences of the Brown corpus with parts of speech
"""

import gzip
import html
import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from datasets import Dataset

from neobert_hf.common.settings import find_config, parse_config, read_yaml


PACKAGES = ["dict-foldoc", "wordnet-base", "python3-doc", "linux-doc", "postgresql-doc", "sqlite3-doc"]
MANUALS = (
    "*/html/_sources/**/*.txt*",
    "linux-doc-*/Documentation/**/*.rst.gz",
    "postgresql-doc-*/html/*.html",
    "sqlite3/*.html",
)
HELD_OUT, LONGEST_DESCRIPTION = 0.02, 120


@dataclass(kw_only=True)
class DataSettings:
    output_dir: str = field(metadata={"help": "where the tables go"})
    packages: str = field(default="runs/packages", metadata={"help": "where the packages are downloaded to"})


def download(folder: Path) -> Path:
    """Fetch the packages that are missing, unpack them, and return the folder that stands for /usr/share."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "usr").exists():
        # Names such as python3-doc stand for the package of the current version.
        found = subprocess.run(["apt-cache", "depends", *PACKAGES], capture_output=True, text=True, check=True).stdout
        names = {*PACKAGES, *re.findall(r"Depends: (\S+-doc\S*)", found)}
        subprocess.run(["apt-get", "download", *sorted(names)], cwd=folder, check=True)
        for file in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", file.name, "."], cwd=folder, check=True)
    return folder / "usr/share"


def words_of(text: str) -> str:
    return " ".join(text.split())


def manuals(share: Path) -> Iterator[dict]:
    for pattern in MANUALS:
        for file in sorted((share / "doc").glob(pattern)):
            data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            text = data.decode(errors="replace")
            if file.suffix == ".html":
                text = html.unescape(re.sub(r"(?s)<(script|style|head)\b.*?</\1>|<[^>]+>", "", text))
            if len(text) >= 400:
                yield {"text": text.strip(), "source": file.relative_to(share / "doc").parts[0]}


def wordnet(share: Path) -> tuple[list[dict], list[str]]:
    """Sentences with the definition of a word in them; and all definitions."""
    pairs, definitions = [], []
    for part in ("noun", "verb", "adj", "adv"):
        for line in (share / f"wordnet/data.{part}").read_text().splitlines():
            if line.startswith("  "):  # The licence.
                continue
            gloss = line.split(" | ", 1)[1]
            definition = words_of(gloss.split('"')[0]).rstrip("; ")
            definitions.append(definition)
            pairs += [{"query": sentence, "positive": definition} for sentence in re.findall(r'"([^"]{12,})"', gloss)]
    return pairs, definitions


def foldoc(share: Path) -> list[dict]:
    """Terms and their entries, without the marks of links, subjects and dates."""
    text = gzip.decompress((share / "dictd/foldoc.dict.dz").read_bytes()).decode()
    pairs = []
    # A term stands at the beginning of a line, between empty lines, and its entry is indented.
    for term, entry in re.findall(r"(?<=\n\n)(\S[^\n]*)\n\n((?:   [^\n]*\n|[^\n]+\n|\n(?=   ))+)", text):
        entry = re.sub(r"[{}]|<[^>]+>|\(\d{4}-\d\d-\d\d\)|\(https?:[^)]*\)", "", entry)
        if len(entry := words_of(entry)) >= 60:
            pairs.append({"query": term, "positive": entry})
    return pairs


def debian_sections() -> Dataset:
    """One row for each description in the package lists that apt knows, of the sections of the configuration."""
    names = read_yaml(find_config("glue/debian_sections.yaml"))["debian_sections"]["labels"]
    listed = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    rows = {}
    for package in listed.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in package.splitlines() if re.match(r"(Section|Description): ", line)
        )
        section = fields.get("Section", "").rpartition("/")[2]
        if section in names and len(fields) == 2 and len(fields["Description"]) <= LONGEST_DESCRIPTION:
            rows[fields["Description"]] = section
    table = Dataset.from_dict({"sentence": list(rows), "label_text": list(rows.values())})
    return table.add_column("label", [names.index(name) for name in table["label_text"]])


def lee_news() -> list[dict]:
    data = files("gensim") / "test/test_data"
    texts = (data / "lee.cor").read_text(encoding="latin-1").splitlines()
    scores = [list(map(float, line.split())) for line in (data / "similarities0-1.txt").read_text().splitlines()]
    pairs = itertools.combinations(range(len(texts)), 2)
    return [{"sentence1": texts[a], "sentence2": texts[b], "score": scores[a][b]} for a, b in pairs]


def brown() -> list[dict]:
    from nltk.corpus import brown as corpus

    sentences = corpus.tagged_sents(tagset="universal")
    return [{"tokens": [word for word, _ in row], "tags": [tag for _, tag in row]} for row in sentences]


def write(rows: Dataset, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(file)
    print(f"{file}: {len(rows):,} rows", flush=True)


def write_parts(rows: Dataset, folder: Path, share: float) -> None:
    parts = rows.train_test_split(share, seed=0)
    write(parts["train"], folder / "train.parquet")
    write(parts["test"], folder / "validation.parquet")


def main(args: list[str] | None = None) -> None:
    (settings,) = parse_config(DataSettings, args=args)
    output, share = Path(settings.output_dir), download(Path(settings.packages))
    usage, definitions = wordnet(share)
    glosses = ["\n".join(definitions[start : start + 40]) for start in range(0, len(definitions), 40)]
    texts = [*manuals(share), *({"text": text, "source": "wordnet"} for text in glosses)]
    write_parts(Dataset.from_list(texts), output / "text", HELD_OUT)
    terms = Dataset.from_list(foldoc(share)).train_test_split(1000, seed=0)
    write(terms["test"].rename_column("positive", "document"), output / "retrieval_foldoc_test.parquet")
    write(terms["train"], output / "pairs/foldoc.parquet")
    write(Dataset.from_list(usage), output / "pairs/wordnet_usage.parquet")
    write_parts(debian_sections(), output / "classification_debian_sections", 0.1)
    write(Dataset.from_list(lee_news()), output / "sts_lee.parquet")
    write_parts(Dataset.from_list(brown()), output / "pos_brown", 0.1)


if __name__ == "__main__":
    main()

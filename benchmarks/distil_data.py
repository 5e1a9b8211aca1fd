"""Make the texts and pairs that the small models learned last, from packages of Debian and Python.

    python benchmarks/data.py --output_dir data/benchmark
    python benchmarks/distil_data.py data/benchmark runs/packages runs/small

`texts.parquet` has so many characters of each source, in whole documents: manuals of Debian packages, a dictionary of
English, collected sayings; Python files of the libraries that are installed here, and what they say of themselves; the
manuals, definitions and computing terms of data.py; and questions, which rules make of sentences that answer them.
`more_texts.parquet` has as many of manuals on other subjects, and of what the first file leaves of each source.
`apt-get download` fetches the packages that are missing, without root. They carry their own licences. Nothing in it is
from the packages of kinds_data.py, a FAQ of a package, a manual page of a command, a description of a package, an
entry of the tests of data.py, or about Perl.

`foldoc.parquet` and `wordnet.parquet` are the pairs of data.py without the definitions of WordNet's test and without
500 terms of FOLDOC, `foldoc_held_out.parquet`, which choose a model. `foldoc_texts.parquet` has terms with entries.
"""

import gzip
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from distil import read_retrievals
from kinds_data import fetch, files_of, paragraphs, read


MANUALS = (
    "apache2-doc aptitude-doc-en bash-doc bind9-doc cmake-doc debian-handbook debian-policy "
    "developers-reference erlang-doc fp-docs-3.2.2 ghc-doc ghostscript-doc gnome-user-docs grass-doc haproxy-doc "
    "kicad-doc-en keystone-doc libboost1.74-doc libgtk-3-doc lilypond-doc-html mailman3-doc "
    "maxima-doc neutron-doc nodejs-doc nova-doc openjdk-17-doc postfix-doc python-biopython-doc "
    "python-sqlalchemy-doc rust-doc sphinx-doc subversion tkgate-doc varnish-doc vim-doc wireshark-doc"
).split()
# Other subjects, for models/minilm_3_layers.
MORE_MANUALS = (
    "ant-doc apcupsd-doc apt-doc argyll-doc asymptote-doc avrdude-doc awesome-doc backup-manager-doc beets-doc "
    "bird2-doc blends-doc bochs-doc borgbackup-doc buildbot-doc bup-doc c++-annotations-html cedar-backup3-doc "
    "cinder-doc clamav-doc clisp-doc cockpit-doc courier-doc cyrus-sasl2-doc davical-doc debian-history "
    "debian-reference-en denemo-doc diceware-doc doublecmd-help-en ecasound-doc eqonomize-doc fontforge-doc frr-doc "
    "ganeti-doc gettext-doc glpk-doc gnumed-doc gpsbabel-doc gretl-doc groovy-doc harden-doc httrack-doc icu-doc "
    "jargon-text kea-doc keepass2-doc khal-doc kitty-doc knot-doc knot-resolver-doc krb5-doc lava-server-doc "
    "lifelines-doc lirc-doc live-manual-html lua5.2-doc m4-doc mailutils-doc maint-guide mame-doc mapserver-doc "
    "mh-book mit-scheme-doc modem-manager-gui-help mopidy-doc mypy-doc nethack-spoilers nextcloud-desktop-doc "
    "ntpsec-doc nut-doc ocrmypdf-doc openafs-doc openmpi-doc pcp-doc pelican-doc pgbackrest-doc pipewire-doc "
    "proftpd-doc puredata-doc putty-doc rear-doc rhythmbox-doc rsyslog-doc rt4-doc-html scons-doc slurm-wlm-doc "
    "solfege-doc supervisor-doc swi-prolog-doc sylpheed-doc systemtap-doc tomcat10-docs tryton-server-doc "
    "weechat-doc xen-doc xorg-docs yaws-doc"
).split()
OTHERS = ["dict-gcide", "fortunes"]
MODULES = (
    "PIL accelerate aiohttp datasets flask fsspec jinja2 matplotlib mteb numpy pandas peft pip polars pyarrow pydantic "
    "ray rich scipy setuptools sklearn sympy torch tornado transformers"
).split()
# Characters of each source, of each document, and of the shortest document.
MOST, LONGEST, SHORTEST = 1_200_000, 100_000, 200
HELD_OUT = 500
# Sentences that answer a question; what stands in brackets is put into the question.
QUESTIONS = {
    "How do I {}?": r"\bTo ([a-z][^,.;]{8,80}), ",
    "How can I {}?": r"\bYou can ([a-z][^,.;]{8,80})[,.;]",
    "What happens if {}?": r"\b(?:If|When) ([a-z][^,.;]{8,80}), ",
    "What is {}?": r"(?<=[.!?] )((?!This|That|It |There|He |She |What|Here)[A-Z][^,.;:]{2,40}) (?:is|are) (?:an?|the) ",
}


def manual(packages: Path, name: str) -> Iterator[str]:
    """Pages, or plain texts if there are no pages."""
    for pattern in (r"\.(x?html?|page)(\.gz)?$", r"\.(txt|rst)(\.gz)?$"):
        files = [file for file in files_of(packages, [name], pattern) if not re.search("(?i)faq", str(file))]
        random.Random(0).shuffle(files)
        for file in files:
            yield "\n\n".join(text for text, _ in paragraphs(file))
        if files:
            return


def dictionary(packages: Path) -> Iterator[str]:
    file = next((packages / "dict-gcide").rglob("gcide.dict.dz"))
    entries = re.split(r"\n(?=\S)", gzip.decompress(file.read_bytes()).decode(errors="replace"))
    entries = [entry for entry in entries if "WordNet" not in entry]
    random.Random(0).shuffle(entries)
    # Else each entry, which is short, would be drawn as a document.
    yield from ("\n\n".join(entries[start : start + 40]) for start in range(0, len(entries), 40))


def other_texts(packages: Path) -> Iterator[tuple[str, Iterable[str]]]:
    yield "dict-gcide", dictionary(packages)
    sayings = [file for file in (packages / "fortunes").rglob("games/fortunes/*") if file.is_file() and not file.suffix]
    yield "fortunes", ("\n\n".join(re.split(r"\n%\n", read(file))) for file in sorted(sayings))


def python_files(folder: Path) -> list[str]:
    files = [file for file in sorted(folder.rglob("*.py")) if "test" not in str(file.relative_to(folder))]
    random.Random(0).shuffle(files)
    return [read(file) for file in files]


def manuals(packages: Path, names: list[str]) -> Iterator[tuple[str, Iterable[str]]]:
    """Names and documents; a package that is not there is left out."""
    yield from ((name, manual(packages, name)) for name in names if (packages / name).exists())


def sources(data: Path, packages: Path) -> Iterator[tuple[str, Iterable[str]]]:
    """Names and documents of each source."""
    yield from manuals(packages, MANUALS)
    yield from other_texts(packages)
    installed = Path(sysconfig.get_path("purelib"))
    yield from ((name, python_files(installed / name)) for name in MODULES)
    yield "descriptions of libraries", map(read, sorted(installed.glob("*.dist-info/METADATA")))
    texts = pq.read_table(data / "text/train.parquet").to_pandas().sample(frac=1, random_state=0)
    yield from ((name, rows["text"]) for name, rows in texts.groupby("source"))
    yield "foldoc", foldoc_texts(data)


def foldoc_texts(data: Path) -> list[str]:
    terms = pq.read_table(data / "pairs/foldoc.parquet").to_pandas()
    tested = set(pq.read_table(data / "retrieval_foldoc_test.parquet")["document"].to_pylist())
    return [f"{row.query}\n\n{row.positive}" for row in terms.itertuples() if row.positive not in tested]


def questions_of(document: str) -> Iterator[str]:
    text = " ".join(document.split())
    for question, sentence in QUESTIONS.items():
        yield from (question.format(found) for found in re.findall(sentence, text))


def usable(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        if len(document) >= SHORTEST and not re.search(r"(?i)\bperl", document):
            yield document[:LONGEST]


def rest_of(documents: Iterable[str]) -> Iterator[str]:
    """What `write_texts` leaves of a source."""
    size = 0
    for document in usable(documents):
        if size >= MOST:
            yield document
        size += len(document)


def write_texts(found: Iterable[tuple[str, Iterable[str]]], output: Path) -> None:
    rows, questions = [], set()
    for name, documents in found:
        size = 0
        for document in usable(documents):
            rows.append((name, document))
            questions.update(questions_of(document))
            size += len(document)
            if size >= MOST:
                break
        print(f"{name}: {size:,} characters", flush=True)
    print(f"{len(questions):,} questions")
    names, texts = zip(*rows, *(("questions", question) for question in sorted(questions)))
    pq.write_table(pa.table({"source": names, "text": texts}), output)


def write_dictionaries(data: Path, output: Path) -> None:
    pq.write_table(pa.table({"text": foldoc_texts(data)}), output / "foldoc_texts.parquet")
    terms = pq.read_table(data / "pairs/foldoc.parquet").to_pandas().sample(frac=1, random_state=1)
    for name, rows in (("foldoc_held_out", terms[:HELD_OUT]), ("foldoc", terms[HELD_OUT:])):
        rows.to_parquet(output / f"{name}.parquet", index=False)
    searched = set(read_retrievals(data)["WordNet"].documents)
    usage = pq.read_table(data / "pairs/wordnet_usage.parquet").to_pandas()
    usage[~usage["positive"].isin(searched)].to_parquet(output / "wordnet.parquet", index=False)


def main(data: Path, packages: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    fetch(packages, [*MANUALS, *MORE_MANUALS, *OTHERS])
    write_texts(sources(data, packages), output / "texts.parquet")
    left = ((name, rest_of(documents)) for name, documents in sources(data, packages))
    write_texts(chain(manuals(packages, MORE_MANUALS), left), output / "more_texts.parquet")
    write_dictionaries(data, output)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))

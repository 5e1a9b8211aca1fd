"""Pairs that are made of raw text: which texts belong together, what is left out, and that runs repeat exactly."""

import json
import random

import pytest

from neobert_hf.embeddings.text_pairs import TextPairSettings, make_pairs, pairs_of_document, pairs_of_documents


BODY = "The index keeps one vector for each passage of a document and finds those that are nearest to a query."
MORE = (
    "A second paragraph says what happens to those documents that changed. They are embedded again by the next run. "
    "All of the others stay exactly as they are."
)
DOCUMENT = f"# How an index works\n\n{BODY}\n\n{MORE}\n"


def settings(**changes) -> TextPairSettings:
    return TextPairSettings(**{"source": "unused", "output": "pairs.parquet"} | changes)


def pairs(text: str, **changes) -> list[tuple[str, str, str]]:
    found = pairs_of_document(text, settings(**changes), random.Random(0))
    return [(pair["kind"], pair["query"], pair["positive"]) for pair in found]


@pytest.mark.parametrize(
    "title",
    [
        "# How an index works",
        "### How an index works",
        "How an index works\n==================",
        "==================\nHow an index works\n==================",
        "How an index works",
    ],
)
def test_a_title_belongs_to_the_text_under_it(title):
    assert pairs(f"{title}\n\n{BODY}", kinds=["title"]) == [("title", "How an index works", BODY)]


def test_a_markdown_heading_needs_no_blank_line_and_code_is_no_text():
    code = "```bash\n# Install the package with its extras\n\npip install x\n```\n"
    text = f"An introduction of some words.\n## How an index works\n{BODY}\n\n{code}\n{MORE}\n"
    assert pairs(text, kinds=["title"]) == [("title", "How an index works", BODY)]
    found = pairs(text)
    assert not any("pip install" in query + positive for _, query, positive in found)
    assert pairs(text.replace("\n", "\r\n")) == found


def test_short_lines_are_titles_where_no_heading_is_marked():
    text = f"The manual\n\nPrevious Next\n\n1.2. How an index works\n\n{BODY}\n\n{MORE}\n\nSee also\n\nThe trees"
    kinds = ["title", "unmarked_title", "sentence"]
    assert pairs(text, kinds=["title"]) == []
    # The body of a title gives no sentence as well. MORE does.
    found = pairs(text, kinds=kinds)
    assert found[0] == ("unmarked_title", "1.2. How an index works", BODY)
    assert [(kind, query in MORE) for kind, query, _ in found[1:]] == [("sentence", True)]
    # One marked heading says that the others would be marked, too.
    assert "unmarked_title" not in {kind for kind, *_ in pairs(f"{text}\n\n# A marked heading\n", kinds=kinds)}


@pytest.mark.parametrize("line", ["It works.", "Index", "Note:", "A title of " + "very " * 20 + "many words"])
def test_what_is_no_title(line):
    for beginning, kind in (("", "title"), ("The manual\n\n", "unmarked_title")):
        assert pairs(f"{beginning}{line}\n\n{BODY}", kinds=[kind]) == []


def test_documents_are_held_out_whole(tmp_path):
    """Equal ones on one side, the same ones whatever stands beside them, and no text on both sides."""
    footer = "Licensed under the terms of the licence, which you find in a file beside it. It allows much to everybody."

    def text(number: int) -> str:
        return f"{DOCUMENT.replace('index', f'index{number % 50}')}\n\n# All about the licence\n\n{footer}\n"

    def parts(numbers) -> dict[str, list[str]]:
        source = tmp_path / "text.jsonl"
        source.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in numbers))
        return {
            name: rows["query"] for name, rows in pairs_of_documents(settings(source=str(source), held_out=0.3)).items()
        }

    found = parts(range(100))
    documents = {
        name: {word for query in queries for word in query.split() if word[-1:].isdigit()}
        for name, queries in found.items()
    }
    assert documents["train"].isdisjoint(documents["held_out"]) and len(set.union(*documents.values())) == 50
    assert 5 <= len(documents["held_out"]) <= 25
    assert "All about the licence" in found["train"] and "All about the licence" not in found["held_out"]
    some = parts(range(3, 50, 2))
    assert {query for query in some["held_out"] if query.startswith("How")} <= set(found["held_out"])
    with pytest.raises(ValueError, match="to hold out: raise `held_out`, or add documents"):
        parts([next(n for n in range(50) if f"How an index{n} works" in found["train"])])


def test_sentences_are_taken_out_of_their_paragraphs_and_spans_are_neighbours():
    ((_, query, positive),) = pairs(MORE, kinds=["sentence"])
    assert query in MORE and query not in positive
    assert sorted(f"{query} {positive}".split()) == sorted(MORE.split())
    ((_, query, positive),) = pairs(DOCUMENT, kinds=["spans"])
    assert {query, positive} == {BODY, MORE}
    # A text is no pair with itself.
    assert pairs(f"{BODY}\n\n{BODY}", kinds=["spans"]) == []
    # Texts are cut, and pairs of a document limited.
    ((_, query, positive),) = pairs(f"{BODY}\n\n{'word ' * 200}", kinds=["spans"])
    assert sorted([len(query.split()), len(positive.split())])[1] == 120
    assert len(pairs("\n\n".join(f"Number {number}. {MORE}" for number in range(20)), kinds=["sentence"])) == 8


def test_the_same_pairs_from_every_run_and_each_query_once(tmp_path, capsys):
    source = tmp_path / "text.jsonl"
    documents = [DOCUMENT, DOCUMENT, DOCUMENT.replace("index", "tree"), None]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    first = pairs_of_documents(settings(source=str(source)))["train"]
    assert first[:] == pairs_of_documents(settings(source=str(source)))["train"][:]
    assert len(set(first["query"])) == len(first) and set(first["kind"]) == {"title", "sentence", "spans"}
    assert "1 of 4 documents" in capsys.readouterr().out


def test_a_table_in_memory_gives_what_the_command_gives_on_a_file(tmp_path):
    rows = [{"text": DOCUMENT.replace("index", f"index{number}")} for number in range(20)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--source", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "file.parquet"), "--held_out", "0.3"]
    of_file = make_pairs.main(flags).output
    of_table = make_pairs(source=rows, output=tmp_path / "table.parquet", held_out=0.3).output
    assert of_file.keys() == of_table.keys() == {"train", "held_out"}
    assert all(of_file[part].read_bytes() == of_table[part].read_bytes() for part in of_file)


def test_a_place_that_may_not_be_written_is_named_before_the_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="pairs.parquet cannot be written"):
        make_pairs(source=tmp_path / "nowhere.md", output=tmp_path / "new" / "pairs.parquet")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kinds": ["titles"]}, "`kinds` is .*title, unmarked_title, sentence, spans"),
        ({"output": "pairs.parquet"}, "pairs_held_out.parquet exists"),
        ({"source": "text.md", "output": "other.parquet"}, "give no pair of the kinds title, sentence, spans"),
    ],
)
def test_bad_settings_are_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs_held_out.parquet").touch()
    (tmp_path / "text.md").write_text("Nothing here.")
    with pytest.raises(ValueError, match=message):
        pairs_of_documents(settings(**changes))

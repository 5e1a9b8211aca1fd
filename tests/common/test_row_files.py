"""Text from files of others: bounded memory, nothing fetched, and errors that name the file and the row."""

import gzip
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Image, Value

from neobert_hf.common import row_files
from neobert_hf.common.row_files import list_as_text, read_rows
from neobert_hf.common.text_sources import load_table, stream_documents, stream_text


def rows_of(file, columns=("text",)) -> list[dict]:
    return list(read_rows([str(file)], columns))


@pytest.fixture
def fetched():
    """What is asked of a server on this machine, and its address."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield asked, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_images_by_address_are_not_fetched(fetched, tmp_path):
    asked, address = fetched
    features = Features({"text": Value("string"), "image": Image(), "id": Value("int64")})
    images = [{"bytes": None, "path": f"{address}/{number}.png"} for number in range(3)]
    columns = {"text": ["a", "b", None], "image": images, "id": range(3)}
    pq.write_table(pa.table(columns, schema=features.arrow_schema), tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    assert [row["text"] for row in stream_text(source, "text")] == ["a", "b", None]
    assert list(stream_documents(source, "text", "id"))[1] == ("1", "b")
    with pytest.raises(ValueError, match="The column 'image' of .*a.parquet holds struct"):
        stream_text(source, "image")
    with pytest.raises(ValueError, match="The column 'image' of .*a.parquet holds struct"):
        stream_documents(source, "text", "image")
    table = load_table("mine", source, None, "train")
    assert table.column_names == ["text", "id"] and table[0] == {"text": "a", "id": 0}
    # As from the Hub, where `datasets` reads.
    from datasets import load_dataset

    with pytest.MonkeyPatch.context() as patch:
        splits = load_dataset("parquet", data_files=source, streaming=True)
        patch.setattr("neobert_hf.common.text_sources.load_dataset", lambda *arguments, **options: splits)
        assert [row["text"] for row in stream_text("owner/name", "text")] == ["a", "b", None]
        with pytest.raises(ValueError, match="column 'image' of 'owner/name' holds Image"):
            stream_text("owner/name", "text", others=["image"])
    assert not asked


class Endless:
    """A file that goes on and counts what is taken from it: at most a little more than may be held in memory."""

    def __init__(self, begin: bytes):
        self.left, self.taken = begin, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def read(self, size):
        assert 0 <= size < 10_000, "all of it was asked for"
        part, self.left = (self.left + b" " * size)[:size], self.left[size:]
        self.taken += len(part)
        return part

    readline = read


@pytest.mark.parametrize(
    "begin, name", [(b"", "a.txt.gz"), (b'{"text": "', "a.jsonl.gz"), (b"[", "a.json"), (b"", "a.parquet.gz")]
)
def test_a_file_that_expands_without_end_is_refused(tmp_path, monkeypatch, begin, name):
    file = Endless(begin)
    monkeypatch.setattr(row_files, "open_file", lambda name: file)
    for limit in ("LARGEST_JSON", "LARGEST_TEXT_FILE"):
        monkeypatch.setattr(row_files, limit, 1_000)
    with pytest.raises(ValueError, match=f"{name}.* has more than 1,000 bytes"):
        rows_of(tmp_path / name)
    assert file.taken < 3_000


def test_a_real_bomb_is_refused_by_every_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "LARGEST_JSON", 2**20)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b'{"text": "fine"}\n{"text": "')
        for _ in range(64):
            file.write(bytes(2**20))
    source = str(tmp_path / "a.jsonl.gz")
    assert os.path.getsize(source) < 2**17
    with pytest.raises(ValueError, match="a.jsonl.gz, line 2 has more than 1,048,576 bytes"):
        list(stream_text(source, "text"))
    with pytest.raises(ValueError, match="a.jsonl.gz, line 2 has more than 1,048,576 bytes"):
        load_table("mine", source, None, "train")


def jsonl(*lines: bytes) -> bytes:
    return b"\n".join([b'{"text": "fine"}', *lines])


BAD = {
    "half a line": ("a.jsonl", jsonl(b"", b'{"text": '), "a.jsonl, line 3 is not valid JSON"),
    "no object": ("a.jsonl", jsonl(b"3"), "a.jsonl, line 2 holds int 3; it must be an object"),
    "a number": ("a.jsonl", jsonl(b'{"text": 3}'), "a.jsonl, line 2: the column 'text' holds int 3, not strings"),
    "not UTF-8": ("a.jsonl", jsonl(b'{"text": "\xff"}'), "a.jsonl, line 2 is not valid JSON .*utf-8"),
    "half a character": ("a.jsonl", jsonl(b'{"text": "\\ud800"}'), "a.jsonl, line 2: 'text' holds half a character"),
    "brackets": ("a.jsonl", jsonl(b"[" * 100_000), "a.jsonl, line 2 is not valid JSON"),
    "another column": ("a.json", b'[{"body": "x"}]', "a.json has no column 'text'; it has 'body'"),
    "an array": ("a.json", b'[{"text": "x"}, {"text": ["y"]}]', "a.json, row 1: the column 'text' holds list"),
    "text": ("a.txt", b"\xff", "a.txt is not UTF-8"),
    "half an archive": ("a.txt.gz", gzip.compress(os.urandom(100))[:-20], "a.txt.gz cannot be read"),
    "no archive": ("a.jsonl.xz", b"plain", "a.jsonl.xz cannot be read"),
    "no parquet": ("a.parquet", b"PAR1", "a.parquet cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_file_and_the_row(tmp_path, case):
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_that_is_replaced_is_read_anew(tmp_path, kind):
    """Also by a copy of the same time and size, as from an archive: `datasets` would give what it had read before."""
    file = tmp_path / f"texts.{kind}"
    for text in ("old", "new"):
        rows = Dataset.from_list([{"text": text}])
        rows.to_parquet(file) if kind == "parquet" else rows.to_json(file)
        os.utime(file, ns=(10**18, 10**18))
        assert load_table("mine", str(file), None, "train")["text"][:] == [text]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_path_is_no_pattern(tmp_path, kind):
    """Files in a folder called `[1] *` were said to be empty."""
    (tmp_path / "[1] *").mkdir()
    file = tmp_path / "[1] *" / f"rows[a].{kind}"
    rows = Dataset.from_list([{"text": "a"}, {"text": "b"}])
    {"parquet": rows.to_parquet, "jsonl": rows.to_json, "csv": rows.to_csv}[kind](file)
    for source in (file, file.parent):
        assert load_table("mine", str(source), None, "train")["text"][:] == ["a", "b"]
        assert [row["text"] for row in stream_text(str(source), "text")] == ["a", "b"]


def test_errors_in_parquet_name_the_row(tmp_path):
    pq.write_table(
        pa.table({"text": pa.array([b"fine"] * 1_500 + [b"\xff"]).cast(pa.binary())}), tmp_path / "b.parquet"
    )
    with pytest.raises(ValueError, match="The column 'text' of .*b.parquet holds binary, not strings"):
        rows_of(tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["a", "b"], "id": ["x", None]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match="c.parquet, row 1 has no value in the column 'id'"):
        rows_of(tmp_path / "c.parquet", ("text", "id"))


def test_what_is_sound_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "\xc3\xa9", "id": 1}\r\n\n{"id": 2}\n{"text": null, "id": 3}'
    )
    assert rows_of(tmp_path / "a.jsonl") == [{"text": "é"}, {"text": None}, {"text": None}]
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    assert rows_of(tmp_path / "a.json") == [{"text": "a"}, {"text": "b"}]
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    assert rows_of(tmp_path / "a.txt") == [{"text": "one\ntwo\n"}]
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    pq.write_table(pa.table({"text": words, "id": [1, 2, 3]}), tmp_path / "a.parquet", row_group_size=2)
    assert rows_of(tmp_path / "a.parquet", ("text", "id"))[2] == {"text": "x", "id": 3}
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert rows_of(tmp_path / "a.parquet.gz") == [{"text": "x"}, {"text": "y"}, {"text": "x"}]


def test_a_csv_column_is_text_unless_every_value_is_a_number(tmp_path):
    """pandas decides anew for each 10,000 rows: the last row of such a file was read as 7 and 1.5."""
    rows = [f"q{n},{n},0.5,{n}\n" for n in range(10_000)]
    (tmp_path / "a.csv").write_text("query,id,score,year\n" + "".join(rows) + "007,1.50, .25,-1999\n")
    table = load_table("mine", str(tmp_path / "a.csv"), None, "train", texts=["year"])
    assert table[-1] == {"query": "007", "id": 1.5, "score": 0.25, "year": "-1999"}
    (tmp_path / "b.csv").write_text("id,large,none\n007,9007199254740993,\n7,12345678901234567890,\n")
    table = load_table("mine", str(tmp_path / "b.csv"), None, "train")
    assert table[:] == {"id": ["007", "7"], "large": ["9007199254740993", "12345678901234567890"], "none": ["", ""]}


def test_a_csv_column_without_a_name_is_read(tmp_path):
    """As pandas writes a table together with its index."""
    pd.DataFrame({"query": ["a", "b"], "positive": ["c", "d"]}).to_csv(tmp_path / "a.csv")
    table = load_table("mine", str(tmp_path / "a.csv"), None, "train")
    assert table[:] == {"Unnamed: 0": [0, 1], "query": ["a", "b"], "positive": ["c", "d"]}


@pytest.mark.parametrize(
    "cells, found",
    [
        (["[]", "", "['a', 'b']"], "['a', 'b']"),
        (["['a' 'b']"], "['a' 'b']"),
        (["[1, 2]", "[ 3.5e-1 ]"], "[1, 2]"),
        (["[]", ""], None),
        (["[1] first", "[2, 3]"], None),
        (["['a', 'b']", "text"], None),
    ],
)
def test_lists_that_pandas_wrote_are_found(cells, found):
    assert list_as_text(cells) == found


def test_csv_files_of_other_columns_are_refused(tmp_path):
    for name, text in (("1.csv", "a,b\n1,2\n"), ("2.csv", "b,a\nx,3\n")):
        (tmp_path / name).write_text(text)
    assert load_table("mine", str(tmp_path), None, "train")[:] == {"a": [1, 3], "b": ["2", "x"]}
    (tmp_path / "3.csv").write_text("a,c\n1,2\n")
    with pytest.raises(ValueError, match="3.csv has the columns a, c; .*1.csv has a, b"):
        load_table("mine", str(tmp_path), None, "train")


def test_a_missing_source_is_named_with_its_dataset(tmp_path):
    with pytest.raises(FileNotFoundError, match="Dataset mine: .*nope.jsonl' matches no file"):
        load_table("mine", str(tmp_path / "nope.jsonl"), None, "train")


@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.markdown"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf# How to install\r\n")
    assert rows_of(tmp_path / name) == [{"text": "# How to install\n"}]


def test_an_empty_id_is_a_missing_one(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,a\n ,b\n")
    with pytest.raises(ValueError, match="a.csv, row 1 has no value in the column 'id': give it an id"):
        list(stream_documents(str(tmp_path / "a.csv"), "text", "id"))


def test_one_file_has_one_id_wherever_it_is_named_from(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path / "docs")
    assert list(stream_documents("../docs", "text")) == [(str(tmp_path / "docs" / "a.txt"), "a")]

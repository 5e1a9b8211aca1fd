"""Tables as users have them: what is read of each kind of file, and the file and row that an error names."""

import gzip
import math

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value, load_dataset
from datasets.exceptions import DatasetNotFoundError

from neobert_hf.data import sources
from neobert_hf.data.rows import Row, list_as_text
from neobert_hf.data.sources import as_dataset, hub_files, read_rows, stream_text


def cells(source, *arguments, **options) -> list[dict]:
    return [row.cells for row in read_rows(str(source), *arguments, **options)]


SOUND = {
    "a csv": ("a.csv", "text,id\nNA,007\n,1.50\n", [{"text": "NA", "id": "007"}, {"text": "", "id": "1.50"}]),
    "Excel's semicolons": ("a.csv", '\ufefftext;n\n"a; b, c";1,5\n', [{"text": "a; b, c", "n": "1,5"}]),
    "Excel's separator": ("a.csv", '\ufeffsep=;\r\n"a, b";n\r\n"x; y";1,5\r\n', [{"a, b": "x; y", "n": "1,5"}]),
    "a byte order mark": ("a.csv", "\ufefftext\nx\n", [{"text": "x"}]),
    "quotes": ("a.csv", 'text,n\n"a, ""b""\nc",1\r\n', [{"text": 'a, "b"\nc', "n": "1"}]),
    "quotes in a tsv": ("a.tsv", 'text\tn\n"x\t5\n', [{"text": '"x', "n": "5"}]),
    "an unnamed index column": ("a.csv", ",text\n0,x\n1,y\n", [{"": "0", "text": "x"}, {"": "1", "text": "y"}]),
    "empty lines": ("a.csv", "text\nx\n\ny\n", [{"text": "x"}, {"text": "y"}]),
    "json lines": ("a.jsonl", '\ufeff{"a": 1}\r\n\n{"a": ["é", null]}', [{"a": 1}, {"a": ["é", None]}]),
    "line ends that are none": ("a.jsonl", '{"a": "x\u2028\x85y"}\n', [{"a": "x\u2028\x85y"}]),
    "a json array": ("a.json", '[{"a": 1},\n {"b": 2}]', [{"a": 1}, {"b": 2}]),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_is_sound_is_read_as_it_is_written(tmp_path, case):
    name, content, expected = SOUND[case]
    (tmp_path / name).write_text(content, newline="")
    assert cells(tmp_path / name) == expected
    with gzip.open(tmp_path / f"{name}.gz", "wt", newline="") as file:
        file.write(content)
    assert cells(tmp_path / f"{name}.gz") == expected


FAULTS = {
    "tabs in a csv": ("a.csv", "text\tlabel\na\tb\n", "row 0: the first line, .* has tabs"),
    "a short row": ("a.csv", "text,label\na,b\nc\n", "row 1: it has 1 fields, .* names 2: text, label"),
    "one name twice": ("a.csv", "text,text\na,b\n", "row 0: the first line must name the columns, each once"),
    "an open quote": ("a.csv", 'text,label\na,b\n"a,b\n', "row 1: "),
    "no row": ("a.csv", "text,label\n", "is empty"),
    "latin-1": ("a.csv", "text\na\ncaf\udce9\n", "row 1: .*UTF-8"),
    "half a line": ("a.jsonl", '{"text": "x"}\n\n{"text": ', "row 1: "),
    "no object": ("a.jsonl", '{"text": "x"}\n3', "row 1: 3 is no row"),
    "no column": ("a.jsonl", '{"text": "x"}\n{"txt": "y"}', "row 1 has no column 'text'; it has 'txt'"),
    "half a character": ("a.jsonl", '{"text": "\\ud800"}', "row 0: 'text' holds half a character"),
    "a list": ("a.json", '[{"text": "x"}, {"text": ["y"]}]', "row 1: 'text' holds list"),
    "white space": ("a.jsonl", '{"text": "x"}\n{"text": " \\t\\u3000"}', "row 1: 'text' is "),
    "zero width": ("a.jsonl", '{"text": "\\u200b\\u2060\\ufeff\\u00ad"}', "row 0: 'text' is "),
    "a missing text": ("a.jsonl", '{"text": null}', "row 0: 'text' is None"),
    "a missing text of pandas": ("a.jsonl", '{"text": "nan"}\n{"text": NaN}', "row 1: 'text' is nan"),
    "a printed object": ("a.json", '{\n  "text": "x"\n}', "row 0: .*Write each row on a line"),
    "no parquet": ("a.parquet", "PAR1", "row 0: "),
    "no archive": ("a.jsonl.xz", "plain", "row 0: "),
    "an unknown format": ("a.docx", "x", "has an unknown format; the known ones are .parquet"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_named_by_file_and_row(tmp_path, case):
    name, content, message = FAULTS[case]
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"(?s){name},? {message}"):
        [row.text("text") for row in read_rows(str(tmp_path / name))]


def test_cells_are_what_the_recipe_asks_for():
    row = Row("a.csv", 3, {"n": "0.5", "year": 1999, "ok": True, "tags": ["a", 1], "split": "a; b;"})
    assert (row.number("n"), row.text("year"), row.label("ok"), row.labels("tags")) == (0.5, "1999", "True", ["a", "1"])
    assert row.labels("split", ";") == ["a", "b"] and row.texts("tags") == ["a", "1"]


@pytest.mark.parametrize(
    "kind, cell",
    [
        *(("number", cell) for cell in ("nan", "inf", "half", None, ["a"])),
        *(("labels", cell) for cell in ("0.5", ["a", "\u200b"])),
        *(("texts", cell) for cell in ([], ["a", None], "a")),
    ],
)
def test_cells_that_are_something_else_are_named(kind, cell):
    with pytest.raises(ValueError, match="a.csv, row 3: 'column' is "):
        getattr(Row("a.csv", 3, {"column": cell}), kind)("column")


MIXED = {"id": [7, "x", None], "text": ["a", 5, math.nan], "number": [1, None, 3]}


@pytest.mark.parametrize("form", [pd.DataFrame, lambda columns: pd.DataFrame(columns).to_dict("records")])
def test_texts_and_numbers_in_one_column_of_a_table_are_texts(form):
    rows = as_dataset(form(MIXED))
    assert rows["id"][:] == ["7", "x", None] and rows["text"][:] == ["a", "5", None]
    assert rows["number"][:] == [1, None, 3]
    assert [row.text_or_none("text") for row in read_rows(form(MIXED))] == ["a", "5", None]


def test_columns_that_no_file_could_hold_are_named():
    frame = pd.DataFrame([["x", "a"], ["y", ["b"]]], columns=["text", "label"])
    with pytest.raises(ValueError, match="'label' of the table holds list, str"):
        next(read_rows(frame))
    with pytest.raises(ValueError, match="the column 'text' more than once"):
        next(read_rows(pd.concat([frame, frame["text"]], axis=1)))


def test_lists_that_pandas_wrote_are_found_and_brackets_in_texts_are_not():
    for lists in (["['a', 'b']", "[]", ""], ["['a' 'b']"], ["[1, 2]", "[ 3.5e-1 ]"]):
        assert list_as_text(lists) == lists[0]
    for texts in (["[]", ""], ["[1] first", "[2, 3]"], ["['a', 'b']", "text"]):
        assert list_as_text(texts) is None


def test_parquet_gives_only_what_is_asked_for_and_labels_by_name(tmp_path):
    names = ClassLabel(names=["no", "yes"])
    features = Features({"text": Value("string"), "image": Image(), "label": names, "tags": List(names)})
    columns = {"text": ["a", "b"], "image": [{"bytes": None, "path": "http://nowhere/0.png"}] * 2}
    columns |= {"label": [1, -1], "tags": [[0, 1], []]}
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns, schema=features.arrow_schema), file)
    assert cells(file, ["text", "label", "tags"]) == [
        {"text": "a", "label": "yes", "tags": ["no", "yes"]},
        {"text": "b", "label": None, "tags": []},
    ]
    with pytest.raises(ValueError, match="a.parquet has no column 'body'; it has 'text', 'image'"):
        cells(file, ["body"])
    with pytest.raises(ValueError, match="a.parquet, row 0: 'image' holds dict"):
        list(stream_text(str(file), "image"))


def test_a_folder_is_all_its_files_in_order(tmp_path):
    folder = tmp_path / "[1] *"
    (folder / "more").mkdir(parents=True)
    pd.DataFrame({"a": ["x"], "b": [1]}).to_csv(folder / "1.csv", index=False)
    pd.DataFrame({"b": ["007"], "a": ["y"]}).to_csv(folder / "more" / "2.tsv", index=False, sep="\t")
    (folder / ".hidden.parquet").write_bytes(b"")
    rows = list(read_rows(str(folder)))
    assert [(row.cells["a"], row.cells["b"]) for row in rows] == [("x", "1"), ("y", "007")]
    assert [row.place for row in rows] == [f"{folder}/1.csv, row 0", f"{folder}/more/2.tsv, row 0"]
    for options in ({"subset": "en"}, {"split": "test"}):
        with pytest.raises(ValueError, match=f"is local and has no {next(iter(options))} '"):
            cells(folder, **options)
    (folder / "README.md").write_text("# Mine")
    with pytest.raises(ValueError, match="mixes .csv and .md and .tsv files: select those of one format"):
        cells(folder)


def test_of_a_folder_without_texts_it_is_said_that_its_files_can_be_saved_as_text(tmp_path):
    (tmp_path / "page.html").write_text("<p>x")
    with pytest.raises(ValueError, match="page.html has an unknown format; .* a web page as text"):
        cells(tmp_path)


def test_documents_are_streamed_and_pictures_beside_them_left_out_aloud(tmp_path, capsys):
    for name in "abc":
        (tmp_path / f"{name}.md").write_bytes(b"\xef\xbb\xbf# How\r\n" + name.encode())
    (tmp_path / "picture.png").write_bytes(b"x")
    assert list(stream_text(str(tmp_path), "text")) == ["# How\na", "# How\nb", "# How\nc"]
    assert "1 (.png)" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text('{"text": 1}\n{"text": null}\n')
    assert list(stream_text(str(tmp_path / "*.jsonl"), "text")) == ["1", ""]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """What is asked of the Hub; local files stand in for its datasets."""
    asked = []
    rows = [{"text": "x y", "n": 1, "label": 0}, {"text": None, "n": 2, "label": -1}]
    features = Features({"text": Value("string"), "n": Value("int64"), "label": ClassLabel(names=["a", "b"])})
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "hub.parquet")

    def from_the_hub(*arguments, **options):
        asked.append((arguments, options))
        if arguments[0] == "owner/nothing":
            raise DatasetNotFoundError("Dataset 'owner/nothing' doesn't exist on the Hub")
        files = {"train": str(tmp_path / "hub.parquet"), "test": str(tmp_path / "hub.parquet")}
        return load_dataset("parquet", data_files=files, **options)

    monkeypatch.setattr(sources, "load_dataset", from_the_hub)
    return asked


def test_datasets_of_the_hub(hub):
    assert cells("owner/name", subset="en", split="test[:1]") == [{"text": "x y", "n": 1, "label": "a"}]
    assert hub == [(("owner/name", "en"), {"split": "test[:1]", "streaming": False})]
    assert [row.place for row in read_rows("owner/name")] == [f"owner/name, split train, row {n}" for n in (0, 1)]
    assert list(stream_text("owner/name", "text", "test", "en")) == ["x y", ""]
    assert hub[-1] == (("owner/name", "en"), {"split": "test", "streaming": True})
    assert list(stream_text("owner/name", "n")) == ["1", "2"]
    for streaming in (False, True):
        # One column may serve two purposes.
        assert cells("owner/name", ["n", "n"], streaming=streaming) == [{"n": 1}, {"n": 2}]
        with pytest.raises(ValueError, match="owner/name.*'body'.*'text', 'n', 'label'"):
            cells("owner/name", ["body"], streaming=streaming)
        with pytest.raises(FileNotFoundError, match="'owner/nothing' is not a local file.*the Hub has no such"):
            cells("owner/nothing", streaming=streaming)
        with pytest.raises(ValueError, match="dev"):
            cells("owner/name", split="dev", streaming=streaming)


@pytest.mark.parametrize("name", ["nowhere", "owner/nothing"])
def test_without_the_hub_a_name_is_first_said_to_be_no_file(name):
    """Tests run with `HF_HUB_OFFLINE`: see conftest.py."""
    with pytest.raises(FileNotFoundError, match="nope.jsonl' matches no file"):
        cells("nope.jsonl")
    for read in (cells, hub_files):
        with pytest.raises(ConnectionError, match=f"{name!r} is not a local file, pattern or folder, and the Hub cann"):
            read(name)


@pytest.mark.parametrize("rows", [[{"text": "a"}, "b"], [{"text": "a"}, None]])
def test_a_bad_row_of_a_table_in_memory_has_no_file_to_leave_out(rows):
    with pytest.raises(ValueError, match="row 1 of the table: .* must be a dictionary") as error:
        list(read_rows(rows))
    assert "file" not in str(error.value)

"""examples/semantic_search.py on small data: what it finds, what it embeds again, and what it refuses."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from neobert_hf.common.fingerprints import SettingsMismatch
from neobert_hf.search.encoder import EmbeddingSettings, PassageEncoder
from neobert_hf.search.index import VectorIndexError, open_index
from neobert_hf.search.indexing import SourceSettings
from neobert_hf.search.lancedb_index import LanceDBIndex
from neobert_hf.search.passages import split_passages
from tests.helpers.examples import load_example
from tests.helpers.other_encoders import save_with_its_own_code
from tests.helpers.search_encoder import save_search_encoder


pytest.importorskip("lancedb")
semantic_search = load_example("semantic_search")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Of one passage each, all different."""
    pages = [" ".join(text.split()) for _, text in sorted(topics.items())]
    starts = [" ".join(page[at : at + 600].split()[:8]) for page in pages for at in range(0, len(page), 600)]
    return list(dict.fromkeys(starts))[:60]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """With mean pooling."""
    folder = tmp_path_factory.mktemp("model")
    # Sentence Transformers adds mean pooling to an encoder.
    SentenceTransformer(save_search_encoder(folder / "encoder"), device="cpu").save(str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="session")
def encoder(model) -> SentenceTransformer:
    return SentenceTransformer(str(model), device="cpu")


@pytest.fixture
def corpus(texts, tmp_path) -> Path:
    """JSON lines with ids that are not their places."""
    return write_rows(tmp_path / "corpus.jsonl", {f"d{7 * i}": text for i, text in enumerate(texts)})


def write_rows(path: Path, rows: dict[str, str | None]) -> Path:
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in rows.items()))
    return path


@pytest.fixture
def index(model, tmp_path, capsys):
    """Run `index`; return how many documents were embedded, passages, unchanged, removed, repeated, and empty ones."""

    def run(source, *flags: str, **changes) -> list[int]:
        settings = {"index": tmp_path / "index", "model": model, "source": source, "device": "cpu"} | changes
        semantic_search.main(["index", *(f"--{key}={value}" for key, value in settings.items()), *flags])
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "documents embedded" in line)
        return [int(number) for number in re.findall(r"\b\d+\b", line.partition(": ")[2])]

    return run


@pytest.fixture
def query(tmp_path, capsys):
    """Run `query --json` and return the hits of each query."""

    def run(*texts: str, **changes) -> list[list[dict]]:
        settings = {"index": tmp_path / "index", "device": "cpu", "json": True} | changes
        semantic_search.main(["query", *(f"--{key}={value}" for key, value in settings.items()), "--text", *texts])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["query"] for line in lines] == list(texts)
        return [line["hits"] for line in lines]

    return run


def stored(folder: Path) -> dict[tuple[str, int], dict]:
    rows = LanceDBIndex(folder).table.to_arrow().to_pylist()
    found = {(row["document"], row["number"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("dimensions", [32, 20])
def test_hits_are_those_of_brute_force(index, query, corpus, texts, encoder, dimensions):
    flags = ["--id_column=id", "--query_prompt=question: ", "--document_prompt=text: "]
    assert index(corpus, *flags, truncate_dim=dimensions) == [60, 60, 0, 0, 0, 0]
    queries = ["how is text encoded?", "a list of numbers"]
    vectors = unit(encoder.encode([f"text: {text}" for text in texts])[:, :dimensions])
    cosines = unit(encoder.encode([f"question: {text}" for text in queries])[:, :dimensions]) @ vectors.T
    for row, hits in zip(cosines, query(*queries, top_k=12)):
        best = np.argsort(-row)[:12]
        assert [hit["document"] for hit in hits] == [f"d{7 * i}" for i in best]
        assert [hit["text"] for hit in hits] == [texts[i] for i in best]
        # float32 against float64.
        assert np.abs([hit["score"] for hit in hits] - row[best]).max() < 1e-5
        assert all(hit["number"] == 0 and hit["source"] == str(corpus) for hit in hits)


def test_words_count_beside_the_cosine(index, query, corpus, texts, tmp_path, capsys):
    index(corpus, "--id_column=id")
    word = max(texts[5].split(), key=lambda word: (word.isalpha() and sum(word in text for text in texts) == 1, word))
    (by_words,) = query(word, keyword_weight=3, top_k=60)
    assert by_words[0]["text"] == texts[5] and by_words[0]["score"] > 2
    (by_vectors,) = query(word, top_k=60)
    scores = {hit["document"]: hit["score"] for hit in by_vectors}
    assert all(abs(hit["score"] - scores[hit["document"]]) < 1e-5 for hit in by_words[1:])
    # The best match by its words has 3 more.
    assert abs(by_words[0]["score"] - scores[by_words[0]["document"]] - 3) < 1e-5
    flags = [f"--index={tmp_path / 'index'}", "--device=cpu", "--text", word]
    semantic_search.main(["query", "--keyword_weight=3", *flags])
    assert capsys.readouterr().out.splitlines()[1] == "  score  document [passage]"


def test_the_prompts_of_the_model_are_the_default(index, query, corpus, model, tmp_path):
    encoder = SentenceTransformer(str(model), prompts={"query": "question: ", "document": "text: "})
    encoder.save(str(tmp_path / "prompted"))
    index(corpus, model=tmp_path / "prompted")
    identity = LanceDBIndex(tmp_path / "index").identity
    assert (identity["query_prompt"], identity["document_prompt"]) == ("question: ", "text: ")
    (hits,) = query("a list of numbers", top_k=1)
    vectors = unit(encoder.encode(["question: a list of numbers", f"text: {hits[0]['text']}"], prompt=""))
    assert abs(hits[0]["score"] - vectors[0] @ vectors[1]) < 1e-5


PROMPTED = {"query": "question: ", "document": "", "passage": "text: ", "names": "name: "}
PROMPT_NOTES = [
    ({}, []),
    ({"query_prompt": "name: "}, []),
    ({"query_prompt": "question:"}, ["note: queries get the prompt 'question:'; the model's own is 'question: '."]),
    ({"document_prompt": ""}, ["note: passages get the prompt ''; the model's own is 'text: '."]),
]


@pytest.mark.parametrize("flags, notes", PROMPT_NOTES)
def test_another_prompt_than_the_models_is_said_aloud(corpus, model, tmp_path, capsys, flags, notes):
    """When the index is made, and whenever it is asked: the index knows its prompts."""
    SentenceTransformer(str(model), prompts=PROMPTED).save(str(tmp_path / "prompted"))
    common = [f"--index={tmp_path / 'index'}", "--device=cpu"]
    more = [f"--{name}={value}" for name, value in flags.items()]
    semantic_search.main(["index", *common, f"--model={tmp_path / 'prompted'}", f"--source={corpus}", *more])
    for _ in range(2):
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")] == notes
        semantic_search.main(["query", *common, "--text", "a list"])
    identity = LanceDBIndex(tmp_path / "index").identity
    own = {"query_prompt": "question: ", "document_prompt": "text: "}
    assert {name: identity[name] for name in own} == own | flags


def test_an_encoder_that_learned_no_embeddings_is_said_to_be_that(corpus, model, tmp_path, capsys):
    semantic_search.main(["index", f"--index={tmp_path / 'a'}", f"--model={model}", f"--source={corpus}"])
    assert "not been trained for embeddings" not in capsys.readouterr().err
    encoder = save_search_encoder(tmp_path / "encoder")
    semantic_search.main(["index", f"--index={tmp_path / 'b'}", f"--model={encoder}", f"--source={corpus}"])
    assert (
        f"note: {encoder} is a pretrained encoder, which has not been trained for embeddings" in capsys.readouterr().err
    )


def test_a_thread_that_cuts_documents_does_not_see_where_another_cuts_queries(texts, tmp_path):
    """Truncation is kept in the tokenizer: documents once lost what was behind a passage's length."""
    encoder = PassageEncoder(EmbeddingSettings(save_search_encoder(tmp_path / "encoder"), overlap=2), device="cpu")
    document, query = " ".join(texts), " ".join(texts[:8])
    expected, vector, switching = encoder.split(document), encoder.embed("query", [query]), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as executor:
            work = [(encoder.split, document), (encoder.embed, "query", [query])] * 200
            found = [one.result() for one in [executor.submit(*each) for each in work]]
        assert all(parts == expected for parts in found[::2])
        assert all(np.array_equal(one, vector) for one in found[1::2])
    finally:
        sys.setswitchinterval(switching)


def test_a_source_that_did_not_change_is_read_once(index, corpus, monkeypatch):
    index(corpus)
    readings, read = [], SourceSettings.read_documents
    monkeypatch.setattr(SourceSettings, "read_documents", lambda settings: (readings.append(1), read(settings))[1])
    assert index(corpus)[0] == 0
    # The recipe looks at first whether the source can be read.
    assert len(readings) == 2


def test_another_comparison_than_the_models_is_said_aloud(corpus, model, tmp_path, capsys):
    dot = SentenceTransformer(str(model), device="cpu", similarity_fn_name="dot")
    dot.save(str(tmp_path / "dot"))
    flags = ["--index", str(tmp_path / "index"), "--source", str(corpus), "--device", "cpu"]
    semantic_search.main(["index", *flags, "--model", str(tmp_path / "dot")])
    assert "saved to compare vectors by 'dot', but the index compares them by 'cosine'" in capsys.readouterr().err


def test_an_index_of_a_model_without_prompts_goes_on_with_those_that_it_stored(query, index, corpus, capsys):
    index(corpus, query_prompt="question: ")
    assert query("a list", top_k=1)
    semantic_search.main(["query", f"--index={corpus.parent / 'index'}", "--device=cpu", "--text", "a list"])
    note = "note: queries get the prompt 'question: '; the model was saved without prompts.\n"
    assert note in capsys.readouterr().err


def test_only_what_changed_is_embedded_again(index, query, corpus, texts, tmp_path):
    rows = {f"d{i}": text for i, text in enumerate(texts[:10])}
    index(write_rows(corpus, rows), "--id_column=id")
    before = stored(tmp_path / "index")
    assert index(corpus, "--id_column=id") == [0, 0, 10, 0, 0, 0]
    rows["d3"], rows["new"] = "something else", texts[20]
    del rows["d5"]
    assert index(write_rows(corpus, rows), "--id_column=id") == [2, 2, 8, 1, 0, 0]
    after = stored(tmp_path / "index")
    assert {document for document, _ in after} == rows.keys()
    assert {document: row["text"] for (document, _), row in after.items()} == rows
    for document in rows.keys() - {"d3", "new"}:
        assert after[document, 0] == before[document, 0]
    assert query("something else", top_k=1)[0][0]["document"] == "d3"


def test_a_document_that_got_shorter_leaves_no_passage_behind(index, corpus, texts, tmp_path):
    long = " ".join(texts)
    index(write_rows(corpus, {"a": long, "b": long}), "--id_column=id")
    index(write_rows(corpus, {"a": texts[0], "b": long}), "--id_column=id")
    numbers = {}
    for document, number in stored(tmp_path / "index"):
        numbers.setdefault(document, []).append(number)
    assert numbers["a"] == [0] and sorted(numbers["b"]) == list(range(len(numbers["b"]))) and len(numbers["b"]) > 5


def test_sources_do_not_touch_each_other(index, tmp_path, texts):
    first = write_rows(tmp_path / "it's.jsonl", {"a": texts[0], "b": texts[1]})
    second = write_rows(tmp_path / "second.jsonl", {"a": texts[2], "c": texts[1]})
    assert index(first, "--id_column=id") == [2, 2, 0, 0, 0, 0]
    assert index(second, "--id_column=id") == [2, 2, 0, 0, 0, 0]
    write_rows(first, {"a": texts[0]})
    assert index(first, "--id_column=id") == [0, 0, 1, 1, 0, 0]
    rows = LanceDBIndex(tmp_path / "index").table.to_arrow().to_pylist()
    assert {(row["source"], row["document"], row["text"]) for row in rows} == {
        (str(first), "a", texts[0]), (str(second), "a", texts[2]), (str(second), "c", texts[1])
    }  # fmt: skip
    # A moved source keeps its place under a name of its own.
    assert index(first, "--id_column=id", name="mine") == [1, 1, 0, 0, 0, 0]
    assert index(second, "--id_column=id", name="mine") == [2, 2, 0, 0, 0, 0]


def test_a_source_can_be_removed_by_its_name(index, query, corpus, model, tmp_path, texts, capsys):
    moved = write_rows(tmp_path / "moved.jsonl", {"a": texts[0], "b": texts[1]})
    index(moved)
    settings = ["--index", str(tmp_path / "index"), "--device", "cpu"]
    semantic_search.main(["index", *settings, "--model", str(model), "--source", str(corpus)])
    assert capsys.readouterr().out.endswith(f"also in {tmp_path / 'index'}: {moved}\n")
    found = {hit["source"] for hit in query(texts[0], top_k=100)[0]}
    assert found == {str(moved), str(corpus)}
    with pytest.raises(VectorIndexError, match=f"holds no source 'gone'; it holds {corpus}, {moved}"):
        semantic_search.main(["remove", *settings[:2], "--name", "gone"])
    semantic_search.main(["remove", *settings[:2], "--name", str(moved)])
    assert "2 documents removed" in capsys.readouterr().out
    assert {hit["source"] for hit in query(texts[0], top_k=100)[0]} == {str(corpus)}


def test_rows_without_ids_are_told_apart_by_their_text(index, corpus, texts, tmp_path):
    rows = [texts[0], texts[1], None, texts[0], " \n", texts[2]]
    Dataset.from_dict({"body": rows}).to_parquet(tmp_path / "rows.parquet")
    assert index(tmp_path / "rows.parquet", column="body") == [3, 3, 0, 0, 1, 2]
    # One more at the front moves all others.
    Dataset.from_dict({"body": [texts[4], *rows[1:]]}).to_parquet(tmp_path / "rows.parquet")
    assert index(tmp_path / "rows.parquet", column="body") == [1, 1, 3, 0, 0, 2]


def test_an_id_may_repeat_with_the_same_text_and_with_none(index, tmp_path, texts):
    rows = {"id": [7, 7, 8, 8], "text": [None, texts[0], texts[1], texts[1]]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    assert index(tmp_path / "rows.parquet", "--id_column=id") == [2, 2, 0, 0, 1, 1]
    assert stored(tmp_path / "index").keys() == {("7", 0), ("8", 0)}


def test_files_are_documents(index, query, texts, tmp_path):
    docs = tmp_path / "docs"
    (docs / "deep").mkdir(parents=True)
    (docs / "one.md").write_text(f"# One\n\n{texts[0]}\n")
    (docs / "deep" / "two.txt").write_text(texts[1])
    (docs / "empty.md").write_text("")
    assert index(docs) == [2, 2, 0, 0, 0, 1]
    assert query(texts[1], top_k=1)[0][0] == {
        "score": pytest.approx(1, abs=1e-5),
        "source": str(docs),
        "document": str(docs / "deep" / "two.txt"),
        "number": 0,
        "text": texts[1],
    }
    (docs / "deep" / "two.txt").unlink()
    assert index(docs) == [0, 0, 1, 1, 0, 1]
    assert index(docs / "*.md") == [1, 1, 0, 0, 0, 1]


def test_long_documents_are_passages_that_the_model_reads_whole(index, query, texts, tmp_path, encoder):
    long = ". ".join(texts)
    (tmp_path / "long.txt").write_text(long)
    flags = ["--document_prompt=text: ", "--passage_tokens=40", "--overlap=10"]
    (_, count, *_) = index(tmp_path / "long.txt", *flags)
    rows = [row for _, row in sorted(stored(tmp_path / "index").items())]
    assert count == len(rows) > 10
    tokens = [len(encoder.tokenizer(f"text: {row['text']}")["input_ids"]) for row in rows]
    assert max(tokens) <= 40 and min(tokens[:-1]) > 30
    expected = unit(encoder.encode([f"text: {row['text']}" for row in rows]))
    assert np.abs(np.array([row["vector"] for row in rows]) - expected).max() < 1e-5
    hit = query(f"text: {rows[7]['text']}", top_k=1)[0][0]
    assert (hit["number"], hit["text"]) == (7, rows[7]["text"]) and hit["score"] > 1 - 1e-5


def tokens_of(encoder, text: str) -> int:
    return len(encoder.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("overlap", [0, 5, 19])
def test_passages_cover_the_text_and_overlap_at_words(encoder, texts, overlap):
    text = " ".join(f"{i} {part}" for i, part in enumerate(texts[:30])) + " "
    # No word of more than 7 tokens, and none of `*****`, which makes it unclear where a passage begins.
    text = re.sub(r"\*+", "", re.sub(r"\w{8,}", "long", text))
    passages = split_passages(text, encoder.tokenizer, 20, overlap)
    assert len(passages) > 15
    start, end, overlaps = 0, 0, []
    for passage in passages:
        assert tokens_of(encoder, passage) <= 20
        start = text.index(passage, start + bool(end))
        assert not text[end:start].strip(), passage
        # At a word: letters do not meet on both sides of a cut.
        assert not re.search(r"[^\W_]{2}", text[max(0, start - 1) : start + 1])
        if end:
            overlaps.append(tokens_of(encoder, text[start:end]))
        end = start + len(passage)
    assert end == len(text)
    # Up to the beginning of a word.
    assert max(overlaps) <= overlap + 7
    assert overlap == 19 or min(overlaps) >= overlap


def test_passages_of_tokenizers_like_robertas_fit(texts):
    """Without the space before it, a word is more tokens. Their offsets leave the space out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for overlap in (0, 4):
        passages = split_passages(" ".join(texts), tokenizer, 12, overlap)
        assert max(len(tokenizer(passage).input_ids) for passage in passages) == 12 and len(passages) > 15
    assert "".join(split_passages(" ".join(texts), tokenizer, 12, 0)) == " ".join(texts)


def test_a_word_that_no_overlap_leaves_room_for_brings_no_repetition(encoder, texts):
    """Else one passage for every word start before it, each a part of the one before."""
    long = "x" * 18
    assert len(encoder.tokenizer(long, add_special_tokens=False)["input_ids"]) > 20 - 8
    passages = split_passages(f"{texts[0]} {long} {texts[1]}", encoder.tokenizer, 20, 8)
    assert not [one for one, other in zip(passages[1:], passages) if one in other]


def test_short_texts_stay_and_longer_words_are_cut(encoder, texts):
    assert split_passages(" short text\n", encoder.tokenizer, 20, 5) == [" short text\n"]
    word = "".join(f"{i:02d}" for i in range(45))
    passages = split_passages(f"{texts[0]} {word} {texts[1]}", encoder.tokenizer, 20, 5)
    inside = [passage for passage in passages if passage in word]
    assert len(inside) > 1 and "".join(inside) == word[: len("".join(inside))]
    assert all(tokens_of(encoder, passage) <= 20 for passage in passages if passage not in inside)
    for overlap in (20, -1):
        with pytest.raises(
            ValueError, match=f"`overlap` is {overlap} tokens; it must be 0 or more and below the size of a passage, 20"
        ):
            split_passages("text", encoder.tokenizer, 20, overlap)


def test_another_model_or_other_settings_are_refused_by_name(index, query, corpus, model, texts, tmp_path):
    index(corpus)
    other = SentenceTransformer(str(model))
    with torch.no_grad():
        next(other.parameters())[-1, -1] += 1e-3
    other.save(str(tmp_path / "other"))
    with pytest.raises(SettingsMismatch, match=f"(?s)fingerprint: '.*Use {model} and") as one:
        index(corpus, model=tmp_path / "other")
    assert str(one.value).count(" there, ") == 1
    with pytest.raises(SettingsMismatch, match="fingerprint: '"):
        query("text", model=tmp_path / "other")
    transformer, _ = SentenceTransformer(str(model))
    SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="cls")]).save(str(tmp_path / "cls"))
    for run in (lambda **flags: index(corpus, **flags), lambda **flags: query("text", **flags)):
        with pytest.raises(SettingsMismatch, match=r"pooling: \['mean'\] there, \['cls'\] now"):
            run(model=tmp_path / "cls")
    for name, value in (("passage_tokens", 32), ("overlap", 3), ("truncate_dim", 8), ("query_prompt", "question: ")):
        with pytest.raises(SettingsMismatch, match=f"(?s){name}: .* there, {value!r} now"):
            index(corpus, **{name: value})
    with pytest.raises(SettingsMismatch, match="dtype: 'float32' there, 'bfloat16' now"):
        index(corpus, dtype="bfloat16")
    assert len(stored(tmp_path / "index")) == 60


def test_vectors_that_are_not_finite_are_an_error(index, query, corpus, model, tmp_path):
    broken = SentenceTransformer(str(model))
    with torch.no_grad():
        # Finite weights, since others are refused when they are loaded.
        broken.get_parameter("0.model.layer_norm.weight").mul_(torch.linspace(3e38, 3.3e38, 32))
    broken.save(str(tmp_path / "broken"))
    with pytest.raises(FloatingPointError, match="60 of 60 embeddings are not finite, the first that of 'The"):
        index(corpus, model=tmp_path / "broken")
    assert stored(tmp_path / "index") == {}


def test_a_model_with_several_ways_of_pooling_is_the_same_next_time(index, corpus, model, tmp_path):
    transformer, _ = SentenceTransformer(str(model))
    both = SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode=["cls", "mean"])])
    both.save(str(tmp_path / "both"))
    assert index(corpus, model=tmp_path / "both")[0] == 60
    assert index(corpus, model=tmp_path / "both")[0] == 0
    assert LanceDBIndex(tmp_path / "index").identity["dimension"] == 64


def test_the_model_may_move_but_not_vanish(index, query, corpus, model, tmp_path):
    SentenceTransformer(str(model)).save(str(tmp_path / "here"))
    index(corpus, model=tmp_path / "here")
    expected = query("text")
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(VectorIndexError, match="here of the index .* is gone: name its new folder with `--model`"):
        query("text")
    assert query("text", model=tmp_path / "there") == expected
    assert index(corpus, model=tmp_path / "there") == [0, 0, 60, 0, 0, 0]


def test_parts_of_a_hub_dataset_are_sources_of_their_own():
    """Under one name, all documents of the first would be deleted as gone when the second is indexed."""
    names = [
        SourceSettings("owner/wiki", **part).name_in_index
        for part in ({}, {"subset": "en"}, {"subset": "de"}, {"subset": "de", "split": "test"}, {"split": "test"})
    ]
    assert names == ["owner/wiki", "owner/wiki:en", "owner/wiki:de", "owner/wiki:de:test", "owner/wiki:test"]
    assert SourceSettings("owner/wiki", subset="en", name="mine").name_in_index == "mine"


def test_a_model_with_its_own_code_needs_leave_to_run_it(index, query, corpus, encoder, tmp_path):
    save_with_its_own_code(tmp_path / "own", encoder.tokenizer)
    with pytest.raises(ValueError, match="trust_remote_code"):
        index(corpus, model=tmp_path / "own")
    assert index(corpus, model=tmp_path / "own", trust_remote_code=True)[0] == 60
    with pytest.raises(ValueError, match="trust_remote_code"):
        query("text")
    assert len(query("text", trust_remote_code=True, top_k=3)[0]) == 3


def test_a_query_that_is_cut_is_said_to_be(index, corpus, tmp_path, capsys):
    index(corpus, query_prompt="and the ")
    # One token a word, two of the prompt, and the two at the ends.
    for words in (60, 61):
        text = " ".join(["of"] * words)
        semantic_search.main(["query", f"--index={tmp_path / 'index'}", "--device=cpu", "--text", "short", text])
        warned = capsys.readouterr().err
        assert ("warning" in warned) is (words == 61)
    assert "query 'of of" in warned and "has 65 tokens with its prompt, but the model reads only 64" in warned


@pytest.mark.parametrize("manifest", [None, b"", b"half"])
def test_a_half_made_index_is_no_index(index, query, corpus, tmp_path, manifest):
    table = tmp_path / "index" / "passages.lance"
    table.mkdir(parents=True)
    if manifest is not None:
        open_index(str(tmp_path / "index")).create({"dimension": 32})
        next(table.glob("_versions/*.manifest")).write_bytes(manifest)
    with pytest.raises(VectorIndexError, match="There is no index"):
        query("text")
    assert index(corpus)[0] == 60 and query("text", top_k=2)[0][1]["score"] <= 1


def test_a_damaged_index_is_neither_read_nor_made_anew(index, query, corpus, tmp_path):
    index(corpus)
    for manifest in (tmp_path / "index" / "passages.lance" / "_versions").iterdir():
        manifest.write_bytes(b"")
    for run in (lambda: query("text"), lambda: index(corpus)):
        with pytest.raises(VectorIndexError, match="is damaged and cannot be read(?s:.)*delete the folder"):
            run()


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"source": "/nowhere/*.md"}, FileNotFoundError, "matches no file"),
        ({"column": "body"}, ValueError, "has no column 'body'; it has 'id', 'text'"),
        ({"id_column": "key"}, ValueError, "has no column 'key'; it has 'id', 'text'"),
        ({"passage_tokens": 65}, ValueError, "`passage_tokens` is 65; the model reads 64"),
        (
            {"passage_tokens": 20, "overlap": 18},
            ValueError,
            "is 18 tokens; it must be 0 or more and below .* 18 tokens",
        ),
        ({"truncate_dim": 33}, ValueError, "`truncate_dim` is 33; the model has only 32 dimensions"),
        ({"colunm": "text"}, ValueError, "did you mean '--column'"),
    ],
)
def test_bad_settings_are_refused_before_an_index_is_made(index, corpus, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        index(**({"source": corpus} | changes))
    assert not (tmp_path / "index").exists()


def test_bad_documents_are_refused_before_an_index_is_made(index, tmp_path, texts):
    for rows, flags, message in [
        ({"id": ["a", "b"], "text": ["", None]}, [], "all of its 2 documents are empty"),
        ({"id": ["a", "a"], "text": texts[:2]}, ["--id_column=id"], "id 'a' belongs to two texts: name an `id_column`"),
        ({"id": ["a", None], "text": texts[:2]}, ["--id_column=id"], "rows.parquet, row 1: 'id' is None"),
        ({"id": ["a", "b"], "text": [["a"], ["b"]]}, [], "row 0: 'text' holds list"),
    ]:
        Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
        with pytest.raises(ValueError, match=message):
            index(tmp_path / "rows.parquet", *flags)
    (tmp_path / "a.md").write_text("é", encoding="utf-8")
    (tmp_path / "latin.md").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.md, line 1 is not UTF-8 .*: save the file as UTF-8"):
        index(tmp_path / "*.md")
    assert not (tmp_path / "index").exists()


def test_bad_queries_and_indexes_are_refused(index, query, corpus, tmp_path):
    with pytest.raises(VectorIndexError, match="There is no index .*: make it with"):
        query("text")
    assert not (tmp_path / "index").exists()
    with pytest.raises(VectorIndexError, match="corpus.jsonl is a file; an index is a folder"):
        query("text", index=corpus)
    with pytest.raises(ValueError, match="`text` holds an empty query"):
        query("text", " ")
    import lancedb

    lancedb.connect(tmp_path / "other").create_table("passages", [{"a": 1}])
    with pytest.raises(VectorIndexError, match="holds a table of another program"):
        index(corpus, index=tmp_path / "other")


def test_the_table_for_people(index, corpus, texts, tmp_path, capsys):
    index(corpus, "--id_column=id")
    semantic_search.main(["query", f"--index={tmp_path / 'index'}", "--device=cpu", "--top_k=2", "--text", texts[3]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[2] == " 1.0000  d21 [0]" and lines[3].strip() == texts[3][:110].strip()
    with pytest.raises(SystemExit):
        semantic_search.main(["search"])
    assert "choose from" in capsys.readouterr().err


def test_a_client_that_is_not_installed_is_named_with_its_extra(monkeypatch, tmp_path):
    for module, extra, flags in (("lancedb", "search", ()), ("weaviate", "weaviate", ("http://localhost:1",))):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, f"neobert_hf.search.{module}_index", raising=False)
        with pytest.raises(ImportError, match=rf"{module} is not installed: pip install 'neobert_hf\[{extra}\]'"):
            open_index(str(tmp_path / "index"), *flags)


def test_the_command_line_with_weaviate(index, corpus, texts, tmp_path, model, monkeypatch, capsys):
    """Against a stand-in that speaks the server's protocols; no real server has run."""
    pytest.importorskip("weaviate")
    from tests.helpers.weaviate_standin import FakeWeaviateServer

    monkeypatch.setattr("weaviate.connect.v4.PYPI_PACKAGE_URL", "http://127.0.0.1:9/")
    with FakeWeaviateServer() as server:
        location = {"index": "Docs", "weaviate_url": server.url, "weaviate_grpc_port": server.grpc_port}
        rows = {f"d{i}": text for i, text in enumerate(texts)} | {"long": " ".join(texts[:20])}
        first = index(write_rows(corpus, rows), "--id_column=id", **location)
        assert first[0] == 61 and first[1] == len(server.objects["Docs"]) > 65
        rows["long"] = "short now"
        del rows["d5"]
        assert index(write_rows(corpus, rows), "--id_column=id", **location) == [1, 1, 59, 1, 0, 0]
        # What an interruption leaves of a document is removed with it.
        rows["long"] = " ".join(texts[:20])
        index(write_rows(corpus, rows), "--id_column=id", **location)
        key = next(key for key, (one, _) in server.objects["Docs"].items() if one["document"] == "long")
        del server.objects["Docs"][key], rows["long"]
        assert index(write_rows(corpus, rows), "--id_column=id", **location) == [0, 0, 59, 1, 0, 0]
        assert len(server.objects["Docs"]) == 59
        index(corpus, "--id_column=id")
        found = []
        for flags in (location, {"index": tmp_path / "index"}):
            names = [f"--{key}={value}" for key, value in flags.items()]
            semantic_search.main(
                ["query", *names, "--device=cpu", "--json", "--top_k=8", "--text", "a list of numbers"]
            )
            found.append(json.loads(capsys.readouterr().out)["hits"])
        for one, two in zip(*found, strict=True):
            assert abs(one.pop("score") - two.pop("score")) < 1e-5 and one == two
        with pytest.raises(SettingsMismatch, match="overlap: 32 there, 3 now"):
            index(corpus, "--id_column=id", overlap=3, **location)


def test_an_index_is_no_document(index, texts, tmp_path):
    """Its files would be read with the documents the next time, and every index of that folder be refused."""
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.md").write_text(texts[0])
    for folder in (documents, documents / "index"):
        with pytest.raises(ValueError, match="`source`"):
            index(documents, index=folder)
    assert [file.name for file in documents.iterdir()] == ["a.md"]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "rows.csv").write_text("text\n")
    with pytest.raises(VectorIndexError, match="used holds rows.csv, and no index: choose a folder only for the index"):
        index(documents, index=tmp_path / "used")
    assert [file.name for file in (tmp_path / "used").iterdir()] == ["rows.csv"]

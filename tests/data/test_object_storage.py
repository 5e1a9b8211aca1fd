"""Preparing from and to `s3://`, and training from there, against a server on this machine."""

import json
from pathlib import Path
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neobert_hf.data.duplicates import deduplicate
from neobert_hf.data.parts import Part, do_parts
from neobert_hf.data.shards import read_manifest
from neobert_hf.embeddings.corpus import embed
from tests.helpers.examples import load_example, to_flags
from tests.helpers.models import ROOT
from tests.helpers.pretraining_runs import assert_same_weights, run, small_flags


pytest.importorskip("s3fs", reason="pip install 's3fs' 'moto[s3]' flask flask-cors")
server, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")


@pytest.fixture(scope="module")
def bucket():
    """The URL of an empty bucket."""
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        # The server's buckets outlive it.
        name = f"bucket-{uuid4().hex}"
        fsspec.filesystem("s3").mkdir(name)
        yield f"s3://{name}"
        fsspec.filesystem("s3").clear_instance_cache()
    moto.stop()


def prepare(bucket: str, corpus, output: str) -> None:
    fsspec.filesystem("s3").put(str(corpus / "train.jsonl"), f"{bucket}/texts/train.jsonl")
    flags = {"source": f"{bucket}/texts/*.jsonl", "tokenizer": corpus / "tokenizer", "documents_per_shard": 100}
    load_example("prepare_data").main(to_flags(flags | {"output_dir": output}))


@pytest.fixture(scope="module")
def prepared_there(bucket, corpus) -> str:
    prepare(bucket, corpus, f"{bucket}/prepared")
    return f"{bucket}/prepared"


def files_in(url: str) -> dict[str, bytes]:
    found = fsspec.get_mapper(url)
    return {name: found[name] for name in found}


def test_shards_at_a_url_are_those_of_a_disk(prepared_there, prepared):
    there, here = files_in(prepared_there), files_in(str(prepared / "train"))
    assert there.keys() == here.keys()
    for name in there.keys() - {"manifest.json"}:
        assert there[name] == here[name], name
    first, second = read_manifest(prepared_there), read_manifest(prepared / "train")
    assert (first.shards, first.counts) == (second.shards, second.counts)


def test_tables_are_written_and_what_other_machines_wrote_is_seen(bucket):
    """A client of S3 keeps what it has once listed."""
    plan, table = [Part(number, "unused", 10 * number, 10) for number in range(2)], pa.table({"text": ["a", "b"]})
    (record,) = do_parts(plan[:1], lambda part: (table, {}), f"{bucket}/parts", {})
    with fsspec.open(f"{bucket}/parts/part-00000.parquet") as file:
        assert pq.read_table(file) == table
    fsspec.filesystem("s3").ls(f"{bucket}/parts")
    other = json.dumps(record | {"number": 1, "first_row": 10})
    boto3.client("s3").put_object(Bucket=bucket.removeprefix("s3://"), Key="parts/part-00001.json", Body=other)
    assert [each["number"] for each in do_parts(plan, None, f"{bucket}/parts", {})] == [0, 1]


def deduplicate_there(bucket: str, corpus, output: str) -> None:
    deduplicate(source=str(corpus / "train.jsonl"), output_dir=output)


def embed_there(bucket: str, corpus, output: str) -> None:
    embed(source=str(corpus / "train.jsonl"), model=str(ROOT / "models" / "distilled"), output_dir=output)


@pytest.mark.parametrize(
    ("work", "file"),
    [
        (prepare, "shard-00000.arrow"),
        (prepare, "tokenizer/tokenizer.json"),
        (deduplicate_there, "texts/part-00000.parquet"),
        (embed_there, "part-00000.parquet"),
    ],
)
def test_what_somebody_else_wrote_is_not_replaced(bucket, corpus, work, file):
    folder = f"{bucket}/theirs-{work.__name__}-{Path(file).stem}"
    fsspec.filesystem("s3").pipe(f"{folder}/{file}", b"theirs")
    with pytest.raises(ValueError, match=f"{folder.split('/')[-1]}/{file.split('/')[0]} was not written by"):
        work(bucket, corpus, folder)
    assert files_in(folder) == {file: b"theirs"}


def test_training_from_a_url_ends_with_the_same_bits(prepared_there, prepared, tmp_path, monkeypatch):
    """Loader workers copy the shards to this machine, when a group with them begins."""
    monkeypatch.setenv("NEOBERT_HF_CACHE", str(tmp_path / "cache"))
    changes = {"max_steps": 2, "dataloader_num_workers": 1}
    run(small_flags(prepared, tmp_path / "disk", **changes))
    run(small_flags(prepared, tmp_path / "url", train_data=prepared_there, **changes))
    assert_same_weights(tmp_path / "url", tmp_path / "disk")
    assert 0 < len(list((tmp_path / "cache" / "copies").glob("*.arrow"))) < 5

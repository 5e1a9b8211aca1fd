"""On a Ray cluster of two nodes the recipes for large corpora write the files of one process, whatever is killed."""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.examples import load_example, to_flags
from tests.helpers.pretraining_runs import start
from tests.helpers.search_encoder import save_search_encoder


# Beside other work a node needs more than Ray's 30 s to start, and workers that are nice to all others wait long. Ray
# reads this when it is imported.
os.environ |= {"RAY_raylet_start_wait_time_s": "300", "RAY_worker_niceness": "0"}
ray = pytest.importorskip("ray", reason="pip install 'neobert_hf[scale]'")


@pytest.fixture(scope="module")
def material(corpus, tmp_path_factory) -> Path:
    """Texts in two files, some of them twice, and an encoder."""
    folder = tmp_path_factory.mktemp("material")
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    for number, some in enumerate((texts[:300], texts[250:])):
        pq.write_table(pa.table({"text": some}), folder / f"{number}.parquet", row_group_size=70)
    save_search_encoder(folder / "encoder")
    return folder


@contextmanager
def cluster_of(*cpus: int):
    """A cluster with a node of so many CPUs each, all on this machine. Its workers stay for all recipes of a test."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    for number in cpus[1:]:
        cluster.add_node(num_cpus=number)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def preparing(material: Path, corpus: Path, rows: int) -> dict:
    source, tokenizer = material / "*.parquet", corpus / "tokenizer"
    return {"source": source, "tokenizer": tokenizer, "max_length": 128, "documents_per_shard": rows}


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.timeout(600)  # A hang fails.
def test_shards_removals_and_vectors_are_those_of_one_process(material, corpus, tmp_path, capsys):
    large = {"source": material / "*.parquet", "rows_per_part": 64}
    recipes = {
        "prepare_data": preparing(material, corpus, 64),
        "deduplicate": large | {"bands": 4, "rows_per_band": 4},
        "embed": large | {"model": material / "encoder", "batch_size": 2},
    }

    def run_recipes(output: Path, *engine: str) -> dict[str, bytes]:
        for name, settings in recipes.items():
            load_example(name).main([*to_flags(settings | {"output_dir": output / name}), *engine])
        return content(output)

    expected = run_recipes(tmp_path / "one")
    assert " exact, " in capsys.readouterr().out and len(expected) > 20
    with cluster_of(1, 1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        found = run_recipes(tmp_path / "ray", "--ray", cluster.address)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def kill_worker(cluster) -> None:
    """Kill one that is at work."""
    raylets = [raylet.process.pid for node in cluster.list_all_nodes() for raylet in node.all_processes["raylet"]]
    while True:
        for worker in (child for raylet in raylets for child in psutil.Process(raylet).children(recursive=True)):
            try:
                # So Ray names a worker while it does a part, see `RayTasks`. A node ends with any of its own processes.
                if "".join(worker.cmdline()).startswith("ray::<lambda>"):
                    return worker.kill()
            except psutil.NoSuchProcess:
                pass


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_nodes_and_drivers_are_killed_and_nothing_is_lost_or_done_twice(material, corpus, tmp_path):
    settings = preparing(material, corpus, 2)
    load_example("prepare_data").main(to_flags(settings | {"output_dir": tmp_path / "one"}))
    output, done = tmp_path / "ray", {}

    def wait_for(parts: int) -> None:
        while len(list(output.glob("parts/part-*.json"))) < parts:
            driver.check_running()

    def kill_driver() -> None:
        driver.kill()
        numbers = [record.stem.removeprefix("part-") for record in output.glob("parts/part-*.json")]
        done.update({file: file.stat().st_mtime_ns for file in (output / f"shard-{n}.arrow" for n in numbers)})

    with cluster_of(1, 1, 1) as cluster:
        flags = to_flags(settings | {"output_dir": output, "ray": cluster.address})
        driver = start(flags, script="prepare_data")
        for parts in (10, 30):
            wait_for(parts)
            kill_worker(cluster)
        wait_for(50)
        kill_driver()

        driver = start(flags, script="prepare_data")
        wait_for(80)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        wait_for(110)
        kill_driver()

        began = time.time_ns()
        driver = start(flags, script="prepare_data")
        wait_for(140)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert "275 shards" in driver.finish()
    assert content(output) == content(tmp_path / "one")
    assert len(done) >= 110 and max(done.values()) < began
    assert done == {file: file.stat().st_mtime_ns for file in done}

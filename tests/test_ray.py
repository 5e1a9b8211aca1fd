"""On a Ray cluster of two nodes the recipes for large corpora write the files of one process."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.examples import load_example
from tests.helpers.pretraining_runs import to_flags
from tests.helpers.search_encoder import save_search_encoder


# Beside other work a node needs more than Ray's 30 s to start, and workers that are nice to all others wait long. Ray
# reads this when it is imported.
os.environ |= {"RAY_raylet_start_wait_time_s": "300", "RAY_worker_niceness": "0"}
ray = pytest.importorskip("ray", reason="pip install 'neobert_hf[scale]'")


@pytest.fixture
def recipes(corpus, tmp_path) -> dict[str, dict]:
    """The settings of each recipe: texts in two files, some of them twice, and an encoder."""
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    for number, some in enumerate((texts[:300], texts[250:])):
        pq.write_table(pa.table({"text": some}), tmp_path / f"{number}.parquet", row_group_size=70)
    save_search_encoder(tmp_path / "encoder")
    source = {"source": tmp_path / "*.parquet"}
    return {
        "prepare_data": source | {"tokenizer": corpus / "tokenizer", "max_length": 128, "documents_per_shard": 64},
        "deduplicate": source | {"rows_per_part": 64, "bands": 4, "rows_per_band": 4},
        "embed": source | {"rows_per_part": 64, "model": tmp_path / "encoder", "batch_size": 2},
    }


@pytest.fixture
def cluster():
    """Two nodes of one CPU on this machine, and a connection to them. Its workers stay for all recipes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.timeout(600)  # A hang fails.
def test_shards_removals_and_vectors_are_those_of_one_process(recipes, cluster, tmp_path, capsys):
    def run_recipes(output: Path, **engine) -> dict[str, bytes]:
        for name, settings in recipes.items():
            load_example(name).main(to_flags(settings | {"output_dir": output / name} | engine))
        return {str(file.relative_to(output)): file.read_bytes() for file in output.rglob("*") if file.is_file()}

    expected = run_recipes(tmp_path / "one")
    assert " exact, " in capsys.readouterr().out and len(expected) > 20
    found = run_recipes(tmp_path / "ray", ray=cluster.address)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []

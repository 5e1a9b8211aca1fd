"""Turns the texts of a corpus into vectors: one process, every GPU of a machine, or a Ray cluster.

    python examples/embed.py --model runs/embeddings/model --source 'corpus/*.parquet' --output_dir vectors
    python examples/embed.py --model runs/embeddings/model --source 's3://bucket/*.parquet' \\
        --output_dir s3://bucket/vectors --ray auto --gpus true --dtype bfloat16

Sources are those of `deduplicate.py`. Each part of the corpus becomes a Parquet file with the column `vector`, beside
`id_column` if there is one. An interrupted run goes on; the vectors are the same, to the bit, for any number of workers
with the same number of threads, and for parts of any size.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from neobert_hf.common.files import absolute
from neobert_hf.common.fingerprints import model_fingerprint
from neobert_hf.common.run import check_inputs, identity_of, mark_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.parts import do_parts, plan_parts, sizes_of
from neobert_hf.embeddings.corpus import CorpusSettings, embed_part


@dataclass
class EmbedArguments:
    """Where texts come from, where vectors go, and who computes them."""

    source: list[str] = field(metadata={"help": "files, patterns, folders, URLs, Hub ids", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "folder or URL for the vectors"})
    rows_per_part: int = field(
        default=8192, metadata={"help": "rows that a worker does at a time, in whole 32 batches"}
    )
    workers: int = field(default=1, metadata={"help": "processes on this machine; with GPUs, one for each"})
    ray: str | None = field(default=None, metadata={"help": "auto, or the address of a Ray cluster"})
    gpus: bool = field(default=False, metadata={"help": "with ray: each worker has a GPU"})


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and a plan of parts
    settings, corpus = parse_config(EmbedArguments, CorpusSettings, args=args)
    if "://" not in settings.output_dir:
        check_inputs(settings.output_dir, ["part-*"], {"model": corpus.model}, {"source": settings.source})
        mark_folder(settings.output_dir, "embed.py", ["part-*"])
    plan = plan_parts(settings.source, math.ceil(settings.rows_per_part / corpus.sorted_rows) * corpus.sorted_rows)
    if Path(corpus.model).is_dir():
        # Workers may run in other folders.
        corpus.model = absolute(corpus.model)

    # 2. Vectors of each part; what they depend on is stored with them
    same = identity_of(corpus, model=model_fingerprint(corpus.model), sizes=sizes_of(plan))
    engine = {"workers": settings.workers, "ray": settings.ray, "gpus": settings.gpus}
    records = do_parts(plan, partial(embed_part, settings=corpus), settings.output_dir, same, **engine)
    rows = sum(record["rows"] for record in records)
    print(f"{rows:,} vectors of {records[0]['dimensions']} numbers in {settings.output_dir}", flush=True)


if __name__ == "__main__":
    run_script(main)

"""Leaves out of a corpus what occurs twice, nearly twice, or in evaluation texts.

    python examples/deduplicate.py --source 'corpus/*.parquet' --output_dir data/clean --workers 8
    python examples/prepare_data.py --source 'data/clean/texts/*.parquet' --tokenizer bert-base-uncased \
        --output_dir data/train

Sources are Parquet or JSON lines, as files, folders or URLs of fsspec (`hf://`, `s3://`), or ids of Hub datasets. CSV
and text files are read from the beginning for each part, which suits small corpora. With `--ray auto` the CPUs of a
Ray cluster are the workers. The same rows stay for any number of workers, and an interrupted run goes on.
`texts/removed.json` has how many rows were removed, and why; `prepare_data.py` takes it over into its manifest.
"""

import json
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from neobert_hf.common.files import absolute, write_whole
from neobert_hf.common.fingerprints import fingerprint
from neobert_hf.common.run import check_inputs, identity_of, mark_folder
from neobert_hf.common.script_errors import run_script
from neobert_hf.common.settings import parse_config
from neobert_hf.data.duplicates import STATES, DuplicateSettings, find_duplicates, keep_rows, runs_of, sign_part
from neobert_hf.data.parts import do_parts, plan_parts, read_texts, sizes_of
from neobert_hf.data.preparing import REMOVED


WRITES = ("signatures", "texts")


@dataclass(kw_only=True)
class DeduplicateArguments(DuplicateSettings):
    source: list[str] = field(metadata={"help": "files, patterns, folders, URLs, Hub ids", "path": "or Hub id"})
    output_dir: str = field(metadata={"help": "where signatures and the texts that stay are written"})
    evaluation: list[str] = field(
        default_factory=list,
        metadata={"help": "files whose texts must not be trained on, with the same column", "path": True},
    )
    rows_per_part: int = field(default=20_000, metadata={"help": "rows that a worker does at a time"})
    workers: int = field(default=1, metadata={"help": "processes on this machine"})
    ray: str | None = field(default=None, metadata={"help": "auto, or the address of a Ray cluster"})


def main(args: list[str] | None = None) -> None:
    # 1. Settings, and a plan of parts
    (settings,) = parse_config(DeduplicateArguments, args=args)
    if "://" not in settings.output_dir:
        sources = {"source": settings.source, "evaluation": settings.evaluation}
        check_inputs(settings.output_dir, WRITES, {}, sources)
        mark_folder(settings.output_dir, "deduplicate.py", WRITES)
    plan = plan_parts(settings.source, settings.rows_per_part)
    engine = {"workers": settings.workers, "ray": settings.ray}

    # 2. Runs of words in the evaluation texts
    parts = plan_parts(settings.evaluation, settings.rows_per_part)
    evaluation = runs_of(text for part in parts for text in read_texts(part, settings.column) if text)

    # 3. A signature of every row
    of_rows = DuplicateSettings(settings.column, settings.bands, settings.rows_per_band)
    same = identity_of(of_rows, evaluation=fingerprint(evaluation), sizes=sizes_of(plan))
    output = absolute(settings.output_dir)
    signatures, texts = f"{output}/signatures", f"{output}/texts"
    do_parts(plan, partial(sign_part, settings=of_rows, evaluation=evaluation), signatures, same, **engine)

    # 4. Which rows stay: of each group of duplicates the first, by file and row
    states = find_duplicates([part.path(signatures, "parquet") for part in plan], settings.bands)
    file = f"{signatures}/states.bin"
    write_whole(file, lambda handle: handle.write(states.tobytes()))

    # 5. Their texts
    starts = np.cumsum([0, *(part.rows for part in plan)])
    keep = partial(keep_rows, column=settings.column, states=file, starts=starts)
    records = do_parts(plan, keep, texts, same, **engine)
    counts = {state: sum(record[state] for record in records) for state in STATES}
    write_whole(f"{texts}/{REMOVED}", lambda handle: handle.write(json.dumps(counts).encode()))
    print(", ".join(f"{count:,} {state}" for state, count in counts.items()), f"of {starts[-1]:,} rows", flush=True)


if __name__ == "__main__":
    run_script(main)

"""Work that is larger than a machine: parts of tables, done by any number of workers in any order.

A part is some rows of a file. The plan of parts follows from the sources and `rows_per_part` alone, so it is the same
on every machine. A worker turns a part into a table, which is written to `part-00012.parquet` (or it writes a file of
its own), and then a record of it, `part-00012.json`. What is done is what has a record: an interrupted run goes on with
the parts that have none, whether it ran in one process, in several, or on a Ray cluster. No engine has to remember
anything, so all may be killed at any time.

Sources and outputs are paths or URLs of fsspec: `data/*.parquet`, `hf://datasets/...`, `s3://bucket/...`.
"""

import glob
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from tqdm.auto import tqdm

from neobert_hf.common.files import absolute, folder_lock, write_whole
from neobert_hf.common.run import check_same_identity
from neobert_hf.data.rows import Row
from neobert_hf.data.sources import (
    can_begin_anywhere,
    check_local,
    count_rows,
    hub_files,
    is_table,
    local_files,
    read_from,
)


# Files that are read at a time to plan: a Hub or an object store takes a moment to answer.
ASKED_TOGETHER = 16


@dataclass(frozen=True)
class Part:
    """Some rows of a file, or of several files that are read as one: what one worker does at a time."""

    number: int
    file: str
    first_row: int
    rows: int

    def path(self, folder: str, ending: str) -> str:
        return f"{folder}/part-{self.number:05}.{ending}"


# Turns a part into a table and numbers about it, which go into its record. The table is None if the work wrote a file.
Work = Callable[[Part], tuple[pa.Table | None, dict[str, Any]]]


def plan_parts(
    sources: list[str],
    rows_per_part: int,
    skip: int = 0,
    most: int | None = None,
    subset: str | None = None,
    split: str = "train",
) -> list[Part]:
    """Cut the rows of sources into parts, in the order of `sources`, and of names within a pattern or folder.

    Args:
        sources: files, patterns, folders, URLs or ids of Hub datasets.
        skip: how many rows to leave out at the start.
        most: how many rows to take; all that follow if None.
        subset, split: of Hub datasets.

    Raises:
        FileNotFoundError: naming a source that is no file, or matches none.
        ValueError: naming a file that cannot be read.
        ConnectionError: naming the source, if the Hub or an object store does not answer.
    """
    files = [file for source in sources for file in _files_of(source, subset, split)]
    with ThreadPoolExecutor(ASKED_TOGETHER) as threads:
        rows_of_files = list(threads.map(count_rows, files))
    if files and not any(rows_of_files):
        raise ValueError(f"{', '.join(sources)} is empty: it holds no row.")
    plan, begin = [], 0
    for file, rows in zip(files, rows_of_files):
        # The rows of this file between those that are skipped and the last one that is taken.
        first, end = max(0, skip - begin), rows if most is None else min(rows, skip + most - begin)
        plan += [
            Part(len(plan) + number, file, start, min(rows_per_part, end - start))
            for number, start in enumerate(range(first, end, rows_per_part))
        ]
        begin += rows
    return plan


def _files_of(source: str, subset: str | None, split: str) -> list[str]:
    """The files of a source: URLs, or paths from the root, since workers of a cluster have another current folder.

    Only Parquet and JSON lines can be read from the middle. Of others, such as CSV or a folder of texts, the source as
    a whole is cut, so that a part may be many small files.
    """
    if is_table(source):
        raise ValueError("`source` is a table in memory, and this recipe reads files: write it as Parquet first.")
    if "://" in source:
        files = _files_at_url(source)
    elif found := local_files(source):
        check_local(source, subset, split)
        if not can_begin_anywhere(str(found[0])):
            return [absolute(os.path.expanduser(source))]
        files = [absolute(str(file)) for file in found]
    else:
        files = hub_files(source, subset, split)
    if others := [file for file in files if not can_begin_anywhere(file)]:
        raise ValueError(
            f"{source!r} has {others[0]}, which is neither Parquet nor JSON lines. The Hub converts most datasets: "
            "name the files in hf://datasets/OWNER/NAME@refs/convert/parquet/ as the source."
        )
    return files


def _files_at_url(url: str) -> list[str]:
    try:
        files, path = url_to_fs(url)
        found = sorted(files.glob(path)) if "*" in path else [files.info(path)["name"]]
    except FileNotFoundError:
        found = []
    except Exception as error:  # The Hub and each object store have errors of their own.
        raise ConnectionError(f"{url!r} cannot be reached: {error}") from error
    if not found:
        raise FileNotFoundError(f"{url!r} matches no file.")
    return [files.unstrip_protocol(file) for file in found]


def sizes_of(plan: list[Part]) -> list[int]:
    """The size of each file in bytes: with the plan, what tells a changed source from the one before."""
    sizes = []
    for file in dict.fromkeys(part.file for part in plan):
        if "://" in file:
            files, path = url_to_fs(file)
            sizes.append(files.size(path))
        else:
            sizes.append(sum(each.stat().st_size for each in local_files(file)))
    return sizes


def read_part(part: Part, columns: list[str]) -> Iterator[Row]:
    """The rows of a part with the given columns; ValueError naming file and row if one lacks a column, or is none."""
    return islice(read_from(part.file, part.first_row, columns), part.rows)


def read_texts(part: Part, column: str) -> list[str]:
    """The texts in a column of a part's rows, "" where one is missing. A number becomes text.

    Raises:
        ValueError: naming file and row of a cell that holds something else, or of a row that lacks the column.
    """
    return [row.text_or_none(column) or "" for row in read_part(part, [column])]


def do_parts(
    plan: list[Part],
    work: Work,
    folder: str,
    identity: dict[str, Any],
    workers: int = 1,
    ray: str | None = None,
    gpus: bool = False,
) -> list[dict[str, Any]]:
    """Do all parts that have no record yet.

    Args:
        plan: the parts, from `plan_parts`.
        work: see `Work`. It is sent to other processes, so it is a function of a module, or a `partial` of one.
        folder: path or URL of the folder for the parts and their records.
        identity: what the tables depend on, see `identity_of`.
        workers: processes on this machine; 1 works in this process.
        ray: `auto` or the address of a Ray cluster, whose CPUs (or GPUs) are the workers.
        gpus: with `ray`, each worker gets a GPU.

    Returns:
        The records of all parts, in order.

    Raises:
        SettingsMismatch: if a part in the folder was made of something else.
        RuntimeError: if a worker died.
    """
    folder = absolute(folder.rstrip("/"))
    files, root = url_to_fs(folder)
    files.makedirs(root, exist_ok=True)
    with folder_lock(root) if "file" in files.protocol else nullcontext():
        done = _read_records(plan, folder, identity)
        waiting = [part for part in plan if part.number not in done]
        call = partial(_finish, work=work, folder=folder, identity=identity)
        if ray is not None:
            finished = _on_ray(call, waiting, ray, gpus)
        elif workers > 1:
            finished = _in_processes(call, waiting, workers)
        else:
            finished = map(call, waiting)
        for _ in tqdm(finished, total=len(plan), initial=len(done), unit="part", desc=os.path.basename(folder)):
            pass
        done = _read_records(plan, folder, identity)
        for left in files.glob(f"{glob.escape(root)}/part-*.partial"):  # By workers that were killed.
            files.rm_file(left)
        return [done[part.number] for part in plan]


def _read_records(plan: list[Part], folder: str, identity: dict[str, Any]) -> dict[int, dict[str, Any]]:
    files, root = url_to_fs(folder)
    # Object stores list a folder once and keep what they found; other processes have written since.
    files.invalidate_cache()
    found = {}
    planned = {os.path.basename(part.path(folder, "json")): part for part in plan}
    paths = sorted(files.glob(f"{glob.escape(root)}/part-*.json"))
    with ThreadPoolExecutor(ASKED_TOGETHER) as threads:
        contents = list(threads.map(files.cat_file, paths))
    for path, content in zip(paths, contents):
        record, part = json.loads(content), planned.get(os.path.basename(path))
        stored = {name: record[name] for name in ("rows", "first_row", "identity")}
        now = {"rows": part and part.rows, "first_row": part and part.first_row, "identity": identity}
        check_same_identity(path, stored, now, "Choose another folder, or delete this one.")
        found[part.number] = record
    return found


def _finish(part: Part, work: Work, folder: str, identity: dict[str, Any]) -> None:
    """Do a part, write its table and then its record."""
    table, numbers = work(part)
    record = {**asdict(part), "identity": identity, **numbers}
    if table is not None:
        write_whole(part.path(folder, "parquet"), lambda file: pq.write_table(table, file, compression="zstd"))
    write_whole(part.path(folder, "json"), lambda file: file.write(json.dumps(record).encode()))


def _in_processes(call: Callable[[Part], None], parts: list[Part], workers: int) -> Iterator[None]:
    """Do parts in processes of this machine, and yield after each."""
    # A forked process would inherit locks of torch's and the tokenizers' threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    try:
        for future in as_completed([pool.submit(call, part) for part in parts]):
            yield future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "A worker died, perhaps for want of memory: the same command goes on, with fewer `workers` if need be."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this worker when its parent is killed; it would wait for another part for ever."""

    def end() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _on_ray(call: Callable[[Part], None], parts: list[Part], address: str, gpus: bool) -> Iterator[None]:
    """Do parts as tasks of a Ray cluster, which all see the sources and the folder, and yield after each."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("`ray` needs the extra `scale`: pip install 'neobert_hf[scale]'.") from error
    # A connection that the caller has made stays, and so do its workers.
    keep = ray.is_initialized()
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except ConnectionError as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(f"`ray` is {address!r}: {reason} `ray start --head` starts a cluster.") from error
    kind, resources = ("GPU", {"num_gpus": 1}) if gpus else ("CPU", {"num_cpus": 1})
    # Ray does a part again whose worker or node died, three times.
    task = ray.remote(**resources)(lambda part: call(part))
    waiting, running = iter(parts), []
    try:
        while True:
            # Nodes come and go, so the workers are counted anew.
            workers = max(1, int(ray.cluster_resources().get(kind, 0)))
            running += [task.remote(part) for part in islice(waiting, max(0, workers - len(running)))]
            if not running:
                return
            (finished,), running = ray.wait(running)
            ray.get(finished)
            yield
    except ray.exceptions.RayTaskError as error:  # The work raised.
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Workers died with one part again and again: {error}") from error
    finally:
        if not keep:
            ray.shutdown()

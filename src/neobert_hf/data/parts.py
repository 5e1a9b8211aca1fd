"""Work that is larger than a machine: parts of tables, done by any number of workers in any order.

A part is some rows of a file. The plan of parts follows from the sources and `rows_per_part` alone, so it is the same
on every machine. A worker turns a part into a table, which is written to `part-00012.parquet` (or it writes a file of
its own), and then a record of it, `part-00012.json`. What is done is what has a record: an interrupted run goes on with
the parts that have none, whether it ran in one process, in several, or on a Ray cluster. No engine has to remember
anything, so all may be killed at any time.

Sources and outputs are paths or URLs of fsspec: `data/*.parquet`, `hf://datasets/...`, `s3://bucket/...`.
"""

import glob
import gzip
import json
import multiprocessing
import os
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from tqdm.auto import tqdm

from neobert_hf.common.files import folder_lock
from neobert_hf.common.fingerprints import check_same_settings
from neobert_hf.data.tables import Row


# A worker that dies may have been out of memory because of its neighbours; one that dies again and again is not.
MOST_DEATHS = 3
# Files that are read at a time to plan: a Hub or an object store takes a moment to answer.
ASKED_TOGETHER = 16
# Rows of a Parquet file.
DECODED_TOGETHER = 1_000


@dataclass(frozen=True)
class Part:
    """Some rows of a file: what one worker does at a time."""

    number: int
    file: str
    first_row: int
    rows: int

    def path(self, folder: str, ending: str) -> str:
        return f"{folder}/part-{self.number:05}.{ending}"


# Turns a part into a table and numbers about it, which go into its record. The table is None if the work wrote a file.
Work = Callable[[Part], tuple[pa.Table | None, dict[str, Any]]]


def plan_parts(sources: list[str], rows_per_part: int, skip: int = 0, most: int | None = None) -> list[Part]:
    """Cut Parquet and JSON lines files into parts, in the order of `sources`, and of names within a pattern.

    Args:
        skip: how many rows to leave out at the start.
        most: how many rows to take; all that follow if None.

    Raises:
        FileNotFoundError: naming a source that is no file, or matches none.
        ValueError: naming a file that cannot be read.
        ConnectionError: naming the sources, if the Hub or an object store does not answer.
    """
    try:
        files = []
        for source in sources:
            found = sorted(file.full_name for file in fsspec.open_files(source)) if "*" in source else [source]
            if not found:
                raise FileNotFoundError(f"{source} matches no file.")
            files += map(absolute, found)
        with ThreadPoolExecutor(ASKED_TOGETHER) as threads:
            rows = list(threads.map(count_rows, files))
    except (ValueError, FileNotFoundError):
        raise
    except Exception as error:  # The Hub and each object store have errors of their own.
        raise ConnectionError(f"{', '.join(map(repr, sources))} cannot be reached: {error}") from error
    return cut(list(zip(files, rows)), rows_per_part, skip, most)


def absolute(path: str) -> str:
    """A local path from the root, since workers of a cluster have another current folder. A URL stays as it is."""
    return path if "://" in path else os.path.abspath(path)


def cut(files: list[tuple[str, int]], rows_per_part: int, skip: int = 0, most: int | None = None) -> list[Part]:
    """The parts of files, each given with its number of rows. See `plan_parts`."""
    plan, begin = [], 0
    for file, rows in files:
        # The rows of this file between those that are skipped and the last one that is taken.
        first, end = max(0, skip - begin), rows if most is None else min(rows, skip + most - begin)
        plan += [
            Part(len(plan) + number, file, start, min(rows_per_part, end - start))
            for number, start in enumerate(range(first, end, rows_per_part))
        ]
        begin += rows
    return plan


def sizes_of(plan: list[Part]) -> list[int]:
    """The size of each file in bytes: with the plan, what tells a changed source from the one before."""
    return [url_to_fs(file)[0].size(url_to_fs(file)[1]) for file in dict.fromkeys(part.file for part in plan)]


@contextmanager
def _open(file: str) -> Iterator[BinaryIO]:
    """A file for reading, uncompressed; FileNotFoundError or ValueError naming it if there is none or it is broken."""
    try:
        with fsspec.open(file, compression="infer") as handle:
            yield handle
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(
            f"{file} is no file: give Parquet or JSON lines files, or a pattern such as 'my/*.parquet'."
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowInvalid) as error:
        raise ValueError(f"{file} cannot be read: {error}. Restore it, or leave it out by a pattern.") from error


def count_rows(file: str) -> int:
    with _open(file) as handle:
        if file.endswith(".parquet"):
            return pq.ParquetFile(handle).metadata.num_rows
        return sum(1 for line in handle if line.strip())


def read_part(part: Part, columns: list[str]) -> pa.Table:
    """The given columns of a part's rows.

    Raises:
        ValueError: naming the file, if it lacks a column or cannot be read.
    """
    if not part.file.endswith(".parquet"):
        rows = _read_lines(part)
        _check_columns(part.file, columns, list(rows[0]))
        return pa.table({column: [row.get(column) for row in rows] for column in columns})
    with _open(part.file) as handle:
        file = pq.ParquetFile(handle)
        _check_columns(part.file, columns, file.schema_arrow.names)
        # Only the groups of rows that the part touches are read.
        ends, groups = [], []
        for group in range(file.num_row_groups):
            start = ends[-1] if ends else 0
            ends.append(start + file.metadata.row_group(group).num_rows)
            if start < part.first_row + part.rows and ends[-1] > part.first_row:
                groups.append(group)
        # A group may have a million rows, so they are decoded a few at a time.
        skip, found = part.first_row - (ends[groups[0] - 1] if groups[0] else 0), []
        for batch in file.iter_batches(DECODED_TOGETHER, groups, columns):
            found.append(batch[max(0, skip) : max(0, skip + part.rows)])
            skip -= len(batch)
            if skip + part.rows <= 0:
                break
        return pa.Table.from_batches(found)


def read_texts(part: Part, column: str) -> list[str]:
    """The texts in a column of a part's rows, "" where one is missing. A number becomes text.

    Raises:
        ValueError: naming file and row of a cell that holds something else, or of a row that lacks the column.
    """
    if part.file.endswith(".parquet"):
        table = read_part(part, [column])
        if table.schema.field(column).type in (pa.string(), pa.large_string()):
            return table[column].fill_null("").to_pylist()
        cells = table.to_pylist()
    else:
        cells = _read_lines(part)
    rows = (Row(part.file, index, row) for index, row in enumerate(cells, part.first_row))
    return [row.text_or_none(column) or "" for row in rows]


def _read_lines(part: Part) -> list[dict[str, Any]]:
    """The rows of a part of a file of JSON lines; ValueError naming the row that is none."""
    rows = []
    with _open(part.file) as handle:
        lines = (line for line in handle if line.strip())
        for index, line in enumerate(islice(lines, part.first_row, part.first_row + part.rows), part.first_row):
            place = f"{part.file}, row {index:,}"
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(
                    f"{place} is not valid JSON in UTF-8 ({error}). Give Parquet, or JSON lines with an object on each."
                ) from error
            if not isinstance(rows[-1], dict):
                raise ValueError(f"{place} is {rows[-1]!r:.60}; it must be an object, {{...}}. Write one row a line.")
    return rows


def _check_columns(file: str, wanted: list[str], found: list[str]) -> None:
    if missing := [column for column in wanted if column not in found]:
        raise ValueError(f"{file} has no column {missing[0]!r}; it has {', '.join(map(repr, found))}.")


def do_parts(
    plan: list[Part],
    work: Work,
    folder: str,
    settings: dict[str, Any],
    workers: int = 1,
    ray: str | None = None,
    gpus: bool = False,
) -> list[dict[str, Any]]:
    """Do all parts that have no record yet.

    Args:
        plan: the parts, from `plan_parts`.
        work: see `Work`. It is sent to other processes, so it is a function of a module, or a `partial` of one.
        folder: path or URL of the folder for the parts and their records.
        settings: what the tables depend on, see `fingerprints.depends_on`.
        workers: processes on this machine; 1 works in this process.
        ray: `auto` or the address of a Ray cluster, whose CPUs (or GPUs) are the workers.
        gpus: with `ray`, each worker gets a GPU.

    Returns:
        The records of all parts, in order.

    Raises:
        SettingsMismatch: if a part in the folder was made of something else.
        RuntimeError: naming a part whose worker died three times.
    """
    folder = absolute(folder.rstrip("/"))
    files, root = url_to_fs(folder)
    files.makedirs(root, exist_ok=True)
    with folder_lock(root) if "file" in files.protocol else nullcontext():
        done = _read_records(plan, folder, settings)
        waiting = [part for part in plan if part.number not in done]
        call = partial(_finish, work=work, folder=folder, settings=settings)
        with tqdm(total=len(plan), initial=len(done), unit="part", desc=os.path.basename(folder)) as progress:
            if ray is not None:
                _run(waiting, RayTasks(call, ray, gpus), progress)
            elif workers > 1:
                _run(waiting, Processes(call, workers), progress)
            else:
                for part in waiting:
                    call(part)
                    progress.update()
        records = join(plan, folder, settings)
        for left in files.glob(f"{glob.escape(root)}/part-*.partial"):  # By workers that were killed.
            files.rm_file(left)
        return records


def join(plan: list[Part], folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of all parts, in order; ValueError if one is missing."""
    done = _read_records(plan, folder.rstrip("/"), settings)
    if missing := [part for part in plan if part.number not in done]:
        raise ValueError(f"{len(missing):,} of {len(plan):,} parts of {folder} are missing, the first is {missing[0]}.")
    return [done[part.number] for part in plan]


def _read_records(plan: list[Part], folder: str, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
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
        stored = {name: record[name] for name in ("rows", "first_row", "settings")}
        now = {"rows": part and part.rows, "first_row": part and part.first_row, "settings": settings}
        check_same_settings(path, stored, now, "Choose another folder, or delete this one.")
        found[part.number] = record
    return found


def _finish(part: Part, work: Work, folder: str, settings: dict[str, Any]) -> None:
    """Do a part, write its table and then its record, each under another name first."""
    table, numbers = work(part)
    record = {**asdict(part), "settings": settings, **numbers}
    if table is not None:
        write_whole(part.path(folder, "parquet"), lambda file: pq.write_table(table, file, compression="zstd"))
    write_whole(part.path(folder, "json"), lambda file: file.write(json.dumps(record).encode()))


def write_whole(path: str, write: Callable[[Any], Any]) -> None:
    """Write a file that is whole or does not exist, at a path or URL."""
    files, path = url_to_fs(path)
    # Another worker may be doing the same part, if its machine was only cut off and not dead.
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.partial"
    with files.open(temporary, "wb") as file:
        write(file)
    files.mv(temporary, path)


class Died(Exception):
    """A worker ended without a word: killed, out of memory, or its machine is gone."""


class Processes:
    """Workers are processes of this machine."""

    dies_together = True  # A process that dies takes the whole pool along.

    def __init__(self, call: Callable[[Part], None], workers: int):
        self.call, self.slots, self.pool = call, workers, None

    def submit(self, part: Part) -> Future:
        if self.pool is None:
            # A forked process would inherit locks of torch's and the tokenizers' threads.
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.slots, mp_context=context, initializer=_end_with_parent)
        return self.pool.submit(self.call, part)

    def wait(self, running: list[Future]) -> list[Future]:
        return list(wait(running, return_when=FIRST_COMPLETED).done)

    def result(self, future: Future) -> None:
        try:
            future.result()
        except BrokenProcessPool as error:
            self.pool = None
            raise Died from error

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this worker when its parent is killed; it would wait for another part for ever."""

    def end() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


class RayTasks:
    """Workers are tasks of a Ray cluster, which all see the sources and the folder."""

    dies_together = False

    def __init__(self, call: Callable[[Part], None], address: str, gpus: bool = False):
        try:
            import ray
        except ImportError as error:
            raise ImportError("`ray` needs the extra `scale`: pip install 'neobert_hf[scale]'.") from error
        self.ray = ray
        # A connection that the caller has made stays, and so do its workers.
        self.keeps = ray.is_initialized()
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
        resources = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        # Ray would try a dead task again without telling; deaths are counted here.
        self.task = ray.remote(max_retries=0, **resources)(lambda part: call(part))
        self.resource = "GPU" if gpus else "CPU"

    @property
    def slots(self) -> int:
        return max(1, int(self.ray.cluster_resources().get(self.resource, 0)))

    def submit(self, part: Part):
        return self.task.remote(part)

    def wait(self, running: list) -> list:
        return self.ray.wait(running, num_returns=1)[0]

    def result(self, reference) -> None:
        errors = self.ray.exceptions
        try:
            self.ray.get(reference)
        except errors.RayTaskError as error:  # The work raised.
            raise error.cause from error
        except errors.RayError as error:
            raise Died from error

    def close(self) -> None:
        if not self.keeps:
            self.ray.shutdown()


def _run(parts: list[Part], engine: Processes | RayTasks, progress: tqdm) -> None:
    waiting, running, deaths = deque(parts), {}, Counter()
    try:
        while waiting or running:
            while waiting and len(running) < engine.slots:
                suspects = deaths[waiting[0]] or any(deaths[part] for part in running.values())
                if engine.dies_together and suspects and running:
                    break  # A part whose worker died is done again alone, so that its neighbours do not pay for it.
                part = waiting.popleft()
                running[engine.submit(part)] = part
            for future in engine.wait(list(running)):
                part = running.pop(future)
                try:
                    engine.result(future)
                    progress.update()
                except Died:
                    deaths[part] += 1
                    if deaths[part] == MOST_DEATHS:
                        raise RuntimeError(f"The worker died {MOST_DEATHS} times with {part}.") from None
                    waiting.appendleft(part)
    finally:
        engine.close()

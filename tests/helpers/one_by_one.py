"""Recipes that a benchmark runs side by side, one by one in the main thread of the tests' process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.helpers.examples import load_example


class OneByOne(ThreadPoolExecutor):
    """Recipes take locks and signals, which they can only in the main thread."""

    def map(self, work, jobs):
        return map(work, jobs)


def run_here(done: list[str]) -> Callable[..., None]:
    """In place of a benchmark's `run`, whose scripts of their own import everything anew; notes the scripts' names."""

    def run(script, flags, log, threads=2):
        done.append(script)
        load_example(script.removesuffix(".py")).main(flags.split())

    return run

"""Recipes that a benchmark runs side by side, in the main thread of the tests' process."""

from concurrent.futures import ThreadPoolExecutor


class OneByOne(ThreadPoolExecutor):
    """Recipes take locks and signals, which they can only in the main thread."""

    def map(self, work, jobs):
        return map(work, jobs)

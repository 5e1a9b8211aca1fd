"""Runs of the recipes in processes of their own that can be killed, at the cost of one import for all of them.

To import PyTorch, Transformers and Sentence Transformers takes 7 seconds of CPU time. Here one process does it, and
forks a child for every run. The tests' own process cannot fork: PyTorch's threads do not survive it.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.helpers.examples import load_example
from tests.helpers.models import ROOT


class ForkedRun:
    """A run in a child process. What it prints is in `log`."""

    def __init__(self, pid: int, log: Path):
        self.pid = pid
        self.log = log
        # Written when the process has ended.
        self.code = Path(f"{log}.code")

    def is_running(self) -> bool:
        return not self.code.exists()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while self.is_running():
            time.sleep(0.01)
        assert self.code.read_text() == str(-signal.SIGKILL), self.log.read_text()[-3000:]

    def finish(self) -> str:
        """Wait for the end of a run that must succeed, and return what it printed."""
        while self.is_running():
            time.sleep(0.05)
        output = self.log.read_text()
        assert self.code.read_text() == "0", output[-3000:]
        return output


class Forker:
    """The process that has imported everything."""

    def __init__(self, examples: list[str]):
        command = [sys.executable, "-m", "tests.helpers.forked_runs", *examples]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )

    def start(self, example: str, flags: list[str], log: Path, **environment: str) -> ForkedRun:
        """Call the recipe's `main` with these flags in a child, with further environment variables."""
        self.process.stdin.write(json.dumps([example, flags, str(log), environment]) + "\n")
        self.process.stdin.flush()
        return ForkedRun(int(self.process.stdout.readline()), log)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def supervise(example: str, flags: list[str], log: str, environment: dict[str, str]) -> None:
    """Start a run, print its process id, wait for its end, and keep its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        run(example, flags, log, environment)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    partial = Path(f"{log}.partial")
    partial.write_text(str(os.waitstatus_to_exitcode(status)))
    partial.rename(f"{log}.code")
    os._exit(0)


def run(example: str, flags: list[str], log: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        load_example(example).main(flags)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for example in sys.argv[1:]:
        load_example(example)
    # Supervisors that have ended must not stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Not `for line in sys.stdin`, which reads ahead.
    while line := sys.stdin.readline():
        if os.fork() == 0:
            supervise(*json.loads(line))


if __name__ == "__main__":
    main()

"""The server vLLM, in processes of its own."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]  # `make servers` installs it.


class Server:
    """A running server, on this machine only.

    Args:
        folder: of the model.
        log: what the server prints goes to this file.
        options: of vLLM's command line.
        environment: more variables of its environment.
    """

    def __init__(self, folder: Path, log: Path, options: list[str], environment: dict[str, str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        address = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(self.port)]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *address, *options]
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | environment
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10)
                return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.5)

    def ask(self, path: str, **request) -> dict:
        """The answer, as a dict; `urllib.error.HTTPError` if the server refuses."""
        data, head = json.dumps(request).encode(), {"Content-Type": "application/json"}
        question = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, head)
        with urllib.request.urlopen(question, timeout=600) as answer:
            return json.load(answer)

    def end(self) -> None:
        """With its own processes."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def serve(tmp_path):
    """Starts a server for a folder, inside a `with`."""

    @contextmanager
    def start(folder: Path, *options: str, **environment: str) -> Iterator[Server]:
        # Weights are float32, which vLLM would round to float16. Compiled code is of no use to another test.
        options = ["--runner", "pooling", "--dtype", "float32", *options]
        caches = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
        server = Server(folder, tmp_path / "server.log", options, caches | environment)
        try:
            server.wait()
            yield server
        finally:
            server.end()

    return start

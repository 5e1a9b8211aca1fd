"""A small Hub on loopback: enough of its HTTP interface to load models and datasets from, kept in memory.

Used as a context manager; it runs in a thread and ends with the block. Clients need `HF_ENDPOINT` in their environment
before they import `huggingface_hub`, hence a process of their own: see `client_environment`.
"""

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


# All repositories have one commit.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """The server.

    Attributes:
        repositories: by id, the content of each file by its path.
    """

    def __enter__(self) -> "HubServer":
        self.repositories: dict[str, dict[str, bytes]] = {}
        handler = type("Handler", (Handler,), {"repositories": self.repositories})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()

    def client_environment(self, cache: Path) -> dict[str, str]:
        """Environment variables of a process that takes this server for the Hub."""
        url = f"http://127.0.0.1:{self.server.server_port}"
        changes = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        return os.environ | changes | {"HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}


class Handler(BaseHTTPRequestHandler):
    """Answers `/api/models/OWNER/NAME/METHOD/REVISION/...`, and `/OWNER/NAME/resolve/REVISION/FILE`."""

    repositories: dict[str, dict[str, bytes]]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "api":
            repo_id, (method, *rest) = "/".join(parts[2:4]), parts[4:] or ["revision"]
        else:
            parts = parts[1:] if parts[0] == "datasets" else parts
            repo_id, (method, *rest) = "/".join(parts[:2]), parts[2:]
        if repo_id not in self.repositories:
            return self.send({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        answers = {"revision": self.revision, "tree": self.tree, "paths-info": self.paths_info, "resolve": self.resolve}
        answers[method](repo_id, self.repositories[repo_id], "/".join(rest[1:]))

    do_HEAD = do_POST = do_GET

    def send(self, value: bytes | dict | list, status: int = 200, headers: dict | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def revision(self, repo_id: str, files: dict[str, bytes], _: str) -> None:
        siblings = [{"rfilename": path} for path in files]
        self.send({"_id": "1", "id": repo_id, "sha": COMMIT, "private": False, "siblings": siblings})

    def tree(self, _: str, files: dict[str, bytes], folder: str) -> None:
        """The files and folders in a folder, and what is in these where the whole tree is asked for."""
        inside = [path for path in files if path.startswith(f"{folder}/" if folder else "")]
        depth = folder.count("/") + 1 if folder else 0
        folders = {"/".join(path.split("/")[: depth + 1]) for path in inside if path.count("/") > depth}
        whole = self.query.get("recursive", ["false"])[0].lower() == "true"
        entries = [{"type": "directory", "path": path, "size": 0, "oid": path} for path in sorted(folders)]
        self.send(entries + [entry(path, files[path]) for path in inside if whole or path.count("/") == depth])

    def paths_info(self, _: str, files: dict[str, bytes], __: str) -> None:
        wanted = json.loads(self.body)["paths"] if self.body[:1] == b"{" else parse_qs(self.body.decode())["paths"]
        self.send([entry(path, content) for path, content in files.items() if path in wanted])

    def resolve(self, _: str, files: dict[str, bytes], path: str) -> None:
        headers = {"X-Repo-Commit": COMMIT}
        if path not in files:
            return self.send({"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"})
        headers |= {"ETag": f'"{entry(path, files[path])["oid"]}"', "Content-Type": "application/octet-stream"}
        self.send(files[path], headers=headers)


def entry(path: str, content: bytes) -> dict:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}

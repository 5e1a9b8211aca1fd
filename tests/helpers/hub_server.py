"""A small Hub on loopback: enough of its HTTP interface to publish to and to load from, kept in memory.

Used as a context manager; it runs in a thread and ends with the block. Clients need `HF_ENDPOINT` and
`HF_HUB_DISABLE_XET=1` in their environment before they import `huggingface_hub`, hence a process of their own.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


TOKEN = "hf_right"
OWNER = "me"
LFS_SUFFIXES = (".safetensors", ".onnx")


def file_oid(path: str, content: bytes) -> str:
    """As on the Hub: SHA-256 of what lies in LFS, git's blob id of the rest."""
    if path.endswith(LFS_SUFFIXES):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """Commits by oid, each with all its files, and the refs that point to them."""

    private: bool
    kind: str = "model"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)

    @property
    def main(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


class HubServer:
    """The server.

    Attributes:
        repositories: by id.
        objects: LFS content by SHA-256.
        requests: method and path of every request, in order.
    """

    def __enter__(self) -> "HubServer":
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.query, parts = parse_qs(url.query), [unquote(part) for part in url.path.strip("/").split("/")]
        if url.path == "/requests":
            return self.send(str(len(self.hub.requests)).encode())
        self.hub.requests.append(f"{self.command} {url.path}")
        length = int(self.headers.get("Content-Length", 0))
        if parts[0] == "lfs":
            return self.store_object(parts[1], length)
        body = self.rfile.read(length)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return self.send({"error": "Invalid credentials in Authorization header"}, 401)
        if parts[:2] == ["api", "validate-yaml"]:
            return self.validate_yaml(json.loads(body)["content"])
        if parts[:2] == ["api", "whoami-v2"]:
            return self.send(
                {"type": "user", "name": OWNER, "auth": {}} if token else {"error": "who?"}, 200 if token else 401
            )
        if parts[:3] == ["api", "repos", "create"]:
            return self.create(json.loads(body), token)
        if parts[0] == "api":
            repo_id, rest = "/".join(parts[2:4]), parts[4:] or ["revision", "main"]
        else:
            parts = parts[1:] if parts[0] in ("datasets", "spaces") else parts
            repo_id, rest = "/".join(parts[:2]).removesuffix(".git"), parts[2:]
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and not token):
            return self.send({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
        if self.command not in ("GET", "HEAD") and not token and rest[0] != "paths-info":
            return self.send({"error": "Log in first"}, 401)
        getattr(self, rest[0].replace("-", "_"))(repo_id, repository, rest[1:], body)

    def send(self, value, status: int = 200, headers: dict | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, str(text))
        if isinstance(value, dict) and "error" in value:
            self.send_header("X-Error-Message", value["error"])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # Writing

    def validate_yaml(self, content: str) -> None:
        try:
            metadata = yaml.safe_load(content.split("---")[1])
            for entry in metadata.get("model-index", []):
                assert entry["name"] and all(
                    result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]
                    for result in entry["results"]
                )
                assert all("value" in metric for result in entry["results"] for metric in result["metrics"])
            assert isinstance(metadata.get("license", "mit"), str)
        except Exception as error:
            return self.send({"errors": [{"message": repr(error)}], "warnings": [], "error": "yaml"}, 400)
        self.send({"errors": [], "warnings": []})

    def create(self, request: dict, token: str) -> None:
        repo_id = f"{request['organization'] or OWNER}/{request['name']}"
        if not token:
            return self.send({"error": "Log in first"}, 401)
        if not repo_id.startswith(f"{OWNER}/"):
            return self.send({"error": f"You don't have the rights to create {repo_id}"}, 403)
        if repo_id in self.hub.repositories:
            return self.send({"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}, 409)
        kind = request.get("type", "model")
        if kind == "space" and request.get("sdk") != "static":
            return self.send({"error": f"The sdk is {request.get('sdk')}"}, 400)
        repository = self.hub.repositories[repo_id] = Repository(request.get("visibility") == "private", kind)
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        self.send({"url": f"{self.hub.url}/{repo_id}", "name": repo_id})

    def preupload(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        files = repository.commits[repository.resolve(rest[0])]
        answers = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            oid = {"oid": file_oid(path, files[path])} if path in files else {}
            mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False} | oid)
        self.send({"files": answers})

    def info(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        """LFS batch: where to put which of the objects; those that are there need no action."""
        objects = []
        for entry in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}"}}
            objects.append(entry if entry["oid"] in self.hub.objects else entry | {"actions": upload})
        self.send({"transfer": "basic", "objects": objects})

    def store_object(self, oid: str, length: int) -> None:
        content = self.rfile.read(length)
        if hashlib.sha256(content).hexdigest() == oid:
            self.hub.objects[oid] = content
            self.send({})

    def commit(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        files = dict(repository.commits[repository.resolve(rest[0])])
        for line in body.splitlines():
            key, value = (json.loads(line)[name] for name in ("key", "value"))
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.send({"error": f"LFS object {value['oid']} was not uploaded"}, 400)
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        number = len(repository.refs)
        pull_request = "create_pr" in self.query
        oid = repository.commit(f"refs/pr/{number}" if pull_request else rest[0], files)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"}
        if pull_request:
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo_id}/discussions/{number}"
        self.send(answer)

    # Reading

    def find(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]] | None:
        oid = repository.resolve(revision)
        if oid is None:
            self.send({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return oid, repository.commits[oid]

    def revision(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        if found := self.find(repository, rest[0]):
            oid, files = found
            siblings = [{"rfilename": path} for path in files]
            self.send({"_id": "1", "id": repo_id, "sha": oid, "private": repository.private, "siblings": siblings})

    def tree(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        if found := self.find(repository, rest[0]):
            folder = "/".join(rest[1:])
            inside = {
                path: content for path, content in found[1].items() if path.startswith(f"{folder}/" if folder else "")
            }
            # Folders are listed, and what is in them where the whole tree is asked for.
            depth = folder.count("/") + 1 if folder else 0
            folders = {"/".join(path.split("/")[: depth + 1]) for path in inside if path.count("/") > depth}
            whole = self.query.get("recursive", ["false"])[0].lower() == "true"
            entries = [{"type": "directory", "path": path, "size": 0, "oid": path} for path in sorted(folders)]
            entries += [
                self.entry(path, content) for path, content in inside.items() if whole or path.count("/") == depth
            ]
            self.send(entries)

    def paths_info(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        if found := self.find(repository, rest[0]):
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            self.send([self.entry(path, content) for path, content in found[1].items() if path in wanted])

    def entry(self, path: str, content: bytes) -> dict:
        oid = file_oid(path, content)
        lfs = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if path.endswith(LFS_SUFFIXES) else {}
        return {"type": "file", "path": path, "size": len(content), "oid": oid} | lfs

    def resolve(self, repo_id: str, repository: Repository, rest: list[str], body: bytes) -> None:
        if found := self.find(repository, rest[0]):
            oid, files = found
            path = "/".join(rest[1:])
            headers = {"X-Repo-Commit": oid}
            if path not in files:
                return self.send({"error": "Entry not found"}, 404, headers | {"X-Error-Code": "EntryNotFound"})
            headers |= {"ETag": f'"{file_oid(path, files[path])}"', "Content-Type": "application/octet-stream"}
            self.send(files[path], headers=headers)

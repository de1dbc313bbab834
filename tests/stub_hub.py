"""A Hugging Face hub of a few local folders, on a local port: as much of its API as a download takes.

Large files are redirected to a content store that knows ranges, as on the real hub. Every request is recorded.
"""

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants as constants
import pytest

TARGET, DRAFTER = "someone/tiny", "someone/tiny-DFlash"  # the fixture `stub` has a tiny pair under these names
LFS_FROM = 20_000  # bytes from which on a file lies in the content store


class Repository:
    """Branch `main` of a folder's files; `move` gives it a new commit. tags: name -> commit."""

    def __init__(self, folder: Path):
        self.files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.tags: dict[str, str] = {}
        self.move(self.files)

    def move(self, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(files.items())))
        self.main = digest.hexdigest()
        self.commits[self.main] = dict(files)
        return self.main


class StubHub:
    """repositories: by hub name. gated: names that need a licence -> what their files answer: 401 without a login,
    403 with one that has not accepted it; what they hold is told to all, as on the real hub. missing: the answer for
    a name that is not there, 401 or, after a login, 404. lost: files that are listed and not there. renamed: old name
    -> new name.

    drop_after: bytes of a content-store answer after which the connection is cut, once for each entry. slow: seconds
    between pieces. requests: (method, path, Range header) in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.gated: dict[str, int] = {}
        self.missing = 401
        self.lost: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.drop_after: list[int] = []
        self.slow = 0.0
        self.requests: list[tuple[str, str, str | None]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.store = f"http://localhost:{self.server.server_port}"  # another host, as the real store is
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name: str, folder: Path) -> Repository:
        self.repositories[name] = Repository(folder)
        return self.repositories[name]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def asked(self, text: str) -> list[tuple[str, str, str | None]]:
        return [r for r in self.requests if text in r[1]]


class Handler(BaseHTTPRequestHandler):
    hub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if match := re.fullmatch(r"/content/(\w+)", path):
            return self.content(match[1])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            name, kind, revision = match[1], match[2] or "revision", match[3] or "main"
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, kind, revision = match[1], "file", match[2]
        else:
            return self.send(404)
        if name in hub.renamed:
            return self.send(307, {"Location": self.path.replace(name, hub.renamed[name])})
        if name in hub.gated and kind == "file":
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted"}
            return self.send(hub.gated[name], headers)
        if name not in hub.repositories:
            return self.send(hub.missing, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        repository = hub.repositories[name]
        commit = repository.main if revision == "main" else repository.tags.get(revision, revision)
        if commit not in repository.commits:
            return self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        files = repository.commits[commit]
        if kind == "file":
            if match[3] in files and match[3] not in hub.lost:
                return self.file(commit, files[match[3]])
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        entries = [entry(path, data) for path, data in files.items()]
        if kind == "tree":
            return self.send_json([e["tree"] for e in entries])
        return self.send_json({"id": name, "modelId": name, "sha": commit, "siblings": [e["sibling"] for e in entries]})

    def file(self, commit: str, data: bytes) -> None:
        key, headers = hash_of(data), {"X-Repo-Commit": commit}
        if len(data) >= LFS_FROM:
            headers |= {"X-Linked-Etag": f'"{key}"', "X-Linked-Size": str(len(data))}
            return self.send(302, headers | {"Location": f"{self.hub.store}/content/{key}"})
        return self.send(200, headers | {"ETag": f'"{key}"'}, data)

    def content(self, key: str) -> None:
        every = (d for r in self.hub.repositories.values() for files in r.commits.values() for d in files.values())
        data = next(d for d in every if hash_of(d) == key)
        total = len(data)
        status, headers = 200, {"Accept-Ranges": "bytes", "ETag": f'"{key}"'}
        if (wanted := self.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            status, data = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        self.send(status, headers, data, self.hub.drop_after)

    def send_json(self, value: object) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(
        self, status: int, headers: dict[str, str] | None = None, data: bytes = b"", drops: list[int] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if drops:
            self.wfile.write(data[: drops.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        try:
            step = 16384 if self.hub.slow else max(len(data), 1)
            for at in range(0, len(data), step):
                self.wfile.write(data[at : at + step])
                self.wfile.flush()
                time.sleep(self.hub.slow)
        except OSError:  # the client is gone
            self.close_connection = True


def point_to(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Make huggingface_hub ask `url` and keep what it gets in `cache`."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("MLX_DFLASH_MODELS", raising=False)


def hash_of(data: bytes) -> str:
    """As the hub: sha256 of large files, git's hash of small ones."""
    if len(data) >= LFS_FROM:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, dict[str, object]]:
    """A file as the model's info and as the tree tell it."""
    key, size = hash_of(data), len(data)
    sibling: dict[str, object] = {"rfilename": path, "size": size, "blobId": key[:40]}
    tree: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": key[:40]}
    if size >= LFS_FROM:
        sibling["lfs"] = {"size": size, "sha256": key, "pointerSize": 130}
        tree["lfs"] = {"size": size, "oid": key, "pointerSize": 130}
    return {"sibling": sibling, "tree": tree}

"""A Hub on loopback: the endpoints that huggingface_hub uses to publish and fetch models, with faults on demand.

Knows no Xet, like a Hub of one's own. State is plain Python, to be looked at by tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from fake_repos import Blob, RefusalError, Repo

INVALID = "Invalid credentials in Authorization header"
CHUNK = 1 << 12  # of multipart uploads


class FakeHub:
    """``repos`` by id; ``tokens``: token → may it write. ``lfs_from``: bytes from which a file is large; those from
    ``multipart_from`` go in chunks. ``fault(method, path)`` may raise RefusalError or change the state between
    requests. ``requests`` are all that came, with the bytes of their bodies."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens = {"hf_writer": True, "hf_reader": False}
        self.lfs_from, self.multipart_from = 8_000, 1 << 40
        self.large: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.fault: Callable[[str, str], None] = lambda method, path: None
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage = f"http://localhost:{self.server.server_port}"  # large files lie on another host
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, files: dict[str, bytes], private: bool = False) -> Repo:
        repo = self.repos[name] = Repo(private)
        blobs = {path: Blob(content, len(content) >= self.lfs_from) for path, content in files.items()}
        repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n"), **blobs}, "initial commit")
        return repo

    def sent(self) -> list[tuple[str, str, int]]:
        """Requests that could have changed something."""
        return [entry for entry in self.requests if entry[0] not in ("GET", "HEAD")]

    # The endpoints. Each answers with status, JSON or bytes, and headers.

    def create(self, request: _Handler) -> Any:
        body = request.json()
        name = f"{body['organization']}/{body['name']}" if body.get("organization") else f"me/{body['name']}"
        if name in self.repos:
            raise RefusalError(409, "You already created this model repo")
        self.add(name, {}, body.get("visibility") == "private" or body.get("private") is True)
        return {"url": f"{self.url}/{name}"}

    def info(self, request: _Handler, name: str, revision: str = "main") -> Any:
        repo, oid = self._at(request, name, revision)
        files = [{"rfilename": path} for path in repo.commits[oid]]
        return {"id": name, "modelId": name, "sha": oid, "private": repo.private, "tags": [], "siblings": files}

    def refs(self, request: _Handler, name: str) -> Any:
        repo = self._repo(request, name)
        branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": oid} for b, oid in repo.branches.items()]
        return {"branches": branches, "converts": [], "tags": []}

    def tree(self, request: _Handler, name: str, revision: str) -> Any:
        repo, oid = self._at(request, name, revision)
        entries = []
        for path, blob in repo.commits[oid].items():
            entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
            lfs = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": len(blob.pointer)}
            entries.append(entry | ({"lfs": lfs} if blob.lfs else {}))
        return entries

    def paths_info(self, request: _Handler, name: str, revision: str) -> Any:
        wanted = parse_qs(request.body.decode()).get("paths", [])
        return [entry for entry in self.tree(request, name, revision) if entry["path"] in wanted]

    def validate(self, request: _Handler) -> Any:
        request.json()
        return {"errors": [], "warnings": []}

    def preupload(self, request: _Handler, name: str, revision: str) -> Any:
        repo, oid = self._at(request, name, revision, write=True)
        there, answers = repo.commits[oid], []
        for file in request.json()["files"]:
            old, large = there.get(file["path"]), file["size"] >= self.lfs_from
            known = None if old is None else old.sha256 if old.lfs else old.oid
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": known})
        return {"files": answers}

    def batch(self, request: _Handler, name: str) -> Any:
        self._repo(request, name, write=True)
        objects = []
        for item in request.json()["objects"]:
            sha, size = item["oid"], item["size"]
            upload: dict[str, Any] = {"href": f"{self.storage}/large/{sha}"}
            if size >= self.multipart_from:
                count = -(-size // CHUNK)
                parts = {str(number): f"{self.storage}/large/{sha}/{number}" for number in range(1, count + 1)}
                upload = {"href": f"{self.storage}/large/{sha}/complete", "header": {"chunk_size": str(CHUNK), **parts}}
            actions = {"upload": upload, "verify": {"href": f"{self.storage}/large/{sha}/verify"}}
            objects.append({"oid": sha, "size": size} | ({} if sha in self.large else {"actions": actions}))
        return {"transfer": "multipart", "objects": objects}

    def put(self, request: _Handler, sha: str) -> Any:
        if hashlib.sha256(request.body).hexdigest() != sha:
            raise RefusalError(400, "the content has another digest")
        self.large[sha] = request.body
        return {}

    def put_part(self, request: _Handler, sha: str, number: str) -> Any:
        self.parts.setdefault(sha, {})[int(number)] = request.body
        return 200, b"", {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'}

    def complete(self, request: _Handler, sha: str) -> Any:
        numbers = [part["partNumber"] for part in request.json()["parts"]]
        content = b"".join(self.parts[sha][number] for number in numbers)
        if hashlib.sha256(content).hexdigest() != sha:
            raise RefusalError(400, "the parts do not make the object")
        self.large[sha] = content
        return {}

    def verify(self, request: _Handler, sha: str) -> Any:
        if len(self.large.get(sha, b"")) != request.json()["size"]:
            raise RefusalError(404, "no such object")
        return {}

    def commit(self, request: _Handler, name: str, revision: str) -> Any:
        repo, head = self._at(request, name, revision, write=True)
        lines = [json.loads(line) for line in request.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", head) != head:
            raise RefusalError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.commits[head])
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                files[value["path"]] = Blob(self.large[value["oid"]], lfs=True)
            elif key == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(revision, files, header["summary"])
        return {"commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}

    def file(self, request: _Handler, name: str, revision: str, path: str) -> Any:
        repo, oid = self._at(request, name, revision)
        blob = repo.commits[oid].get(path)
        if blob is None:
            raise RefusalError(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": oid, "ETag": f'"{blob.oid}"'}
        if not blob.lfs:
            return 200, blob.content, headers
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
        self.large[blob.sha256] = blob.content
        return 302, b"", {**headers, **linked, "Location": f"{self.storage}/large/{blob.sha256}"}

    def get_large(self, request: _Handler, sha: str) -> Any:
        return 200, self.large[sha], {"ETag": f'"{sha}"'}

    def _repo(self, request: _Handler, name: str, write: bool = False) -> Repo:
        may_write = request.may_write()
        repo = self.repos.get(name)
        if repo is None or (repo.private and may_write is None):
            raise RefusalError(404, "Repository not found", "RepoNotFound")
        if write and not may_write:
            raise RefusalError(403, "You don't have the rights to write here")
        return repo

    def _at(self, request: _Handler, name: str, revision: str, write: bool = False) -> tuple[Repo, str]:
        repo = self._repo(request, name, write)
        oid = repo.resolve(unquote(revision))
        if oid is None:
            raise RefusalError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo, oid


_NAME, _REVISION, _SHA = r"([\w.-]+/[\w.-]+)", r"([^/]+)", r"([0-9a-f]{64})"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("POST", "/api/repos/create", FakeHub.create),
    ("POST", "/api/validate-yaml", FakeHub.validate),
    ("GET", f"/api/models/{_NAME}", FakeHub.info),
    ("GET", f"/api/models/{_NAME}/revision/{_REVISION}", FakeHub.info),
    ("GET", f"/api/models/{_NAME}/refs", FakeHub.refs),
    ("GET", f"/api/models/{_NAME}/tree/{_REVISION}", FakeHub.tree),
    ("POST", f"/api/models/{_NAME}/paths-info/{_REVISION}", FakeHub.paths_info),
    ("POST", f"/api/models/{_NAME}/preupload/{_REVISION}", FakeHub.preupload),
    ("POST", f"/api/models/{_NAME}/commit/{_REVISION}", FakeHub.commit),
    ("POST", f"/{_NAME}.git/info/lfs/objects/batch", FakeHub.batch),
    ("GET", f"/{_NAME}/resolve/{_REVISION}/(.+)", FakeHub.file),
    ("PUT", f"/large/{_SHA}", FakeHub.put),
    ("PUT", f"/large/{_SHA}/(\\d+)", FakeHub.put_part),
    ("POST", f"/large/{_SHA}/complete", FakeHub.complete),
    ("POST", f"/large/{_SHA}/verify", FakeHub.verify),
    ("GET", f"/large/{_SHA}", FakeHub.get_large),
]


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"
    body = b""

    def json(self) -> Any:
        return json.loads(self.body)

    def may_write(self) -> bool | None:
        """None without a token; an unknown one is refused."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in self.owner.tokens:
            raise RefusalError(401, INVALID)
        return self.owner.tokens[given] if given else None

    def answer(self) -> None:
        hub, path = self.owner, urlsplit(self.path).path
        self.body = self._read()
        hub.requests.append((self.command, path, len(self.body)))
        try:
            hub.fault(self.command, path)
            if path.startswith("/api/repos/") and not self.may_write():
                raise RefusalError(403, "You don't have the rights to create a model under the namespace")
            found = self._dispatch(hub, "GET" if self.command == "HEAD" else self.command, unquote(path))
            status, content, headers = found if isinstance(found, tuple) else (200, json.dumps(found).encode(), {})
        except RefusalError as refusal:
            status, content = refusal.status, json.dumps({"error": refusal.message}).encode()
            headers = {"X-Error-Message": refusal.message}
            headers |= {"X-Error-Code": refusal.code} if refusal.code else {}
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _dispatch(self, hub: FakeHub, method: str, path: str) -> Any:
        for verb, pattern, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                return action(hub, self, *match.groups())
        raise RefusalError(404, f"no such endpoint: {method} {path}")

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def log_message(self, format: str, *args: Any) -> None:
        pass

"""A server that speaks the Hugging Face Hub's HTTP API as far as huggingface_hub uses it to push and pull a model.

    with HubServer() as hub: ...        hub.url, hub.repos, hub.log; hub.trouble makes it misbehave

A test's own, which the client in this process talks to, is the fixture `server` of tests/conftest.py.

Files with an ending in LARGE go through git-lfs's basic transfer, the others stand in the commit itself, as on the Hub.
"""

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

LARGE = (".safetensors", ".bin", ".pt", ".html")
TOKEN = "hf_the-only-token-that-is-good"


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of every commit, by its sha

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files.items()))).encode()).hexdigest()

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a revision: a commit, or main."""
        return self.files if revision in ("main", self.sha) else self.history.get(revision)


def entry(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    """Describe a file, with the keys of /tree and those that the information on a model has."""
    content = files[path]
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": path, "rfilename": path, "size": len(content), "oid": blob}
    if path.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
    return found


def refused(status: int, code: str = "", **headers: str) -> Response:
    """Return an error. code: of status 404, RepoNotFound, RevisionNotFound or EntryNotFound."""
    words = {"X-Error-Message": HTTPStatus(status).phrase, "X-Error-Code": code}
    return JSONResponse({"error": HTTPStatus(status).phrase}, status, words | headers)


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # of git-lfs, by sha256
        self.log: list[str] = []  # "PUT /lfs/..." of every request
        # Called with (method, path); a number is sent as that status.
        self.trouble: Callable[[str, str], int | None] = lambda method, path: None
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        app = Starlette(routes=[Route("/{path:path}", self.handle, methods=["GET", "POST", "PUT"])])
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> "HubServer":
        self.thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.should_exit = True
        self.thread.join()

    async def handle(self, request: Request) -> Response:
        path, content, given = request.scope["path"], await request.body(), request.headers.get("Authorization")
        self.log.append(f"{request.method} {path}")
        trouble = self.trouble(request.method, path)
        if trouble is not None:
            return refused(trouble)
        if given not in (None, f"Bearer {TOKEN}") and not path.startswith("/lfs/"):
            return refused(401)
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":
            self.objects[parts[1]] = content
            return Response()
        if path == "/api/validate-yaml":
            return JSONResponse({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return refused(401) if given is None else self.create(json.loads(content))
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2]).removesuffix(".git")
        repo = self.repos.get(name)
        if repo is None or (repo.private and given is None):
            return refused(404, "RepoNotFound")
        if parts[0] == "api":
            return self.about(repo, name, parts[4:], content)
        if parts[2:4] == ["info", "lfs"]:
            return self.batch(json.loads(content))
        return self.download(repo, parts[3], "/".join(parts[4:]), request)

    def about(self, repo: Repo, name: str, words: list[str], content: bytes) -> Response:
        """Answer /api/models/NAME/VERB/REVISION."""
        verb, revision, *_ = [*words, "main"] if words else ["revision", "main"]
        files = repo.at(revision)
        if files is None:
            return refused(404, "RevisionNotFound")
        if verb == "commit":
            return self.commit(repo, name, [json.loads(line) for line in content.splitlines()])
        if verb == "revision":
            sha, siblings = (
                repo.sha if files is repo.files else revision,
                [entry(file, files) for file in sorted(files)],
            )
            return JSONResponse({"id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})
        if verb == "tree":
            return JSONResponse([entry(file, files) for file in sorted(files)])
        assert verb == "preupload", verb
        paths = [file["path"] for file in json.loads(content)["files"]]
        modes = {path: "lfs" if path.endswith(LARGE) else "regular" for path in paths}
        return JSONResponse({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def create(self, asked: dict[str, Any]) -> Response:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repos:
            return JSONResponse({"error": "You already created this repo", "url": f"{self.url}/{name}"}, 409)
        self.repos[name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        return JSONResponse({"url": f"{self.url}/{name}", "name": name})

    def batch(self, asked: dict[str, Any]) -> Response:
        """Return where to upload each object, except those that exist."""
        objects = []
        for item in asked["objects"]:
            put = {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}
            objects.append(item | ({} if item["oid"] in self.objects else {"actions": put}))
        return JSONResponse({"transfer": "basic", "objects": objects})

    def commit(self, repo: Repo, name: str, lines: list[dict[str, Any]]) -> Response:
        parent = next((line["value"].get("parentCommit") for line in lines if line["key"] == "header"), None)
        if parent not in (None, repo.sha):
            return refused(412)
        repo.history[repo.sha] = dict(repo.files)
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                repo.commits.append(value["summary"])
            elif key == "deletedFile":
                del repo.files[value["path"]]
            elif key in ("file", "lfsFile"):
                sent = base64.b64decode(value["content"]) if key == "file" else self.objects[value["oid"]]
                repo.files[value["path"]] = sent
        return JSONResponse({"commitOid": repo.sha, "commitUrl": f"{self.url}/{name}/commit/{repo.sha}"})

    def download(self, repo: Repo, revision: str, path: str, request: Request) -> Response:
        files, sha = repo.at(revision) or {}, repo.sha if revision == "main" else revision
        if path not in files:
            return refused(404, "EntryNotFound", **{"X-Repo-Commit": sha})
        content, described = files[path], entry(path, files)
        etag = described.get("lfs", described)["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        start, status = 0, 200
        if asked := request.headers.get("Range"):
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        headers["Content-Length"] = str(len(content) - start)
        return Response(content[start:], status, headers)

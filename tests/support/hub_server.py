"""A server that speaks the Hugging Face Hub's HTTP API as far as huggingface_hub uses it to push and pull a model.

    with HubServer() as hub: ...        hub.url, hub.repos, hub.log; hub.trouble makes it misbehave

A test's own, which the client in this process talks to, is the fixture `server` of tests/conftest.py.

Files with an ending in LARGE go through git-lfs's basic transfer, the others stand in the commit itself, as on the Hub.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

LARGE = (".safetensors", ".bin", ".pt", ".html")
TOKEN = "hf_the-only-token-that-is-good"


class Repo:
    def __init__(self, private: bool):
        self.private = private
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []

        self.history: dict[str, dict[str, bytes]] = {}  # the files of every commit, by its sha

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files.items()))).encode()).hexdigest()

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a revision: a commit, or main."""
        return self.files if revision in ("main", self.sha) else self.history.get(revision)

    def entry(self, path: str, files: dict[str, bytes]) -> dict[str, Any]:
        """Describe a file as /tree and /paths-info do."""
        content = files[path]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if path.endswith(LARGE):
            found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return found


class HubServer:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # of git-lfs, by sha256
        self.log: list[str] = []  # "PUT /lfs/..." of every request
        # Called with (method, path); a number is sent as that status, "cut" breaks the connection in the body.
        self.trouble: Callable[[str, str], int | str | None] = lambda method, path: None
        hub = self

        class Handler(Requests):
            server_hub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: bytes = b"", head_only: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not head_only:
            self.wfile.write(content)

    def json(self, content: Any, status: int = 200, **headers: str) -> None:
        body, head_only = json.dumps(content).encode(), self.command == "HEAD"
        self.answer(status, body, head_only, Content_Type="application/json", **headers)

    def refused(self, status: int) -> None:
        words = {
            401: "Invalid credentials in Authorization header",
            403: "Forbidden",
            412: "Precondition failed",
            429: "Too many requests",
        }
        self.json({"error": words.get(status, "no")}, status, X_Error_Message=words.get(status, "no"))

    def missing(self) -> None:
        self.json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def handle_one(self) -> None:
        hub, path = self.server_hub, unquote(urlparse(self.path).path)
        content = self.body()
        hub.log.append(f"{self.command} {path}")
        trouble = hub.trouble(self.command, path)
        if isinstance(trouble, int):
            return self.refused(trouble)
        if trouble == "drop":
            self.close_connection = True
            return None
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}") and not path.startswith("/lfs/"):
            return self.refused(401)
        return self.route(hub, path, content, given is not None, cut=trouble == "cut")

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def route(self, hub: HubServer, path: str, content: bytes, known: bool, cut: bool) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(hub, json.loads(content), known)
        if parts[0] == "lfs":
            hub.objects[parts[1]] = content
            return self.answer(200)
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2]).removesuffix(".git")
        repo = hub.repos.get(name)
        if repo is None or (repo.private and not known):
            return self.missing()
        if parts[0] != "api":
            if parts[2:4] == ["info", "lfs"]:
                return self.batch(hub, json.loads(content))
            return self.download(repo, parts[3], "/".join(parts[4:]), cut)
        verb, revision = parts[4] if len(parts) > 4 else "revision", parts[5] if len(parts) > 5 else "main"
        files = repo.at(revision)
        if files is None:
            return self.json({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        if verb == "revision":
            sha, siblings = repo.sha if files is repo.files else revision, [{"rfilename": f} for f in sorted(files)]
            return self.json({"id": name, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})
        if verb == "tree":
            return self.json([repo.entry(file, files) for file in sorted(files)])
        if verb == "paths-info":
            asked = parse_qs(content.decode()).get("paths", []) if content[:1] != b"{" else json.loads(content)["paths"]
            return self.json([repo.entry(file, files) for file in asked if file in files])
        if verb == "preupload":
            asked = json.loads(content)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in asked}
            return self.json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        assert verb == "commit", path
        return self.commit(hub, repo, name, [json.loads(line) for line in content.splitlines()])

    def create(self, hub: HubServer, asked: dict[str, Any], known: bool) -> None:
        if not known:
            return self.refused(401)
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repos:
            return self.json({"error": "You already created this model repo", "url": f"{hub.url}/{name}"}, 409)
        hub.repos[name] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        return self.json({"url": f"{hub.url}/{name}", "name": name})

    def batch(self, hub: HubServer, asked: dict[str, Any]) -> None:
        """Return where to upload each object, except those that exist."""
        objects = []
        for item in asked["objects"]:
            put = {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}
            objects.append(item | ({} if item["oid"] in hub.objects else {"actions": put}))
        self.json({"transfer": "basic", "objects": objects})

    def commit(self, hub: HubServer, repo: Repo, name: str, lines: list[dict[str, Any]]) -> None:
        parent = next((line["value"].get("parentCommit") for line in lines if line["key"] == "header"), None)
        if parent not in (None, repo.sha):
            return self.refused(412)
        repo.history[repo.sha] = dict(repo.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del repo.files[value["path"]]
            elif line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "header":
                repo.commits.append(value["summary"])
        self.json({"success": True, "commitOid": repo.sha, "commitUrl": f"{hub.url}/{name}/commit/{repo.sha}"})

    def download(self, repo: Repo, revision: str, path: str, cut: bool) -> None:
        files, sha = repo.at(revision) or {}, repo.sha if revision == "main" else revision
        if path not in files:
            return self.json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        content, entry = files[path], repo.entry(path, files)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": sha, "Accept_Ranges": "bytes"}
        start, status = 0, 200
        if self.headers.get("Range"):
            start, status = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]), 206
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        headers["Content_Length"] = str(len(rest))
        if cut and self.command == "GET":
            self.answer(status, rest[: len(rest) // 2], **headers)
            self.close_connection = True
            return None
        return self.answer(status, rest, head_only=self.command == "HEAD", **headers)

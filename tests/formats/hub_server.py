"""The endpoints of the Hugging Face hub that its client calls, on this machine, with repositories in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"


class Hub(ThreadingHTTPServer):
    """`repos` maps OWNER/NAME to branches, and these to files; `private` ones need the token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code)

    def allowed(self, repo: str) -> bool:
        """Whether the repository is there for this user, as the hub answers: 401 without a token, 404 with one."""
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo in self.server.repos and (known or repo not in self.server.private):
            return True
        self.refuse(404 if known else 401, "RepoNotFound")
        return False

    def files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        branches = self.server.repos[repo]
        found = branches.get(revision, next((b for b in branches.values() if commit_of(b) == revision), None))
        if found is None:
            self.refuse(404, "RevisionNotFound")
        return found

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            repo, revision = found[1], found[2] or "main"
            if self.allowed(repo) and (files := self.files(repo, revision)) is not None:
                siblings = [{"rfilename": name} for name in files]
                self.answer({"id": repo, "modelId": repo, "sha": commit_of(files), "siblings": siblings})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            if self.allowed(found[1]) and (files := self.files(found[1], found[2])) is not None:
                self.answer(
                    [
                        {"type": "file", "path": name, "size": len(files[name]), "oid": commit_of({name: files[name]})}
                        for name in sorted(files)
                        if name.startswith(found[3] or "")
                    ]
                )
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if self.allowed(found[1]) and (files := self.files(found[1], found[2])) is not None:
                if found[3] not in files:
                    self.refuse(404, "EntryNotFound")
                    return
                etag = commit_of({found[3]: files[found[3]]})
                self.answer(files[found[3]], ETag=f'"{etag}"', X_Repo_Commit=commit_of(files))
        else:
            self.refuse(404, "Unknown")

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if repo in self.server.repos:
                self.answer({"error": "already there", "url": f"{self.server.address}/{repo}"}, 409)
                return
            self.server.repos[repo] = {"main": {}}
            # Newer clients send `visibility`, older ones `private`.
            hidden = asked.get("visibility") == "private" or asked.get("private")
            self.server.private |= {repo} if hidden else set()
            self.answer({"url": f"{self.server.address}/{repo}", "name": repo})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            self.server.repos[found[1]].setdefault(found[2], dict(self.server.repos[found[1]]["main"]))
            self.answer({})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            files = self.server.repos[found[1]][found[2]]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            oid = commit_of(files)
            address = f"{self.server.address}/{found[1]}/commit/{oid}"
            self.answer({"success": True, "commitOid": oid, "commitUrl": address, "hookOutput": ""})
        else:
            self.refuse(404, "Unknown")


@contextmanager
def running() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()

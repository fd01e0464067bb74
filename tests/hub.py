"""A hub on 127.0.0.1 that speaks the routes of Hugging Face's which `huggingface_hub` and `datasets` ask."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repo:
    """Folders by commit, and the commits that names mean; who may see it, and who may have its files."""

    commits: dict[str, Path] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str = ""
    gated: bool = False

    def add(self, folder: Path, ref: str = "main") -> str:
        """Commit a folder, and let `ref` mean it."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        self.commits[commit], self.refs[ref] = folder, commit
        return commit


class Hub:
    """`repos` by "models/ORG/NAME" or "datasets/ORG/NAME"; `asked` are the requests, as "GET /path"."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[str] = []
        self.silent = threading.Event()  # set: no request is answered
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repo(self, name: str) -> Repo:
        return self.repos.setdefault(name, Repo())

    def fetched(self) -> list[str]:
        """The names of the files that were sent, in alphabetical order; forgets all requests so far."""
        sent = sorted(one.rpartition("/")[2] for one in self.asked if one.startswith("GET") and "/resolve/" in one)
        self.asked.clear()
        return sent


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        while self.hub.silent.is_set():
            self.hub.silent.wait(0.01)
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[api:]
        if not api and parts[0] != "datasets":
            parts.insert(0, "models")
        repo = self.hub.repos.get("/".join(parts[:3]))
        asks = parts[3] if len(parts) > 3 else "revision"
        named = "/".join(parts[4:]) or "main"
        if repo is None or (repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"):
            return self._say(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if asks == "resolve":
            revision, _, name = named.partition("/")
        else:
            revision, _, name = (named, "", "") if named in repo.refs else named.partition("/")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._say(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        folder = repo.commits[commit]
        if asks == "resolve":
            if repo.gated:
                return self._say(403, {"error": "restricted"}, {"X-Error-Code": "GatedRepo"})
            return self._file(folder / name, commit)
        if asks == "revision":
            siblings = [
                {"rfilename": p.relative_to(folder).as_posix()} for p in sorted(folder.rglob("*")) if p.is_file()
            ]
            return self._say(200, {"id": "/".join(parts[1:3]), "sha": commit, "siblings": siblings})
        if asks == "paths-info":
            places = [folder / path for path in json.loads(body)["paths"] if (folder / path).exists()]
        else:
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
            places = sorted((folder / name).rglob("*") if recursive else (folder / name).glob("*"))
        self._say(200, [_entry(place, folder) for place in places])

    def _file(self, file: Path, commit: str) -> None:
        if not file.is_file():
            return self._say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        self._send(200, file.read_bytes(), "application/octet-stream", headers)

    def _say(self, status: int, answer: object, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(answer).encode(), "application/json", headers or {})

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(place: Path, folder: Path) -> dict[str, object]:
    about = {"path": place.relative_to(folder).as_posix(), "oid": "0" * 40}
    if place.is_dir():
        return {"type": "directory", "size": 0, **about}
    return {"type": "file", "size": place.stat().st_size, **about, "oid": _etag(place)}


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()

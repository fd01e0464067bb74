"""A package `vllm` that stands for the real one where that needs GPUs: it notes how it is started, and answers HTTP."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAIN = """
import http.server, json, os, pathlib, signal, sys

FOLDER = pathlib.Path(__file__).parents[3]


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
        given = body.get("kv_transfer_params") or {}
        mine = "http://%s:%d" % self.server.server_address
        self.reply({"choices": [], "kv_transfer_params": {"path": [*given.get("path", []), mine]}})

    def reply(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def main():
    words = sys.argv[1:]
    port = int(words[words.index("--port") + 1]) if "--port" in words else 0
    kept = {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "VLLM_", "GLOO_", "INSTEP_DIE"))}
    if port:
        server = http.server.ThreadingHTTPServer((words[words.index("--host") + 1], port), Handler)
    entry = {"argv": words, "env": kept, "pid": os.getpid(), "port": port}
    (FOLDER / ("writing.%d" % os.getpid())).write_text(json.dumps(entry))
    os.replace(FOLDER / ("writing.%d" % os.getpid()), FOLDER / ("started-%d.json" % os.getpid()))
    if port:
        server.serve_forever()
    signal.pause()
"""


@dataclass
class Stub:
    folder: Path

    def wait_started(self, count: int) -> list[dict[str, Any]]:
        """`started`, when there are so many."""
        deadline = time.monotonic() + 60
        while len(entries := self.started()) < count:
            assert time.monotonic() < deadline, entries
            time.sleep(0.05)
        return entries

    def started(self) -> list[dict[str, Any]]:
        """Of each process that was started: `argv` after the program, `env`, `pid`, `port` (0: it serves none)."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("started-*.json"))]


def install(folder: Path, monkeypatch: Any) -> Stub:
    """Put it, and an empty `nixl`, before every installed package, here and in the processes that are started."""
    (folder / "vllm/entrypoints/cli").mkdir(parents=True)
    for package in ("vllm", "vllm/entrypoints", "vllm/entrypoints/cli"):
        (folder / package / "__init__.py").touch()
    (folder / "vllm/entrypoints/cli/main.py").write_text(MAIN)
    (folder / "nixl.py").touch()
    (folder / "vllm-0.32.0.dist-info").mkdir()
    (folder / "vllm-0.32.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    return Stub(folder)

"""A server that stands for an SGLang engine behind a router."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from instep.engines import keys

ANSWER = {"text": "", "output_ids": [1], "meta_info": {"id": "a", "finish_reason": {"type": "length", "length": 1}}}
ABOUT = {
    **{"model_path": "", "is_generation": True, "version": "0.5.17", "data": [{"owned_by": "sglang"}]},
    **{"internal_states": [], "sampling_backend": "pytorch", "dp_size": 1, "enable_dp_attention": False, "pp_size": 1},
    **{"speculative_algorithm": None, "device": "cpu"},
}


class _Handler(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self.reply(404 if self.path == "/version" else 200, ABOUT)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers.get("Authorization"), body))
        time.sleep(self.server.delay)
        self.reply(self.server.status, ANSWER)

    def reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Worker(ThreadingHTTPServer):
    """Answers as an SGLang server does, and notes key and JSON of each request."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, key: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key, self.url = key, f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.reset()

    def reset(self) -> None:
        self.asked: list[tuple[str | None, dict[str, Any]]] = []
        self.status, self.delay = 200, 0.0
        keys.know(self.url, self.key)

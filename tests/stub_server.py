"""A server on loopback whose GETs answer with given texts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield the URL of a server that answers each path with what `texts` has for it at that time."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = texts[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

"""A decode engine is asked together with a prefill engine that has the same weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from instep.engines.engine import Engine
from instep.engines.sglang_pairs import partner_of
from instep.errors import EngineError


@contextmanager
def serving(version: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"weight_version": version}).encode()
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


def test_a_prefill_engine_that_is_down_or_has_other_weights_is_passed_over() -> None:
    with ExitStack() as stack:
        with serving("3") as gone:
            pass
        old, new, url = (stack.enter_context(serving(version)) for version in ("2", "3", "3"))
        decode = Engine("engine 3", url, role="decode")
        decode.prefills = [Engine(f"engine {i}", at, role="prefill") for i, at in enumerate((gone, old, new))]
        assert partner_of(decode).name == "engine 2"
        decode.prefills = decode.prefills[:2]
        with pytest.raises(EngineError, match=r"no prefill engine answers with the weights of engine 3 \(3\)"):
            partner_of(decode)

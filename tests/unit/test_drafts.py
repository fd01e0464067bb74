"""The share of accepted drafts follows from vLLM's own counters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from instep.controller.drafts import AcceptedDrafts
from instep.engines.engine import Engine
from instep.engines.vllm import KIND

COUNTS = 'vllm:spec_decode_num_{name}_tokens_total{{engine="{rank}",model_name="m"}} {count}.0\n'
PER_POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 99.0\n'


@pytest.fixture
def vllm() -> Iterator[tuple[Engine, dict[str, str]]]:
    """An engine whose metrics are the text that the dict has."""
    said: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = said[self.path].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Engine("engine 0", f"http://127.0.0.1:{server.server_port}", kind=KIND), said
        server.shutdown()


def test_it_is_that_of_the_drafts_since_the_last_call(vllm: tuple[Engine, dict[str, str]]) -> None:
    engine, said = vllm
    drafts = AcceptedDrafts()

    def counters(*counts: tuple[int, int]) -> None:
        both = [
            (name, rank, n)
            for rank, two in enumerate(counts)
            for name, n in zip(("draft", "accepted"), two, strict=True)
        ]
        said["/metrics"] = PER_POSITION + "".join(COUNTS.format(name=a, rank=b, count=n) for a, b, n in both)

    said["/metrics"] = "vllm:num_requests_running 0.0\n"
    assert drafts.take([engine]) == {}
    counters((100, 40), (20, 20))  # two replicas
    assert drafts.take([engine]) == {"perf/accepted_drafts": 0.5}
    assert drafts.take([engine]) == {}  # nothing was drafted
    counters((180, 60), (40, 20))
    assert drafts.take([engine]) == {"perf/accepted_drafts": 0.2}
    counters((10, 9), (0, 0))  # started again
    assert drafts.take([engine]) == {}

"""The server of the page: on loopback, behind a token in its URL, and it only reads.

Who does not know the token gets nothing: neither other users of the host nor pages of other sites in the browser. A
name of another site that resolves to 127.0.0.1 (DNS rebinding) is refused by its Host header. The page may load nothing
from elsewhere and run no code but its own files (Content-Security-Policy). Texts of samples get into it as text alone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from instep.errors import ConfigError
from instep.observability.plots import COLORS, PANELS
from instep.observability.report import STYLE
from instep.observability.view.runs import RunFiles, Runs, compare
from instep.observability.view.tail import DAMAGE

FIRST_PORT, NUM_PORTS = 8620, 20
HOSTS = ("127.0.0.1", "localhost")  # with any port: a tunnel may have another
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Query = Mapping[str, str]


class ViewServer(ThreadingHTTPServer):
    """Serve the page of some runs. `url` has the token.

    Args:
        port: 0: any free one; None: the first free one from `FIRST_PORT` on.

    Raises:
        ConfigError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: Runs, port: int | None = None):
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        wanted = range(FIRST_PORT, FIRST_PORT + NUM_PORTS) if port is None else [port]
        for number in wanted:
            try:
                super().__init__(("127.0.0.1", number), _Handler)
                break
            except OSError as error:
                if number == wanted[-1]:
                    what, remedy = f"port {number} cannot be used: {error.strerror}", "--port 0 takes any free port"
                    raise ConfigError(what, where="instep view --port", remedy=remedy) from error
        self.url = f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def answer(self, path: str, query: Query) -> tuple[str, bytes]:
        """Return the type and content of what lies below the token.

        Raises:
            LookupError: there is nothing. ValueError: the query is wrong.
        """
        if path.startswith("api/"):
            return "application/json", json.dumps(self._data(path[4:], query), ensure_ascii=False).encode()
        name = path or "index.html"
        if name == "style.css":
            return TYPES["css"], STYLE.read_bytes()
        page = {file.name: file for file in files(__package__).joinpath("page").iterdir()}
        return TYPES[name.rpartition(".")[2]], page[name].read_bytes()

    def _data(self, name: str, query: Query) -> Any:
        if name == "runs":
            return {"runs": self.runs.about(), "panels": PANELS, "colors": COLORS}
        chosen = [self.runs.all()[int(number)] for number in query.get("runs", "").split(",") if number]
        if name == "flags":
            return compare([run.args() for run in chosen])
        of_run: dict[str, Callable[[RunFiles], Any]] = {
            "curves": lambda run: run.curves(),
            "timeline": lambda run: run.timeline(query),
            "processes": lambda run: run.processes(),
            "samples": lambda run: run.samples.page(query),
            "sample": lambda run: run.samples.sample(int(query["at"])),
        }
        read = of_run[name]
        return [read(run) for run in chosen]


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version, server_version, sys_version = "HTTP/1.1", "instep", ""
    timeout = 60  # seconds without a request on an open connection

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in HOSTS:
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is served to 127.0.0.1 alone")
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", str(error).encode())
        _, token, *rest = [*url.path.split("/", 2), ""]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"open the URL that `instep view` has printed")
        if not url.path[len(token) + 1 :]:  # the page's own files are named relative to it
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"the URL ends with a slash")
        try:
            kind, content = self.server.answer(rest[0], dict(parse_qsl(url.query)))
        except LookupError as error:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", f"not found: {error}".encode())
        except (OSError, *DAMAGE) as error:  # of the query, or of a file that is gone or damaged
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", str(error).encode())
        self._send(HTTPStatus.OK, kind, content)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the browser has left
            super().handle()

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # the terminal has the URL, and nothing else
        pass

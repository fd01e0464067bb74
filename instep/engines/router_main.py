"""`python -m instep.engines.router_main ...`: vllm-router behind a key, in a process that ends with its parent.

vllm-router has no key for its admin routes. But it asks a URL whether the key of a request is valid, once for each key.
A child of this process answers that. vllm-router then requires a key on every route.
"""

import hmac
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from instep.system.processes import LIFELINE_VARIABLE, follow_parent
from instep_engine.guard import KEY_VARIABLE


class _Validator(BaseHTTPRequestHandler):
    expected, timeout = b"", 10.0

    def do_GET(self) -> None:
        sent = self.headers.get("Authorization", "").encode(errors="surrogateescape")
        self.send_response(200 if hmac.compare_digest(sent, self.expected) else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def serve_validator(key: str) -> ThreadingHTTPServer:
    """Answer in a child process whether a request has `key`.

    This process keeps the server's socket, too, so that no other process can answer at its port if the child ends.
    """
    _Validator.expected = f"Bearer {key}".encode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Validator)
    if os.fork() == 0:
        os.environ.pop(LIFELINE_VARIABLE, None)  # it belongs to the router
        follow_parent()
        server.serve_forever()
    return server


def main() -> None:
    validator = serve_validator(os.environ[KEY_VARIABLE])
    follow_parent()
    from vllm_router.launch_router import launch_router, parse_router_args

    args = parse_router_args(sys.argv[1:])
    url = f"http://127.0.0.1:{validator.server_port}/"
    args.api_key_validation_urls = [url]  # a parameter of the router without a command-line flag
    launch_router(args)


if __name__ == "__main__":
    main()

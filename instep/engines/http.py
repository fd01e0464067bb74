"""HTTP to engines and routers, which bypasses proxies of the environment: both have plain addresses."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

open_directly = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def get_json(url: str, timeout: float) -> Any:
    """The JSON that answers a GET of `url`.

    Raises:
        OSError: nobody answered in `timeout` seconds, or with an error (urllib.error.HTTPError).
        ValueError: the answer is no JSON.
    """
    with open_directly(url, timeout=timeout) as answer:
        return json.loads(answer.read())

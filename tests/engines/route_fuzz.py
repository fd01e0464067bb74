"""Random and malformed requests to every route of the embedded engine and of `instep serve`: they must survive them."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

SECONDS = 30.0  # for an answer: a hang is longer
HELLO = [{"role": "user", "content": "3 + 4 ="}]
GENERATION = {
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 3, "seed": 1, "temperature": 1.0},
    },
    "/v1/completions": {"prompt": "3 + 4", "max_tokens": 3, "n": 2, "stop": ["x"], "logprobs": 0},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3, "logprobs": True, "chat_template_kwargs": {"x": 1}},
}
OF_TRL = {
    "/generate/": {
        "prompts": ["3 + 4", [5, 6]],
        "n": 2,
        "max_tokens": 3,
        "logprobs": 1,
        "generation_kwargs": {"seed": 1},
    },
    "/chat/": {"messages": [HELLO], "max_tokens": 3, "chat_template_kwargs": {}, "tools": None},
    "/get_sequence_logprobs/": {"sequences": [[5, 6, 7]], "prompt_lengths": [1], "top_logprobs": 2},
    "/v1/completions": {"prompt": ["3 + 4"], "max_tokens": 3, "return_token_ids": True, "logprobs": 0},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3, "return_token_ids": True, "logprobs": True},
}
RECORD = {"name": "model.norm.weight", "shape": [2], "dtype": "float32", "offset": 0, "nbytes": 8, "digest": "0" * 32}
MANIFEST = {"path": "/dev/shm/instep-sync-1/b", "version": "1", "nonce": "n", "tensors": [RECORD]}
CONTROL = {
    "/pause": {},
    "/resume": {},
    "/abort_requests": {"request_ids": ["a"]},
    "/reset_prefix_cache": {},
    "/weight_checker": {"action": "checksum"},
    "/start_weight_update": {"version": "1", "nonce": "n"},
    "/update_weights": {"update_info": {"backend": "shm", "manifest": MANIFEST}},
    "/update_weight_version": {"new_version": "1"},
    "/finish_weight_update": {"weight_version": "1"},
    "/nowhere": {},
}
READING = ("/health", "/is_paused", "/weight_info", "/v1/models")
KEYS = (
    "model request_id return_token_ids stream stream_options n seed max_tokens min_tokens top_k top_p temperature stop "
)
KEYS += "stop_token_ids ignore_eos prompt_logprobs logprobs skip_special_tokens detokenize max_completion_tokens path "
KEYS += "prompt messages token_ids sampling_params chat_template tools backend manifest tensors shape dtype offset user"


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, with a liking for edges."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**300, 10**4000]),
        lambda: rng.choice([0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")]),
        lambda: rng.choice(
            ["", "a", "\0", "\ud800", "\udfff\ud83d", "\U0001f600", "x" * 5000, "../../etc/passwd", "/dev/zero"]
        ),
        lambda: "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0x3000)])) for _ in range(rng.randrange(9))),
        lambda: rng.choice(HELLO) | {rng.choice(["role", "content"]): value(rng, depth + 1)},
    ]
    if depth < 4:
        kinds.append(lambda: [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 40]))])
        kinds.append(lambda: {rng.choice(KEYS.split()): value(rng, depth + 1) for _ in range(rng.randrange(4))})
    return rng.choice(kinds)()


def changed(rng: random.Random, body: Any, depth: int = 0) -> Any:
    """A valid body with something else in one place: a value, a key more, a key less."""
    if isinstance(body, dict) and body and depth < 5 and rng.random() < 0.85:
        out, key = dict(body), rng.choice(sorted(body))
        how = rng.randrange(4)
        if how == 0:
            out[rng.choice(KEYS.split())] = value(rng)
        elif how == 1:
            del out[key]
        else:
            out[key] = changed(rng, body[key], depth + 1)
        return out
    if isinstance(body, list) and body and rng.random() < 0.6:
        return [*body[:-1], changed(rng, body[-1], depth + 1)]
    return value(rng)


def raw(rng: random.Random, body: Any) -> bytes:
    """JSON; now and then what is none."""
    data = json.dumps(body, ensure_ascii=rng.random() < 0.8).encode(errors="surrogatepass")
    how = rng.random()
    if how < 0.04:
        return data[: rng.randrange(len(data) + 1)]
    if how < 0.08:
        at = rng.randrange(len(data) + 1)
        return data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at:]
    if how < 0.1:
        return rng.choice([b"[" * 10_000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"", b"\0", rng.randbytes(50)])
    return data


def requests(seed: int, num: int, bodies: dict[str, Any]) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Method, path, body and headers of `num` requests."""
    rng = random.Random(seed)
    for _ in range(num):
        path = rng.choice(sorted(bodies))
        body = bodies[path]
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            body = changed(rng, body)
        headers = {"Content-Type": rng.choice(["application/json", "text/plain", ""])}
        if rng.random() < 0.1:
            headers["x-request-id"] = rng.choice(["", "a" * 3000, "\xff\xfe", "a"])
        if rng.random() < 0.03:
            headers["Content-Encoding"] = rng.choice(["gzip", "deflate", "br", "nonsense"])
        query = rng.choice(["", "", "?mode=keep", "?mode=abort&clear_cache=x", "?mode=%00", "?mode=wait&mode=x"])
        method = "POST" if rng.random() < 0.95 else rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
        if rng.random() < 0.05:
            method, path = "GET", rng.choice(READING)
        yield method, path + (query if path in bodies and rng.random() < 0.3 else ""), raw(rng, body), headers


def ask(url: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Status and body of the answer, which must come within `SECONDS`."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def fuzz(
    url: str, seed: int, num: int, bodies: dict[str, Any], *, headers: dict[str, str] | None = None
) -> dict[int, int]:
    """How many answers of each status came; raises on one of 500 or none at all. 503 says that weights are missing."""
    seen: dict[int, int] = {}
    for number, (method, path, body, more) in enumerate(requests(seed, num, bodies)):
        asked = f"seed {seed}, request {number}: {method} {path} {more} {body[:2000]!r}"
        try:
            status, answer = ask(url, method, path, body, more | (headers or {}))
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"no answer: {error!r} to {asked}") from error
        assert status < 500 or status == 503, f"{status} {answer[:500]!r} to {asked}"
        assert b"Traceback" not in answer, asked
        seen[status] = seen.get(status, 0) + 1
    return seen

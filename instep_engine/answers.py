"""Answers to generation requests as arrays.

A client requests them with `Accept: application/vnd.instep.tokens` on vLLM's own route. Such an answer begins with the
length of its header (uint32) and the header, which is JSON with a list of choices. Then follow for each choice its
token ids (int32), its log-probs (float32) and, if it has `routes` (bytes of a number, then the shape), its routed
experts. All numbers are little-endian. A choice has `num_tokens`, and what vLLM's JSON says besides the tokens.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

CONTENT_TYPE = "application/vnd.instep.tokens"
_LENGTH = struct.Struct("<I")
_ARRAYS = ("token_ids", "log_probs", "routed_experts")
_SMALLEST = -9999.0  # vLLM's JSON uses it for minus infinity


def encode(choices: Sequence[dict[str, Any]]) -> bytes:
    """Return the answer with `choices`. Each has the lists `token_ids` and `log_probs` of equal length.

    A choice may also have `routed_experts`, `[num_tokens, num_layers, experts per token]`.
    """
    header, arrays = [], []
    for choice in choices:
        ids = np.asarray(choice["token_ids"], "<i4")
        log_probs = np.maximum(np.asarray(choice["log_probs"], "<f4"), np.float32(_SMALLEST))
        if ids.shape != log_probs.shape:
            raise ValueError(f"{ids.size} tokens with {log_probs.size} log-probs")
        rest = {name: value for name, value in choice.items() if name not in _ARRAYS}
        header.append({**rest, "num_tokens": ids.size})
        arrays += [ids.tobytes(), log_probs.astype("<f4", copy=False).tobytes()]
        if choice.get("routed_experts") is not None:
            experts = np.asarray(choice["routed_experts"])
            experts = experts.astype("<i2" if experts.max(initial=0) > 255 else "u1")
            header[-1]["routes"] = [experts.itemsize, *experts.shape]
            arrays.append(experts.tobytes())
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *arrays])


def decode(body: bytes) -> dict[str, Any]:
    """Return the answer in the form of vLLM's JSON. Each choice has a list `log_probs` instead of `logprobs`.

    Raises:
        ValueError: it has another form.
    """
    try:
        (length,) = _LENGTH.unpack_from(body)
        at = _LENGTH.size + length
        choices = json.loads(body[_LENGTH.size : at])
        for choice in choices:
            n = choice.pop("num_tokens")
            choice["token_ids"] = np.frombuffer(body, "<i4", n, at).tolist()
            choice["log_probs"] = np.frombuffer(body, "<f4", n, at + 4 * n).tolist()
            at += 8 * n
            if "routes" in choice:
                size, *shape = choice.pop("routes")
                experts = np.frombuffer(body, "<i2" if size == 2 else "u1", math.prod(shape), at).reshape(shape)
                choice["routed_experts"] = experts
                at += experts.nbytes
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer in arrays: {error!r}") from error
    if at != len(body):
        raise ValueError(f"an answer of {len(body)} bytes, but its header announces {at}")
    return {"choices": choices}

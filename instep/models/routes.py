"""The experts that an engine chose for each token, which training can replay (router replay, arXiv 2510.11370).

Routes are an array `[num_tokens, num_layers, experts per token]` of small integers. It has a row for each token that
the engine computed, dense layers included: all tokens of a sample but the last, which was sampled but not read.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np


def as_routes(rows: Any) -> np.ndarray:
    """Convert rows of any type to `uint8`, or `int16` where a layer has more than 256 experts.

    Raises:
        ValueError: they are not whole numbers >= 0, in three dimensions.
    """
    rows = np.asarray(rows)
    if rows.ndim != 3 or rows.dtype.kind not in "iu" or (rows.size and not 0 <= rows.min() <= rows.max() < 2**15):
        raise ValueError(f"routed experts are [tokens, layers, experts per token] from 0, not {rows.dtype}{rows.shape}")
    return rows.astype(np.uint8 if not rows.size or rows.max() < 256 else np.int16, copy=False)


def encode(rows: Any) -> str:
    """Return routes as text for JSON: an `.npy` file in base64, as in vLLM's answers."""
    file = io.BytesIO()
    np.save(file, as_routes(rows), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def decode(text: str) -> np.ndarray:
    """Return the routes from a text of `encode` or vLLM. Raises ValueError for any other text."""
    try:
        return as_routes(np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False))
    except (EOFError, OSError, TypeError) as error:
        raise ValueError(f"these are not routed experts: {error}") from error


def extended(known: Any, rows: Any, num_tokens: int) -> np.ndarray:
    """Return the routes of all but the last of `num_tokens` tokens: `known`, then the last of `rows`.

    `known` routes stay even if the engine computed those tokens again: the tokens were sampled with these routes.

    Raises:
        ValueError: there are fewer `rows` than tokens without a route, or more `known` than tokens, or they belong to
            another model.
    """
    rows = as_routes(rows)
    known = rows[:0] if known is None else as_routes(known)
    missing = num_tokens - 1 - len(known)
    if not 0 <= missing <= len(rows) or rows.shape[1:] != known.shape[1:]:
        what = f"{len(rows)} rows of {rows.shape[1:]} for {missing} tokens without a route"
        raise ValueError(f"routed experts: {what}, after {len(known)} rows of {known.shape[1:]}")
    return as_routes(np.concatenate([known, rows[len(rows) - missing :]]))

"""Sampled tokens with their log-probs out of vLLM as fast as without: three parts, each of which works by itself.

    --middleware instep_engine.vllm.fast.api.Middleware        answers with arrays, where the client asks for them
    --scheduler-cls instep_engine.vllm.fast.scheduler.make     tokens leave the engine core in bunches; shorter loops
    INSTEP_FAST_LOG_PROBS=1                             a kernel for the log-prob of the sampled token alone

Beside them `adapter.py` computes base and adapter in one product, for engines with one adapter.

Each says in the engine's log whether it is on, and why not. instep asks for all three for its own engines. Requests
that did not come through the middleware are treated as vLLM treats them, in the same batch, too.
"""

from __future__ import annotations

import re
from typing import Any

KEY = "instep_fast"  # in the `extra_args` of the sampling parameters, which reach the scheduler
BUNCH = 32  # tokens of a request that leave the engine core together
VERSIONS = range(26, 33)  # minor versions of vLLM 0.x, whose first and last are tested; in others all parts are off
RANGE = f"0.{VERSIONS[0]} to 0.{VERSIONS[-1]}"


def minor_version() -> int:
    """N of this vLLM 0.N; -1: its version is none of that form."""
    from vllm.version import __version__

    found = re.match(r"0\.(\d+)\.", __version__)
    return int(found[1]) if found else -1


def is_known() -> bool:
    """Whether this is the version of vLLM whose loops and sampler are known here."""
    return minor_version() == 26


def is_fast(params: Any) -> bool:
    """Whether a request with these sampling parameters came through the middleware; None: it has none."""
    extra = params.extra_args if params is not None else None
    return extra is not None and KEY in extra and params.logprobs == 0 and params.prompt_logprobs is None

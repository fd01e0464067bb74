"""Log-probs of sampled tokens at the full speed of vLLM. Its parts work independently.

    --middleware instep_engine.vllm.fast.api.Middleware        answers with arrays, where the client asks for them
    --scheduler-cls instep_engine.vllm.fast.scheduler.make     tokens leave the engine core in bunches; shorter loops
    INSTEP_FAST_LOG_PROBS=1                             kernels for the choice of tokens, their log-probs, attention

Besides, `adapter.py` computes base and adapter in one product, for engines with one adapter.

Each part logs when it is on. instep requests all three for its own engines. Requests that did not come through the
middleware are scheduled and answered as in stock vLLM, even in the same batch; the kernels serve all requests.
"""

from __future__ import annotations

import re
from typing import Any

KEY = "instep_fast"  # in the `extra_args` of the sampling parameters, which reach the scheduler
BUNCH = 32  # tokens of a request that leave the engine core together
VERSIONS = range(26, 33)  # minor versions of vLLM 0.x; the first and last are tested; in others all parts are off
RANGE = f"0.{VERSIONS[0]} to 0.{VERSIONS[-1]}"


def minor_version() -> int:
    """Return N of this vLLM 0.N; -1 for a version of another form."""
    from vllm.version import __version__

    found = re.match(r"0\.(\d+)\.", __version__)
    return int(found[1]) if found else -1


def is_known() -> bool:
    """Return whether the loops, the sampler and the attention of this vLLM version are known here."""
    return minor_version() == 26


def is_fast(params: Any) -> bool:
    """Return whether a request with these parameters came through the middleware; None: it has no parameters."""
    extra = params.extra_args if params is not None else None
    return extra is not None and KEY in extra and params.logprobs == 0 and params.prompt_logprobs is None

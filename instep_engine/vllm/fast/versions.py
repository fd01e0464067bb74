"""The weight version of each token of a fast request, in versions of vLLM that do not report it (before 0.32).

The API server passes the version of a session to the engine core, while the engine is paused. In the core no token of
the former weights waits beyond a pause (`core.py`). It marks every token with the version: by a negative number in
place of its rank, which fast requests do not need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from instep_engine.vllm.fast import VERSIONS, minor_version

UNKNOWN = 0  # marks tokens of weights that no session has brought
TOLD_BY_VLLM = 32  # vLLM reports it from this minor version on
LARGEST = 2**31 - 2
SCHEDULER = "instep_engine.vllm.fast.scheduler.make"  # as in `--scheduler-cls`; it installs what is called here
_METHOD = "instep_set_version"  # of the engine core


async def tell(llm: Any, version: str) -> None:
    """Let the cores of `llm`, vLLM's `AsyncLLM`, mark tokens with `version` from now on, if they have our scheduler."""
    wants_it = minor_version() in VERSIONS and minor_version() < TOLD_BY_VLLM
    if wants_it and llm.vllm_config.scheduler_config.scheduler_cls == SCHEDULER:
        await llm.engine_core.call_utility_async(_METHOD, version)


def install(core: type) -> None:
    """Let an engine core receive versions."""
    setattr(core, _METHOD, _set_version)


def _set_version(core: Any, version: str) -> None:
    known = version.isdecimal() and int(version) <= LARGEST
    core.scheduler.mark = -1 - int(version) if known else UNKNOWN


def spans(marks: Sequence[int | None]) -> list[dict[str, Any]]:
    """Return the spans of a response by the marks of its tokens; empty if a version is not known."""
    if any(mark is None or mark >= 0 for mark in marks):
        return []
    out, start = list[dict[str, Any]](), 0
    for mark, tokens in itertools.groupby(marks):
        end = start + len(list(tokens))
        out.append({"version": str(-1 - (mark or 0)), "start": start, "end": end})
        start = end
    return out

"""The list of faults, and of the scenarios that make them happen."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from tests.faults.harness import Place

FAULTS: dict[str, tuple[str, str]] = {}  # name -> what happens, outcome
SCENARIOS: dict[str, Callable[[Place], None]] = {}
SLOW: set[str] = set()
VLLM: set[str] = set()
SGLANG: set[str] = set()


def scenario(
    slow: bool = False, vllm: bool = False, sglang: bool = False, **faults: str
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """One function may try several faults, one after the other. `name="outcome: what happens"`.

    Args:
        slow: only `make test-full` and the document run it, because a faster test covers most of it.
        vllm, sglang: it needs vLLM, or SGLang with its router.
    """

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        for name, text in faults.items():
            outcome, what = text.split(": ", 1)
            FAULTS[name] = (what, outcome)
        SCENARIOS[function.__name__] = function
        SLOW.update([function.__name__] if slow else [])
        VLLM.update([function.__name__] if vllm else [])
        SGLANG.update([function.__name__] if sglang else [])
        return function

    return register


def unindent(*parts: str) -> str:
    """Pieces of code, one after the other."""
    return "\n".join(textwrap.dedent(part).strip("\n") for part in parts)

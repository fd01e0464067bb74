"""On a CPU vLLM sets its own start method, `spawn`: every core and worker would import vLLM again (8 s).

The environment's method stays in force. instep sets `fork` for engines whose server has started no OpenMP thread.
"""

from __future__ import annotations

import functools
import os
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def install() -> None:
    """Keep the start method of the environment when vLLM checks its configuration. Once in a process."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config
    if METHOD not in os.environ or hasattr(check, "__wrapped__"):
        return
    method = os.environ[METHOD]

    @functools.wraps(check)
    def check_and_keep(config: Any) -> None:
        check(config)
        os.environ[METHOD] = method

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)  # type: ignore[method-assign,assignment]

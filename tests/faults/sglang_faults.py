"""SGLang's processes: a server, which instep starts, and the scheduler that computes, which the server starts."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.harness import ENDLESS, Place, Run
from tests.faults.registry import scenario


def sglang(place: Place, *flags: str, **options: Any) -> Run:
    return place.run(*ENDLESS, "--rollout-backend", "sglang", "--sglang-max-total-tokens", "8192", *flags, **options)


@scenario(sglang=True, slow=True, sglang_killed="error: SGLang's server is killed (SIGKILL)")
def sglang_killed(place: Place) -> None:
    with sglang(place) as run:
        run.wait_steps()
        run.signal("sglang", signal.SIGKILL)
        run.error("sglang_killed", "EngineError: engine 0 died (SIGKILL)", "log")


@scenario(sglang=True, slow=True, sglang_scheduler_killed="error: SGLang's scheduler is killed (SIGKILL)")
def sglang_scheduler_killed(place: Place) -> None:
    with sglang(place) as run:
        run.wait_steps()
        run.signal("sglang", signal.SIGKILL, which=1)
        run.error("sglang_scheduler_killed", "EngineError: engine 0 died", "log")


@scenario(sglang=True, slow=True, sglang_stopped="error: SGLang's server is stopped (SIGSTOP)")
def sglang_stopped(place: Place) -> None:
    with sglang(place) as run:
        run.wait_steps()
        run.signal("sglang", signal.SIGSTOP)
        run.error("sglang_stopped", "EngineError: engine 0 is stopped", "SIGSTOP", "kill -CONT")


@scenario(
    sglang=True,
    slow=True,
    sglang_scheduler_hangs="error: SGLang's scheduler stands still (noticed after 3 s here, 5 minutes by default)",
)
def sglang_scheduler_hangs(place: Place) -> None:
    patch = "import instep.engines.sglang; instep.engines.sglang.SILENT_HEARTBEATS = 1"
    with sglang(place, "--heartbeat-timeout", "3", patches={"controller": patch}) as run:
        run.wait_steps()
        run.signal("sglang", signal.SIGSTOP, which=1)
        hangs = "EngineError: engine 0 hangs: it has computed nothing for "
        run.error("sglang_scheduler_hangs", hangs, "SIGSTOP")

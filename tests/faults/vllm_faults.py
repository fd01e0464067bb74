"""vLLM's processes: a server, which instep starts, and a core that computes, which the server starts."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.harness import ENDLESS, Place, Run
from tests.faults.registry import scenario

FLAGS = (*ENDLESS, "--rollout-max-response-len", "100", "--rollout-backend", "vllm")


def vllm(place: Place, *flags: str, **options: Any) -> Run:
    return place.run(*FLAGS, "--vllm-kv-cache-memory-bytes", str(128 << 20), *flags, **options)


@scenario(vllm=True, slow=True, vllm_killed="error: vLLM's server is killed (SIGKILL)")
def vllm_killed(place: Place) -> None:
    with vllm(place) as run:
        run.wait_steps()
        run.signal("vllm", signal.SIGKILL)
        run.error("vllm_killed", "EngineError: engine 0 died (SIGKILL)", "log")


@scenario(vllm=True, vllm_core_killed="error: vLLM's core is killed (SIGKILL)")
def vllm_core_killed(place: Place) -> None:
    with vllm(place) as run:
        run.wait_steps()
        run.signal("vllm", signal.SIGKILL, which=1)
        run.error("vllm_core_killed", "EngineError: engine 0 died", "log")


@scenario(vllm=True, slow=True, vllm_stopped="error: vLLM's server is stopped (SIGSTOP)")
def vllm_stopped(place: Place) -> None:
    with vllm(place) as run:
        run.wait_steps()
        run.signal("vllm", signal.SIGSTOP)
        run.error("vllm_stopped", "EngineError: engine 0 is stopped", "SIGSTOP", "kill -CONT")


@scenario(vllm=True, vllm_core_hangs="error: vLLM's core hangs (noticed after 3 s here, 5 minutes by default)")
def vllm_core_hangs(place: Place) -> None:
    patch = "import instep.engines.vllm; instep.engines.vllm.SILENT_HEARTBEATS = 1"
    with vllm(place, "--heartbeat-timeout", "3", patches={"controller": patch}) as run:
        run.wait_steps()
        run.signal("vllm", signal.SIGSTOP, which=1)
        hangs = "EngineError: engine 0 hangs: it has computed nothing for 3 s"
        run.error("vllm_core_hangs", hangs, "--heartbeat-timeout")

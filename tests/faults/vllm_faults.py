"""vLLM's processes: a server, which instep starts, and a core that computes, which the server starts."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.harness import ENDLESS, Place, Run
from tests.faults.process_faults import HANG
from tests.faults.registry import scenario, unindent

FLAGS = (*ENDLESS, "--rollout-backend", "vllm")


def vllm(place: Place, *flags: str, **options: Any) -> Run:
    return place.run(*FLAGS, "--vllm-kv-cache-memory-bytes", str(128 << 20), *flags, **options)


@scenario(vllm=True, slow=True, vllm_killed="error: vLLM's server is killed (SIGKILL)")
def vllm_killed(place: Place) -> None:
    with vllm(place) as run:
        run.wait_steps()
        run.signal("vllm", signal.SIGKILL)
        run.error("vllm_killed", "EngineError: engine 0 died (SIGKILL)", "log")


@scenario(vllm=True, slow=True, vllm_core_killed="error: vLLM's core is killed (SIGKILL)")
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


# In vLLM's core, once the test has made the file: when it next schedules a rollout's requests (not the two of a sync's
# proof, which has bounds of its own), it takes the interpreter's lock and never gives it back.
HANG_LATER = """
    import threading
    def wait():
        while not os.path.exists(os.environ["FAULT_MARK"] + "-now"):
            time.sleep(0.05)
        if open("/proc/self/comm").read().startswith("VLLM::Engine"):
            from vllm.v1.core.sched.scheduler import Scheduler
            schedule = Scheduler.schedule
            def late(self, *args, **kwargs):
                if len(self.running) + len(self.waiting) > 3:
                    hang()
                return schedule(self, *args, **kwargs)
            Scheduler.schedule = late
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=wait, daemon=True).start())
    threading.Thread(target=wait, daemon=True).start()
    """


@scenario(
    vllm=True, slow=True, vllm_core_hangs="error: vLLM's core hangs (noticed after 3 s here, 5 minutes by default)"
)
def vllm_core_hangs(place: Place) -> None:
    patch = "import instep.engines.vllm; instep.engines.vllm.SILENT_HEARTBEATS = 1"
    patches = {"controller": patch, "other": unindent(HANG, HANG_LATER)}
    with vllm(place, "--heartbeat-timeout", "3", patches=patches) as run:
        run.wait_steps()
        (place.folder / "run-code" / "mark-now").touch()
        hangs = "EngineError: engine 0 hangs: it has computed nothing for "
        run.error("vllm_core_hangs", hangs, "--heartbeat-timeout")

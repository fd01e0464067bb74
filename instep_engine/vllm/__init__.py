"""instep's additions to stock vLLM, through vLLM's own extension points. The plugin does not import instep.

vLLM calls `register` in its API server, its engine core and each worker (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
from types import ModuleType

from instep_engine import DRAFTER_VARIABLE, FAST_VARIABLE, LORA_VARIABLE, PARENT_VARIABLE, ROOM_VARIABLE

ENGINE = "instep_shm"  # for --weight-transfer-config '{"backend": "instep_shm"}'
SINGLE_COPY = "instep_single_copy"  # shares its memory with the trainer

_watched_by = 0  # the process that ends with its parent; not one forked from it


def register() -> None:
    import vllm.plugins
    from vllm.platforms import current_platform

    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # an older vLLM, in an environment that happens to have instep
        if os.environ.get(PARENT_VARIABLE):
            raise
        return

    if ENGINE not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice in a process
        WeightTransferEngineFactory.register_engine(ENGINE, "instep_engine.vllm.engine", "ShmWeightTransferEngine")
        single_copy = "instep_engine.vllm.single_copy", "SingleCopyWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(SINGLE_COPY, *single_copy)
    from vllm.v1.engine.async_llm import AsyncLLM

    from instep_engine.gloo import guard_groups
    from instep_engine.vllm import async_llm

    async_llm.install(AsyncLLM)
    guard_groups()
    on_cpu, computes = current_platform.is_cpu(), multiprocessing.parent_process() is not None  # not the API server
    with_lora, is_ours = bool(os.environ.get(LORA_VARIABLE)), bool(os.environ.get(PARENT_VARIABLE))
    additions = {
        "lora": with_lora,
        "fast.adapter": computes and with_lora,
        "drafter": computes and bool(os.environ.get(DRAFTER_VARIABLE)),
        "pipeline": computes and on_cpu,
        "cpu_speculation": computes and on_cpu,
        "fast.sampler": computes and bool(os.environ.get(FAST_VARIABLE)),
        "fast.attention": computes and bool(os.environ.get(FAST_VARIABLE)),
        "cpu_fork": on_cpu,
        "end_tokens": is_ours,
    }
    for name in (name for name, applies in additions.items() if applies):
        importlib.import_module(f"instep_engine.vllm.{name}").install()
    if is_ours:
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks in the log, when instep requests them
        if os.environ[PARENT_VARIABLE] != "children" or computes:
            _die_with_parent()
        home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
        # Without it torch moves Triton's cache beside its compiled code, but not where it loads that code. The second
        # start of an engine would then build all kernels of vLLM's sampler again (20 s on an H100).
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache"))
    if not computes:
        multiprocessing.util.register_after_fork(vllm.plugins, _forget_in_child)
    elif os.environ.get(ROOM_VARIABLE):
        _wait_for_room()


def _forget_in_child(plugins: ModuleType) -> None:
    """Reset a core that was forked from its server: plugins are not loaded there, and signals are its own."""
    plugins.plugins_loaded = False  # type: ignore[attr-defined]
    signal.set_wakeup_fd(-1)  # otherwise the server's event loop takes its signals (Python 3.11)


def _wait_for_room() -> None:
    """Wait until the trainer has left the GPU. It loads its models while this process imports vLLM.

    Raises:
        TimeoutError: it has not left in time.
    """
    seconds, _, path = os.environ[ROOM_VARIABLE].partition(":")
    deadline = time.monotonic() + float(seconds)
    if not os.path.exists(path):
        print("instep: the engine waits until the trainer has left the GPU", flush=True)
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the trainer has not left the GPU within {seconds} s ({path} is missing)")
        time.sleep(0.05)


def _die_with_parent() -> None:
    """End this process with the one that has started it, for any end of that process."""
    global _watched_by
    if _watched_by == os.getpid():
        return
    _watched_by, parent = os.getpid(), os.getppid()
    if (starter := multiprocessing.parent_process()) is not None:  # of a core or a worker
        parent = starter.pid or 0  # it may have ended while this one imported vLLM
        PR_SET_PDEATHSIG = 1  # this one may hang with the interpreter's lock held
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="instep-parent", daemon=True).start()

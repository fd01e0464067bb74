"""What instep adds to stock vLLM through vLLM's own extension points. The plugin does not import instep.

vLLM calls `register` in its API server, its engine core and each worker (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import threading
import time

PROTOCOL = 2  # of the weight sync; instep refuses an engine that speaks another one
ENGINE = "instep_shm"  # for --weight-transfer-config '{"backend": "instep_shm"}'
SINGLE_COPY = "instep_single_copy"  # shares its memory with the trainer
MEMORY_VARIABLE = "INSTEP_MEMORY_FOLDER"  # where that memory lies: a folder of the run
LORA_VARIABLE = "INSTEP_LORA"  # set for engines that take adapters, as `lora.py` says
FAST_VARIABLE = "INSTEP_FAST_LOG_PROBS"  # set for engines with the sampler of `fast/`
PARENT_VARIABLE = "INSTEP_DIE_WITH_PARENT"  # set by instep for engines that it has started
ROOM_VARIABLE = "INSTEP_ROOM"  # SECONDS:FILE; no GPU is touched before the file is there

_watching = False


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice in a process
        WeightTransferEngineFactory.register_engine(ENGINE, "instep_vllm.engine", "ShmWeightTransferEngine")
        single_copy = "instep_vllm.single_copy", "SingleCopyWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(SINGLE_COPY, *single_copy)
    from vllm.v1.engine.async_llm import AsyncLLM

    from instep_vllm import async_llm

    async_llm.install(AsyncLLM)
    if os.environ.get(LORA_VARIABLE):
        from instep_vllm.lora import install

        install()
    if os.environ.get(FAST_VARIABLE) and multiprocessing.parent_process() is not None:  # not in the API server
        from instep_vllm.fast import sampler

        sampler.install()
    if os.environ.get(PARENT_VARIABLE):
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks in the log, when instep asks for them
        _die_with_parent()
    if os.environ.get(ROOM_VARIABLE) and multiprocessing.parent_process() is not None:
        _wait_for_room()


def _wait_for_room() -> None:
    """Wait until the trainer, which loads its models while this process imports vLLM, has left the GPU.

    Raises:
        TimeoutError: it has not, in time.
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
    """End this process with the one that has started it, however that one ends."""
    global _watching
    if _watching:
        return
    _watching, parent = True, os.getppid()
    if multiprocessing.parent_process() is not None:  # a core or a worker; it may hang with the interpreter's lock held
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="instep-parent", daemon=True).start()

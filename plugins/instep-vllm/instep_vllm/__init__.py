"""What instep adds to stock vLLM through vLLM's own extension points. The plugin does not import instep.

vLLM calls `register` in its API server, its engine core and each worker (entry point `vllm.general_plugins`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time

PROTOCOL = 1  # of the weight sync; instep refuses an engine that speaks another one
ENGINE = "instep_shm"  # for --weight-transfer-config '{"backend": "instep_shm"}'
SINGLE_COPY = "instep_single_copy"  # shares its memory with the trainer
MEMORY_VARIABLE = "INSTEP_MEMORY_FOLDER"  # where that memory lies: a folder of the run
LORA_VARIABLE = "INSTEP_LORA"  # set for engines that take adapters, as `lora.py` says
PARENT_VARIABLE = "INSTEP_DIE_WITH_PARENT"  # set by instep for engines that it has started

_watching = False


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if ENGINE not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice in a process
        WeightTransferEngineFactory.register_engine(ENGINE, "instep_vllm.engine", "ShmWeightTransferEngine")
        single_copy = "instep_vllm.single_copy", "SingleCopyWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(SINGLE_COPY, *single_copy)
    if os.environ.get(LORA_VARIABLE):
        from instep_vllm.lora import install

        install()
    if os.environ.get(PARENT_VARIABLE):
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks in the log, when instep asks for them
        _die_with_parent()


def _die_with_parent() -> None:
    """End this process with the one that has started it, however that one ends."""
    global _watching
    if _watching:
        return
    _watching, parent = True, os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="instep-parent", daemon=True).start()

"""A worker process: it answers the controller's requests one by one until the controller closes the connection."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from os import _exit  # the original function, even after `raise_for_exit` replaced it
from typing import Any

from instep.cluster.local import WorkerChannel
from instep.system.endings import raise_for_exit
from instep.system.importing import first_import
from instep.system.processes import follow_parent

with first_import("torch"):
    import torch  # noqa: F401 - before anything starts here


def main() -> int:
    def make(event: Callable[[Any], None]) -> Any:
        with first_import("instep.training.worker"):
            from instep.training.worker import Worker

        return Worker(event)

    return answer(make)


def answer(make: Callable[[Callable[[Any], None]], Any]) -> int:
    """Create an object with `make` and call its methods for the controller, until it closes the connection. `make`
    gets a function that sends an event to the controller."""
    follow_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to end
    raise_for_exit()
    channel = WorkerChannel()
    worker = make(channel.event)
    while True:
        try:
            method, args = channel.receive()
        except (EOFError, OSError):  # the controller ended, perhaps in the middle of a request
            return 0
        try:
            result = getattr(worker, method)(*args)
        except BaseException as error:  # noqa: BLE001 - also a hook's sys.exit(): the controller raises it
            channel.error(error, traceback.format_exc())
        else:
            channel.result(result)


def leave(code: int) -> None:
    """End this process without waiting for process groups whose peers are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(code)


if __name__ == "__main__":
    leave(main())

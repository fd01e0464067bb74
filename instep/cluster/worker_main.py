"""A worker process, which answers the controller's requests one by one until the controller closes the connection."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from instep.cluster.local import WorkerChannel
from instep.processes import follow_parent


def main() -> int:
    follow_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides when to end
    channel = WorkerChannel()
    from instep.training.worker import Worker  # heavy: torch

    worker = Worker(channel.event)
    while True:
        try:
            method, args = channel.receive()
        except (EOFError, OSError):  # the controller has ended, perhaps in the middle of a request
            return 0
        try:
            result = getattr(worker, method)(*args)
        except BaseException as error:  # noqa: BLE001 - the process border: it becomes a WorkerError at the controller
            channel.error(error, traceback.format_exc())
        else:
            channel.result(result)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no waiting for process groups whose peers are gone

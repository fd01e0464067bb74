"""The memory of a whole run: the proportional set size (PSS), summed over a process and all its descendants.

PSS divides each shared page by the number of its users, so that weights in shared memory, which trainer and engine both
map, count once. The resident set size (RSS) would count them in each process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)


def read_pss(pid: int) -> int | None:
    """Return the PSS of one process in bytes; None if the system does not tell (no Linux, or not our process).

    Raises:
        ProcessLookupError: the process is gone.
    """
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return 0  # a kernel thread or a zombie has no memory map
    except (FileNotFoundError, PermissionError) as error:
        if isinstance(error, FileNotFoundError) and Path("/proc/self/smaps_rollup").exists():
            raise ProcessLookupError(pid) from None
        return None


def tree_memory(pid: int) -> tuple[int, bool]:
    """Return the bytes used by `pid` and its descendants, and whether all of it is PSS (False: some of it is RSS)."""
    total, all_pss = 0, True
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, True
    for process in processes:
        try:
            pss = read_pss(process.pid)
            if pss is None:
                pss, all_pss = process.memory_info().rss, False
            total += pss
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # ended between the listing and the reading
    return total, all_pss


class PssSampler:
    """A thread that samples the memory of a process tree, from `start` to `stop` (or through a `with` block).

    It uses at most 2 % of one core: where reading takes long (large page tables), it reads less often than `interval`.
    A peak that lies between two samples is not seen.

    Attributes:
        current: bytes at the last sample.
        peak: the largest sample so far.
        method: "pss", or "rss" as soon as one process shows only its resident set (said once in the log).
    """

    def __init__(self, pid: int | None = None, interval: float = 1.0):
        self.pid, self.interval = pid or os.getpid(), interval
        self.current = self.peak = 0
        self.method = "pss"
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="pss-sampler", daemon=True)

    def start(self) -> None:
        """Take a first sample and start the thread; this can be done once only."""
        self.sample()
        self._thread.start()

    def sample(self) -> int:
        """Take a sample now, and return it in bytes."""
        with self._lock:
            self.current, all_pss = tree_memory(self.pid)
            self.peak = max(self.peak, self.current)
            if not all_pss and self.method == "pss":
                self.method = "rss"
                logger.warning(
                    "no PSS to be had on this system: memory is the sum of RSS, which counts shared pages twice"
                )
            return self.current

    def _loop(self) -> None:
        wait = self.interval
        while not self._stop.wait(wait):
            start = time.perf_counter()
            self.sample()
            wait = max(self.interval, 50 * (time.perf_counter() - start))

    def stop(self) -> None:
        """Take a last sample and end the thread, if it runs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
            self.sample()

    def __enter__(self) -> PssSampler:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

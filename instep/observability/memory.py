"""The memory of a whole run: the proportional set size (PSS), summed over a process and all its descendants.

PSS divides each shared page by the number of its users. So shared weights of trainer and engine count once. The
resident set size (RSS) would count them in each process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable

import psutil

logger = logging.getLogger(__name__)


def read_pss(pid: int) -> int | None:
    """Return the PSS of one process in bytes; None if the system does not report it (no Linux, or no permission).

    Raises:
        psutil.NoSuchProcess: the process is gone.
    """
    try:
        return getattr(psutil.Process(pid).memory_full_info(), "pss", None)
    except psutil.AccessDenied:
        return None


def tree_memory(pid: int) -> tuple[dict[int, int], dict[int, int], bool]:
    """Return the bytes and the parents of `pid` and its descendants by pid, and whether all of it is PSS (False: some
    of it is RSS)."""
    used: dict[int, int] = {}
    parents: dict[int, int] = {}
    all_pss = True
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}, {}, True
    for process in processes:
        try:
            if (pss := read_pss(process.pid)) is None:
                pss, all_pss = process.memory_info().rss, False
            used[process.pid], parents[process.pid] = pss, process.ppid()
        except psutil.NoSuchProcess:  # it ended after the listing
            continue
    return used, parents, all_pss


class PssSampler:
    """A thread that samples the memory of this process and its descendants, from `start` to `stop` (or in a `with`).

    It uses at most 2 % of one core: if reading is slow (large page tables), it reads less often than every `interval`
    seconds. It misses a peak between two samples.

    Attributes:
        current: bytes at the last sample.
        peak: the largest sample so far.
        method: "pss", or "rss" once a process shows only its resident set (logged once).
    """

    def __init__(self, interval: float = 1.0):
        self._interval = interval
        self.current = self.peak = 0
        self.method = "pss"
        self._last: tuple[dict[int, int], dict[int, int]] = {}, {}  # bytes and parents; replaced, never changed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="pss-sampler", daemon=True)

    def start(self) -> None:
        """Take a first sample and start the thread; call it only once."""
        self.sample()
        self._thread.start()

    def sample(self) -> int:
        """Take a sample now, and return it in bytes."""
        with self._lock:
            used, parents, all_pss = tree_memory(os.getpid())
            self._last = used, parents
            self.current = sum(used.values())
            self.peak = max(self.peak, self.current)
            if not all_pss and self.method == "pss":
                self.method = "rss"
                logger.warning("this system reports no PSS: memory is the sum of RSS, which counts shared pages twice")
            return self.current

    def by_owner(self, owners: Iterable[int]) -> dict[int, int]:
        """Return the bytes at the last sample by owner: each process counts for the nearest of `owners` (pids) that is
        the process itself or an ancestor. This process is one of them. Owners that the sample has not seen are absent.
        """
        sizes, parents = self._last  # without the lock: a sample may take long
        out = {pid: 0 for pid in [os.getpid(), *owners] if pid in sizes}
        for pid, used in sizes.items():
            while pid not in out and pid in parents:
                pid = parents[pid]
            if pid in out:
                out[pid] += used
        return out

    def _loop(self) -> None:
        wait = self._interval
        while not self._stop.wait(wait):
            start = time.perf_counter()
            self.sample()
            wait = max(self._interval, 50 * (time.perf_counter() - start))

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

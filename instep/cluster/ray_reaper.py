"""End the Ray that a run started, after its controller was killed: `python -m instep.cluster.ray_reaper FOLDER`.

Most processes of Ray end with their driver, but its agents stay for minutes and try to report to a Ray that is gone.
FOLDER has the sessions of this Ray.
"""

from __future__ import annotations

import os
import shutil
import sys

import psutil

from instep.system.processes import LIFELINE_VARIABLE


def main(folder: str) -> None:
    lifeline = int(os.environ.pop(LIFELINE_VARIABLE))
    while os.read(lifeline, 1):
        pass
    while processes := [process for process in psutil.process_iter() if _belongs(process, folder)]:
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=1)
    shutil.rmtree(folder, ignore_errors=True)


def _belongs(process: psutil.Process, folder: str) -> bool:
    """Return whether the process has a file below `folder` open; each process of Ray writes a log there."""
    try:
        return process.pid != os.getpid() and any(file.path.startswith(folder) for file in process.open_files())
    except (psutil.Error, OSError):  # another user's process, or it has just ended
        return False


if __name__ == "__main__":
    main(sys.argv[1])

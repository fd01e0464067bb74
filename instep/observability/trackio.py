"""The sink for Trackio. A process of its own follows the files of the run, so that training waits for no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

CLOSE_SECONDS = 45.0  # for the last rows; Trackio itself waits 30 s for a server, and then keeps them on this host


class Trackio:
    """Send metrics, samples (as traces) and alarms (as alerts) to Trackio: `trackio_main.py` does so.

    Args:
        options: `project`, `run_name` (None: of the run's folder and identity), `server_url` (None: this host's store).
        offsets: the bytes of metrics.jsonl and samples.jsonl of earlier sessions, which are not sent again.
        tell: prints a line for the user, from any thread.
    """

    def __init__(
        self, run_dir: Path, options: Mapping[str, str | None], offsets: Mapping[str, int], tell: Callable[[str], None]
    ):
        self._tell, self._closing = tell, False
        log = run_dir / "logs" / "trackio.log"
        log.parent.mkdir(exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name != "TRACKIO_SERVER_URL"}
        with log.open("ab") as errors:
            # Ctrl-C is not for it: it ends when its input does, after the last rows.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "instep.observability.trackio_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        # The options, with a server's token, where no other user can read them.
        self._input.write(json.dumps({**options, "run_dir": str(run_dir), "offsets": dict(offsets)}) + "\n")
        self._input.flush()
        self._reader = threading.Thread(target=self._read, name="trackio", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tell(line.rstrip("\n"))
        if not self._closing:
            self._tell("Trackio's process has ended, and the run goes on; logs/trackio.log has the reason")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: the process reads metrics.jsonl."""

    def close(self, failed: bool = False) -> None:
        """Let the process send the last rows, and end it after `CLOSE_SECONDS` at the latest."""
        self._closing = True
        self._input.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._tell(f"Trackio did not take the last rows in {CLOSE_SECONDS:.0f} s; metrics.jsonl has all of them")
        self._reader.join()

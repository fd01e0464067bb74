"""The process that sends a run to Trackio: it reads metrics.jsonl and samples.jsonl as they grow.

Its first line of input is JSON with the options; the end of its input is that of the run. What it prints is for users.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.observability.alarms import AlarmWatch, Limits
from instep.observability.metrics import is_step
from instep.observability.sinks import read_json
from instep.observability.view.tail import Tail
from instep.observability.view.turns import prompt_of, text_of
from instep.system.private import without_credentials

POLL_SECONDS = 1.0
PROBE_SECONDS = 5.0  # between two looks at the server, and for its answer


Rows = Tail[dict[str, Any]]


class Server:
    """Whether Trackio's server answers. What changes is reported in one line."""

    def __init__(self, url: str, tell: Callable[[str], None]):
        self._url, self._tell = url.partition("?")[0].rstrip("/"), tell
        self._name = without_credentials(self._url)
        self._answered, self._looked = True, -math.inf

    def look(self, otherwise: str) -> bool:
        """Return whether it answers now, or did so at the last look, which was less than `PROBE_SECONDS` ago.

        Args:
            otherwise: what becomes of the metrics if it does not.
        """
        if time.monotonic() - self._looked < PROBE_SECONDS:
            return self._answered
        why = self._fault()
        if why and self._answered:
            self._tell(f"Trackio at {self._name} does not answer ({why}): the run goes on, {otherwise}")
        elif not why and not self._answered:
            self._tell(f"Trackio at {self._name} answers again, and gets what it has missed")
        self._answered, self._looked = not why, time.monotonic()
        return self._answered

    def _fault(self) -> str:
        try:
            urllib.request.urlopen(f"{self._url}/version", timeout=PROBE_SECONDS).close()
        except urllib.error.HTTPError:  # an answer
            return ""
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", "") or error)
        return ""


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return prompt and response of a row of samples.jsonl as a conversation. What is no list of messages is a text."""
    prompt = prompt_of(row)
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        prompt = [{"role": "user", "content": text_of(prompt)}]
    return [*prompt, {"role": "assistant", "content": text_of(row["response"])}]


def send(run: Any, trace: Callable[..., Any], rows: Rows, samples: Rows, watch: AlarmWatch) -> None:
    """Send what is new: metrics by their step, samples by rollout and split, and alarms that are raised first."""
    for row in rows.read()[1]:
        step = row.pop("step")
        metrics = {name: math.nan if value is None else value for name, value in row.items() if name != "time"}
        run.log(metrics, step=step)
        for text in watch.check(step, metrics)[1] if is_step(metrics) else ():
            title, _, more = text.partition(": ")
            run.alert(title, more, step=step)
    found: dict[tuple[int, str], list[Any]] = {}
    for row in samples.read()[1]:
        kept = {name: value for name, value in row.items() if name not in ("prompt", "response", "tokens")}
        found.setdefault((row["rollout_id"], row["split"]), []).append(trace(messages(row), metadata=kept))
    for (rollout_id, split), traces in found.items():
        run.log({f"samples/{split}": traces}, step=rollout_id)


def follow(options: dict[str, Any], ended: threading.Event, tell: Callable[[str], None]) -> None:
    """Send the run until `ended` is set, and what is there then."""
    folder, url = Path(options["run_dir"]), options["server_url"]
    config = read_json(folder / "config.json")
    server = Server(url, tell) if url else None
    if server is not None and not server.look("and its metrics go to the store on this host (`trackio show`)"):
        server = url = None
    import trackio

    rows, samples = (Rows(folder / f"{name}.jsonl", lambda _, row: row) for name in ("metrics", "samples"))
    rows.offset, samples.offset = options["offsets"]["metrics"], options["offsets"]["samples"]
    before = map(json.loads, rows.path.read_bytes()[: rows.offset].splitlines())
    watch = AlarmWatch(Limits.from_args(config["args"]), [row for row in before if is_step(row)])
    run = trackio.init(
        project=options["project"],
        name=options["run_name"] or f"{folder.resolve().name}-{str(config['run_id'])[:6]}",
        server_url=url,
        config=config["args"],
        resume="allow",
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    last = False
    while not last:
        last = ended.wait(POLL_SECONDS)  # before the rows are read: then all of them are there
        send(run, trackio.Trace, rows, samples, watch)
        if server is not None:
            server.look("and Trackio keeps its metrics on this host until it answers")
    for text in watch.at_end():
        run.alert(text)
    trackio.finish()  # and not run.finish, which Trackio would repeat at the exit


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)  # for lines of ours; what Trackio prints goes to the log
    os.dup2(2, 1)
    options, ended = json.loads(sys.stdin.readline()), threading.Event()

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):  # the run has ended
            print(line, file=out)

    def read() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    follow(options, ended, tell)


if __name__ == "__main__":
    main()

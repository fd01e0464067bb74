"""Requests that no client of a run would make, to its engine, and rows that no program would write."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from textwrap import shorten
from typing import Any

import psutil

from instep.engines.keys import KEY_FILE
from tests.e2e.commands import words_of
from tests.faults.harness import ENDLESS, Place, Run
from tests.faults.input_faults import spoiled
from tests.faults.registry import scenario

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HELLO = [{"role": "user", "content": "1"}]


def refused(run: Run, fault: str, status: int, path: str, body: dict[str, Any], **headers: str) -> None:
    """The engine refuses this one request, and the run goes on as if it had not been sent."""
    key = (run.run_dir / KEY_FILE).read_text().strip()
    words = words_of(psutil.Process(run.child("engine")))
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}{path}"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"} | headers
    run.mark()
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=10)
        raise AssertionError("the request was answered")
    except urllib.error.HTTPError as error:
        answer = json.loads(error.read())["error"]["message"]
        assert error.code == status, (error.code, answer)
    run.recovered(fault, f"the request is answered with {status}: `{shorten(answer, 110)}`", 10)


@scenario(
    request_surrogate="recovered: a request to the engine has half a surrogate pair as its stop string",
    request_template="recovered: a request to the engine brings a chat template with loops that never end",
    request_control="recovered: a process without the run's key asks the engine to pause",
    request_origin="recovered: a web page (a foreign Origin) asks the engine to pause, with the run's key",
)
def requests(place: Place) -> None:
    with place.run(*ENDLESS) as run:
        run.wait_steps()
        refused(run, "request_surrogate", 400, "/v1/completions", {"prompt": "1", "stop": "\ud800"})
        refused(run, "request_template", 400, "/v1/chat/completions", {"messages": HELLO, "chat_template": LOOPS})
        refused(run, "request_control", 401, "/pause", {}, Authorization="Bearer guessed")
        refused(run, "request_origin", 403, "/pause", {}, Origin="https://evil.example")


ROWS = {
    "row_digits": ('{"prompt": "1 + 1", "label": ' + "9" * 5000 + "}", "more than 4300 digits"),
    "row_surrogate": ('{"prompt": "1 + 1", "label": "\\ud800"}', "surrogate"),
    "row_nested": ('{"prompt": "1 + 1", "label": ' + "[" * 2000 + "]" * 2000 + "}", "nested"),
}


@scenario(
    slow=True,
    row_digits="error: a row of the data file has a number of 5,000 digits",
    row_surrogate="error: a label of the data file has half a surrogate pair",
    row_nested="error: a row of the data file is nested 2,000 deep",
)
def rows(place: Place) -> None:
    for name, (line, word) in ROWS.items():
        path = spoiled(place, line)
        with place.run("--prompt-data", str(path), name=name) as run:
            run.error(name, "DataError: ", f"{path}, line 3", word, code=2)

"""The page of `instep view` in a browser, part by part. It is skipped where there is no Chromium."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.observability.view.runs import Runs
from instep.observability.view.server import ViewServer
from tests.logged_run import HOSTILE, unfinished_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    root = tmp_path_factory.mktemp("runs")
    folders = [unfinished_run(root / "one"), unfinished_run(root / "two", lr=0.2)]
    with ViewServer(Runs(lambda: folders), port=0) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield serving
        serving.shutdown()


def dom(server: ViewServer, part: str, folder: Path) -> str:
    """Return the page as the browser shows it."""
    words = [str(BROWSER), "--headless", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=5000"]
    words += ["--no-sandbox"] if os.getuid() == 0 else []
    done = subprocess.run([*words, "--dump-dom", f"{server.url}#{part}"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("curves", ["Reward", "training rollouts", "Alarms", "truncation", "try a larger --rollout-max-response-len"]),
        ("time?steps=2", ["engines", "rollout 5", "train 5", "Engines had no request for 25 % of the time"]),
        ("samples?run=0&order=old", ["48 samples are logged.", "largest gap", "0.25", "completed"]),
        ("sample?run=0&at=0", ["colour by", "log-prob", "entropy", "side by side", "t3 ", "gap mean 0.25"]),
        ("processes", ["engine 0", "3.00 GB", "tokens/s generated"]),
        ("flags", ["Flags that differ: 1", "--lr", "0.1", "0.2"]),
    ],
)
def test_the_parts_of_the_page(server: ViewServer, tmp_path: Path, part: str, shown: list[str]) -> None:
    page = dom(server, part, tmp_path)
    text = html.unescape(re.sub(r"<[^>]*>", "", page.replace("</td>", " ")))
    for words in shown:
        assert words in text, (words, text[-3000:])
    assert "undefined" not in text and "[object" not in text and "NaN" not in page
    assert "<img" not in page and "pwned</title>" not in page  # texts of samples are text
    if part.startswith("sample"):
        assert html.escape(HOSTILE[:8], quote=False) in page


def test_samples_name_the_run_and_the_set_that_they_are_of(server: ViewServer, tmp_path: Path) -> None:
    """Without them in the address the last run's training is shown, and chosen in both lists."""
    chosen = re.findall(r'<option value="[^"]*" selected="">([^<]*)</option>', dom(server, "samples", tmp_path))
    assert chosen[:2] == ["two", "train"]

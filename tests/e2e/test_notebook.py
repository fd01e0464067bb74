"""The example notebook, executed cell by cell, as a kernel does: in one module `__main__`, while an event loop runs."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT
from tests.forks import cold

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent


@pytest.mark.parametrize("start", ["forked", pytest.param("cold", marks=pytest.mark.slow)])
def test_the_example_notebook(tmp_path: Path, start: str) -> None:
    """`cold`: with processes that import all that they need, as a user's do."""
    for name in ("notebook", "quickstart"):
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    notebook = json.loads((tmp_path / "notebook/train.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    words = [sys.executable, "-m", "tests.e2e.kernel", "train.ipynb"]
    options = {"cwd": tmp_path / "notebook", "env": {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}}
    with cold() if start == "cold" else contextlib.nullcontext():
        words += ["beside"] if start == "forked" else []
        done = subprocess.run(words, capture_output=True, text=True, timeout=480, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, after = (float(x) for x in done.stdout.splitlines()[-1].removeprefix("reward ").split(" -> "))
    assert after > 0.6 > 0.3 > before, done.stdout
    run = tmp_path / "notebook/runs/notebook/run"
    assert json.loads((run / "summary.json").read_text())["status"] == "left"  # by `break`
    assert (run / "report.html").stat().st_size > 0

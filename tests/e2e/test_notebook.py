"""The example notebook, executed cell by cell, as a kernel does: in one module `__main__`, while an event loop runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.commands import ENVIRONMENT

EXAMPLES = Path(__file__).parents[2] / "examples"
KERNEL = """
import asyncio, json, sys

async def execute(path):
    for number, cell in enumerate(json.load(open(path))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), vars(sys.modules["__main__"]))

asyncio.run(execute(sys.argv[1]))
"""


def test_the_example_notebook(tmp_path: Path) -> None:
    for name in ("notebook", "quickstart"):
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    notebook = json.loads((tmp_path / "notebook/train.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, "train.ipynb"],
        cwd=tmp_path / "notebook",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, after = (float(x) for x in done.stdout.splitlines()[-1].removeprefix("reward ").split(" -> "))
    assert after > 0.6 > 0.3 > before, done.stdout
    run = tmp_path / "notebook/runs/notebook/run"
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"  # it was left by `break`
    assert (run / "report.html").stat().st_size > 0

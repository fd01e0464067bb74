"""`kernel NOTEBOOK`: executes it cell by cell, as a kernel does: in one module `__main__`, while an event loop runs.

With the word `beside` its workers are forked from a server beside it; a kernel has none, and they start in seconds.
"""

import asyncio
import contextlib
import json
import os
import sys

from instep.system import fork_server
from instep.system.processes import OPENMP_ENV


async def execute(path):
    with open(path) as file:
        cells = json.load(file)["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    with fork_server.beside() if sys.argv[2:] == ["beside"] else contextlib.nullcontext():
        if fork_server.current is not None:  # it has what this process has imported
            fork_server.current.preload((), {**os.environ, **OPENMP_ENV})
        asyncio.run(execute(sys.argv[1]))

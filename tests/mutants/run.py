"""Plants the faults of mutants.toml one at a time, and requires that the fast tests catch each: `make test-mutants`.

    python -m tests.mutants.run [-k WORDS] [--jobs N]

Every fault is planted in a copy of the package, in a process that is forked when torch is loaded, so that a fault costs
the time of its tests alone. A fault that no test catches ends the run with exit status 1 and its name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
SECONDS = 300.0  # of the tests of one fault
CAUGHT = 1  # pytest's exit status when tests have failed
HUNG = -1
_ALSO_READ = "scripts docs examples benchmarks plugins pyproject.toml README.md Makefile".split()


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` (which occurs once) becomes `new`; `tests` are files of fast tests that must see it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted(self) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: `old` does not occur exactly once any more: bring the list in step with the code.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"mutant {self.name!r}: its text occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def read_mutants(words: str = "") -> list[Mutant]:
    """The committed faults whose names or files hold `words`."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [m for m in (Mutant(**row) for row in rows) if words in m.name or words in m.file]


def try_mutant(mutant: Mutant) -> int:
    """The exit status of pytest with the fault planted."""
    with tempfile.TemporaryDirectory(prefix="instep-mutant-") as folder:
        tree = Path(folder)
        for name in ("instep", "tests"):  # pytest would follow a link back to the right package
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _ALSO_READ:
            os.symlink(ROOT / name, tree / name)
        (tree / mutant.file).write_text(mutant.planted(), encoding="utf-8")
        child = os.fork()
        if child == 0:
            _run_tests(tree, mutant)
        return _wait(child)


def _run_tests(tree: Path, mutant: Mutant) -> None:
    """In the forked process: run the tests on `tree`, and end."""
    import pytest

    os.setsid()
    sink = os.open(tree / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("instep", "tests")]:
        del sys.modules[name]
    sys.path[:0] = [str(tree)]
    os.environ["PYTHONPATH"] = str(tree)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not peers and not slow and not vllm"]
    status = pytest.main([*options, f"--rootdir={tree}", *mutant.tests])
    os._exit(int(status))


def _wait(child: int) -> int:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return HUNG


def _outcomes(mutants: list[Mutant], jobs: int) -> Iterator[int]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(try_mutant, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="words", default="", help="only faults whose name or file holds this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time")
    args = parser.parse_args()
    import torch
    import transformers  # noqa: F401  what the tests load is loaded once, before the forks

    torch.set_num_threads(1)
    console, mutants = Console(), read_mutants(args.words)
    started = time.monotonic()
    outcomes = list(track(_outcomes(mutants, args.jobs), "planting", total=len(mutants), console=console))
    table = Table("fault", "file", "outcome", title="faults that no test has caught")
    for mutant, status in zip(mutants, outcomes, strict=True):
        if status != CAUGHT:
            told = {0: "all tests pass", HUNG: f"no end in {SECONDS:.0f} s"}.get(status, f"pytest ended with {status}")
            table.add_row(mutant.name, mutant.file, told)
    if table.row_count:
        console.print(table)
    caught = len(mutants) - table.row_count
    console.print(f"{caught} of {len(mutants)} faults caught in {time.monotonic() - started:.0f} s")
    return int(table.row_count > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Plants the faults of mutants.toml one at a time, and requires that the fast tests catch each: `make test-mutants`.

    python -m tests.mutants.run [-k WORDS] [--jobs N]

Every fault is planted in a copy of the package, in a process that is forked when torch is loaded, so that a fault costs
the time of its tests alone. It is caught when a test that passes without it fails; a test file that cannot be imported
any more catches nothing. A fault that no test catches ends the run with exit status 1 and its name.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
PACKAGES = ("instep", "instep_engine", "instep_neighbours", "tests")
SECONDS = 120.0  # of the tests of one fault
PASSED, CAUGHT, HUNG, BROKEN = 0, 1, -1, 100  # outcomes; the first two are pytest's, as are the others above 1
_ALSO_READ = "scripts docs examples benchmarks pyproject.toml README.md Makefile".split()
_LOADED = "torch torch.distributed.checkpoint torch.distributed.fsdp transformers.models.qwen2.modeling_qwen2".split()
_MARKS = "not gpu and not peers and not slow and not vllm"


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `old` (which occurs once) becomes `new`; `tests` are fast tests, one of which must see it."""

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


class Outcome(NamedTuple):
    """How the tests ended: one of the constants above, or pytest's exit status; and the line that tells most."""

    status: int
    line: str

    @property
    def told(self) -> str:
        known = {PASSED: "all tests pass", HUNG: f"no end in {SECONDS:.0f} s", BROKEN: "no test could run"}
        return f"{known.get(self.status, f'pytest ended with {self.status}')}: {self.line}"


def read_mutants(words: str = "") -> list[Mutant]:
    """The committed faults whose names or files hold `words`."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [m for m in (Mutant(**row) for row in rows) if words in m.name or words in m.file]


def try_tests(tests: Sequence[str], mutant: Mutant | None = None, seconds: float = SECONDS) -> Outcome:
    """What `tests` say with the fault planted, or with none."""
    with tempfile.TemporaryDirectory(prefix="instep-mutant-") as folder:
        tree = Path(folder)
        for name in PACKAGES:  # a link would lead back to the right text
            # Bytecode would be of the right text, and of another path than tests ask for.
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _ALSO_READ:
            os.symlink(ROOT / name, tree / name)
        if mutant is not None:
            place = tree / mutant.file
            place.write_text(mutant.planted(), encoding="utf-8")
        (tree / "log").touch()
        child = os.fork()
        if child == 0:
            _run_tests(tree, tests)
        status = _wait(child, seconds)
        lines = (tree / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines
        return Outcome(status, next((line for line in reversed(told) if line.strip()), ""))


class _Failures:
    """A plugin of pytest that counts the tests that have failed; a file that cannot be collected is none."""

    num = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.num += report.failed


def _run_tests(tree: Path, tests: Sequence[str]) -> None:
    """In the forked process: run the tests on `tree`, and end."""
    import pytest

    os.setsid()
    sink = os.open(tree / "log", os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path[:0] = [str(tree)]
    os.environ["PYTHONPATH"] = str(tree)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", _MARKS, f"--rootdir={tree}"]
    failures = _Failures()
    status = int(pytest.main([*options, *tests], plugins=[failures]))
    sys.stdout.flush()
    os._exit(BROKEN if status == CAUGHT and not failures.num else status)


def _wait(child: int, seconds: float) -> int:
    """The exit status of the process `child`, whose own processes end with it."""
    deadline, status = time.monotonic() + seconds, HUNG
    while time.monotonic() < deadline:
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(ended)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, 9)
    if status == HUNG:
        os.waitpid(child, 0)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="words", default="", help="only faults whose name or file holds this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time")
    args = parser.parse_args()
    for name in _LOADED:  # once, before the forks
        import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    console, mutants, started = Console(), read_mutants(args.words), time.monotonic()
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    table = Table("fault", "file", "outcome", title="faults that no test has caught")
    with ThreadPoolExecutor(args.jobs) as pool:
        shares = [share for n in range(args.jobs) if (share := tests[n :: args.jobs])]
        for outcome in pool.map(lambda share: try_tests(share, seconds=10 * SECONDS), shares):
            if outcome.status != PASSED:
                console.print(f"Without any fault the tests do not pass: {outcome.told}")
                return 1
        outcomes = pool.map(try_tests, [mutant.tests for mutant in mutants], mutants)
        shown = track(zip(mutants, outcomes, strict=True), "planting", total=len(mutants), console=console)
        for mutant, outcome in shown:
            if outcome.status != CAUGHT:
                table.add_row(mutant.name, mutant.file, outcome.told)
    if table.row_count:
        console.print(table)
    caught = len(mutants) - table.row_count
    console.print(f"{caught} of {len(mutants)} faults caught in {time.monotonic() - started:.0f} s")
    return int(table.row_count > 0)


if __name__ == "__main__":
    sys.exit(main())

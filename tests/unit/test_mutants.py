"""The list of faults that `make test-mutants` plants is in step with the code."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.mutants.run import ROOT, read_mutants

MUTANTS = read_mutants()


def test_every_fault_has_its_place_and_its_tests() -> None:
    assert len(MUTANTS) >= 100
    assert [name for name, n in Counter(mutant.name for mutant in MUTANTS).items() if n > 1] == []
    for mutant in MUTANTS:
        assert mutant.planted() != (ROOT / mutant.file).read_text(), mutant.name
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert not function or f"def {function}(" in (ROOT / file).read_text(), f"{mutant.name}: {test}"
            assert (ROOT / file).is_file(), f"{mutant.name}: {test}"


def test_no_fault_is_only_a_slip_of_the_pen(tmp_path: Path) -> None:
    """A name that does not exist, or a text that is no Python, is caught by any test that comes near."""
    for n, mutant in enumerate(MUTANTS):
        (tmp_path / f"{n}_{Path(mutant.file).name}").write_text(mutant.planted())
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F821", "--quiet", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

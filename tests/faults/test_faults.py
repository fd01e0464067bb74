"""Every fault is recovered, or ends the run within 10 s with one error that says what, where and what to do."""

import pytest

from tests.faults.harness import Place
from tests.faults.suite import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_fault(prepared, tmp_path, name):
    SCENARIOS[name](Place(*prepared, tmp_path))

"""Every fault is recovered, or ends the run within 10 s with one error that says what, where and what to do."""

import pytest

from tests.faults.document import PATH, documented
from tests.faults.suite import FAULTS, SCENARIOS, SLOW


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SCENARIOS]
)
def test_fault(outcomes, scenario):
    results = outcomes[scenario].result(timeout=900)
    assert results and set(results) <= set(FAULTS)


def test_the_document_is_of_this_suite():
    assert len(FAULTS) >= 20
    assert documented(PATH.read_text()) == list(FAULTS.values()), "python -m tests.faults.document"

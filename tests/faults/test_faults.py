"""Every fault is recovered, or ends the run within 10 s with one error that says what, where and what to do."""

import pytest

from tests.faults.document import PATH, documented
from tests.faults.suite import FAULTS, SCENARIOS, SLOW


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SCENARIOS]
)
def test_fault(place, scenario):
    SCENARIOS[scenario](place)
    assert place.results and set(place.results) <= set(FAULTS)


def test_the_document_is_of_this_suite():
    assert len(FAULTS) >= 20
    assert documented(PATH.read_text()) == list(FAULTS.values()), "python -m tests.faults.document"

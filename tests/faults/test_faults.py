"""Every fault is recovered, or ends the run within 10 s with one error that says what, where and what to do."""

import pytest

from tests.faults.document import PATH, documented
from tests.faults.suite import FAULTS, SCENARIOS, SGLANG, SLOW, VLLM


def marks(name):
    of = ((pytest.mark.slow, SLOW), (pytest.mark.vllm, VLLM), (pytest.mark.sglang, SGLANG))
    return [mark for mark, names in of if name in names]


@pytest.mark.parametrize("scenario", [pytest.param(name, marks=marks(name)) for name in SCENARIOS])
def test_fault(place, scenario):
    SCENARIOS[scenario](place)
    assert place.results and set(place.results) <= set(FAULTS)


def test_the_document_is_of_this_suite():
    assert len(FAULTS) >= 60
    assert documented(PATH.read_text()) == list(FAULTS.values()), "python -m tests.faults.document"

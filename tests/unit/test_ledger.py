"""Every group is accounted for, once."""

import json

import pytest

from instep.data.ledger import Ledger, LedgeredDataSource
from instep.errors import RolloutError
from instep.types import Sample


def groups(*indices):
    return [[Sample(group_index=i, index=2 * i + j) for j in range(2)] for i in indices]


def test_a_round_balances():
    ledger = Ledger()
    ledger.issue(groups(0, 1, 2, 3))
    ledger.consume(groups(0, 2))
    ledger.buffer(groups(1))
    ledger.drop(groups(3), "filtered: all equal")
    ledger.check()
    assert (ledger.num_issued, ledger.num_consumed, ledger.num_buffered, ledger.num_dropped) == (4, 2, 1, 1)
    assert ledger.dropped == {"filtered: all equal": 1} and ledger.num_outstanding == 0


def test_a_buffered_group_is_issued_again_and_counted_once():
    ledger = Ledger()
    ledger.issue(groups(0))
    ledger.buffer(groups(0))
    ledger.issue(groups(0))
    ledger.consume(groups(0))
    ledger.check()
    assert (ledger.num_issued, ledger.num_consumed, ledger.num_buffered) == (1, 1, 0)


@pytest.mark.parametrize("first", ["consume", "drop"])
def test_nothing_is_trained_twice(first):
    ledger = Ledger()
    ledger.issue(groups(0, 1))
    ledger.consume(groups(0)) if first == "consume" else ledger.drop(groups(0), "surplus")
    with pytest.raises(RolloutError, match="group 0 cannot be consumed: it is closed"):
        ledger.consume(groups(0))
    with pytest.raises(RolloutError, match="group 0 cannot be issued"):
        ledger.issue(groups(0))


def test_a_group_nobody_issued_is_refused():
    with pytest.raises(RolloutError, match="never issued"):
        Ledger().consume(groups(5))


def test_what_never_came_back_is_dropped_with_a_reason():
    ledger = Ledger()
    ledger.issue(groups(0, 1, 2))
    ledger.consume(groups(1))
    assert ledger.drop_outstanding("not returned") == 2
    ledger.check()
    assert ledger.dropped == {"not returned": 2}


def test_state_survives_json():
    ledger = Ledger()
    ledger.issue(groups(*range(10)))
    ledger.consume(groups(0, 1, 2, 7))
    ledger.buffer(groups(5))
    copy = Ledger()
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert copy.state_dict() == ledger.state_dict()
    assert copy.state_dict()["closed_below"] == 3 and copy.state_dict()["closed_above"] == [7]
    with pytest.raises(RolloutError):
        copy.consume(groups(7))
    copy.issue(groups(5))


def test_fan_out_groups_and_missing_indices():
    ledger = Ledger()
    ledger.issue([[[Sample(group_index=3)], [Sample(group_index=3)]]])
    ledger.consume([[[Sample(group_index=3)], [Sample(group_index=3)]]])
    assert ledger.num_consumed == 1
    with pytest.raises(RolloutError, match="no group_index"):
        ledger.issue([[Sample()]])


def test_the_data_source_that_rollouts_see_keeps_the_books():
    class Source:
        note = "mine"

        def __init__(self):
            self.next, self.buffer = 0, []

        def get_samples(self, n):
            out = groups(*range(self.next, self.next + n))
            self.next += n
            return out

        def add_samples(self, back):
            self.buffer += back

        def __len__(self):
            return 100

    source = LedgeredDataSource(Source(), Ledger())
    got = source.get_samples(3)
    source.add_samples(got[:1])
    source.drop(got[1:2], "aborted")
    assert len(source) == 100 and source.note == "mine" and source.buffer == got[:1]
    assert (source.ledger.num_buffered, source.ledger.num_dropped, source.ledger.num_outstanding) == (1, 1, 1)

"""Rounds that overlap: the ledger's states, and a checkpoint while groups are outstanding."""

from __future__ import annotations

import base64
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from instep.checkpoints.folders import read_state
from instep.checkpoints.state_json import from_text
from instep.controller.round import Rollout
from instep.controller.run_state import check_savable, data_state, restore_data
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.errors import RolloutError
from instep.types import Group, Sample, Status, VersionSpan
from tests.checkpoints import save_checkpoint
from tests.unit.test_data import rows, write
from tests.unit.test_data_source import source


def fresh(path: str) -> LedgeredDataSource:
    return LedgeredDataSource(source(path, rollout_shuffle=True), Ledger())


def resumed(data: LedgeredDataSource, path: str) -> LedgeredDataSource:
    """A new session with what a checkpoint holds of `data`."""
    again, state = fresh(path), json.loads(json.dumps(data_state(data, 7)))
    restore_data(again, state, 7, Path())
    again.ledger.check()
    return again


def indices(groups: list[Group]) -> list[int | None]:
    return [group[0].group_index for group in groups]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.jsonl", rows(5))


@pytest.mark.parametrize("state", ["issued", "finished"])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_what_was_outstanding_at_a_save_is_issued_again_or_waits_for_its_training(
    path: str, state: str, one_by_one: bool
) -> None:
    data = fresh(path)
    data.get_samples(4)  # past the first cursor
    data.ledger.consume(groups_of(0, 1, 2, 3))
    a, b, c = (data.get_samples(1)[0] for _ in range(3)) if one_by_one else data.get_samples(3)
    pristine = [sample.to_dict() for sample in c]
    for sample in (*a, *b, *c):
        sample.append_response_tokens([5, 6], [-0.5, -1.0], weight_versions=[VersionSpan("3", 0, 2)])
        sample.status = Status.COMPLETED
    data.ledger.finish([a, b])
    data.ledger.consume([a])
    data.ledger.drop([b], "stale")
    if state == "finished":
        data.ledger.finish([c])
    data.ledger.check()
    assert data.ledger.num_outstanding == 1

    again = resumed(data, path)
    assert (again.ledger.num_consumed, again.ledger.num_dropped) == (5, 1)
    if state == "finished":
        assert (again.ledger.finished, again.ledger.num_buffered) == ([c], 0)  # with its tokens and versions
        groups = again.get_samples(2)
        assert groups == data.get_samples(2)
        again.ledger.finish(groups)
        groups = [c, *groups]
    else:
        assert (again.ledger.finished, again.ledger.num_buffered) == ([], 1)
        groups = again.get_samples(3)
        assert [sample.to_dict() for sample in groups[0]] == pristine  # the same row, and all that seeds are made from
        assert groups[1:] == data.get_samples(2)
        again.ledger.finish(groups)
    assert indices(groups) == [6, 7, 8]  # neither A nor B, over the end of the epoch
    again.ledger.consume(groups)
    again.ledger.check()
    assert again.ledger.num_issued == again.ledger.num_consumed + 1 == 9


def groups_of(*group_indices: int) -> list[Group]:
    return [[Sample(group_index=i)] for i in group_indices]


def test_without_outstanding_groups_the_state_is_the_source_s_own(path: str) -> None:
    data = fresh(path)
    kept, *others = data.of_round(0).get_samples(3)
    data.add_samples([kept])
    data.ledger.consume(others)
    state = data_state(data, 0)
    assert state["data_source"] == data.source.state_dict()
    assert state["ledger"]["open"] == {"0": "buffered"}
    assert state["ledger"].pop("reads") == state["ledger"].pop("finished") == []  # as a checkpoint of before
    old = fresh(path)
    restore_data(old, state, 0, Path())
    assert old.ledger.state_dict() == data.ledger.state_dict() and old.get_samples(2) == data.get_samples(2)


def test_a_session_may_end_again_before_the_groups_are_trained(path: str) -> None:
    data = fresh(path)
    data.get_samples(2)
    once = resumed(data, path)
    assert indices(once.get_samples(1)) == [0]
    twice = resumed(once, path)
    assert sorted(indices(twice.get_samples(3))) == [0, 1, 2] and twice.ledger.num_issued == 3


def test_a_group_from_the_buffer_is_begun_anew(path: str) -> None:
    data = fresh(path)
    group = data.get_samples(2)[0]
    group[0].append_response_tokens([5], [-0.5])
    group[0].status = Status.ABORTED
    data.add_samples([group])
    assert indices(data.get_samples(1)) == [0]
    again = resumed(data, path).get_samples(2)
    assert indices(again) == [0, 1] and again[0][0].response_length == 0


@pytest.mark.parametrize("had_copies", [True, False])
def test_a_source_without_a_cursor_loses_no_group_that_was_under_way(had_copies: bool) -> None:
    class Source:
        """In the seeds' style: it keeps its state itself."""

        def __init__(self, start: int = 0) -> None:
            self.calls: list[Any] = []
            self.next = start

        def get_samples(self, num_groups: int) -> list[Group]:
            self.next += num_groups
            return groups_of(*range(self.next - num_groups, self.next))

        def save(self, rollout_id: int) -> None:
            self.calls.append(("save", rollout_id))

        def load(self, rollout_id: int) -> None:
            self.calls.append(("load", rollout_id))

    data, again = LedgeredDataSource(Source(), Ledger()), LedgeredDataSource(Source(5), Ledger())
    trained, _, begun, ready, _ = data.get_samples(5)
    data.ledger.consume([trained])
    data.ledger.finish([ready])
    begun[0].append_response_tokens([5], [-0.5])  # of weights that are gone
    state = json.loads(json.dumps(data_state(data, 7)))
    if not had_copies:  # an earlier instep
        assert len(state["ledger"].pop("again")) == 3
    restore_data(again, state, 7, Path())
    again.ledger.check()
    assert (data.source.calls, again.source.calls) == ([("save", 7)], [("load", 7)])
    if not had_copies:
        assert again.ledger.dropped == {"outstanding at a save": 3} and indices(again.get_samples(1)) == [5]
        return
    assert again.ledger.dropped == {} and indices(again.ledger.finished) == [3]
    first = again.of_round(8).get_samples(1)
    twice = LedgeredDataSource(Source(5), Ledger())  # ended again, with one under way and two that wait
    restore_data(twice, json.loads(json.dumps(data_state(again, 8))), 8, Path())
    for session in (again, twice):
        groups = [*(first if session is again else ()), *session.of_round(9).get_samples(4 - (session is again))]
        assert indices(groups) == [1, 2, 4, 5] and all(not group[0].tokens for group in groups)
        session.ledger.finish(groups)
        session.ledger.consume(session.ledger.finished)
        session.ledger.check()
        assert (session.ledger.num_issued, session.ledger.num_consumed, session.ledger.num_dropped) == (6, 6, 0)


def test_samples_know_the_version_that_they_began_under(path: str) -> None:
    data = fresh(path)
    one = data.of_round(1, version=3)
    whole, part = one.get_samples(2)
    part[0].append_response_tokens([5], [-0.5])
    one.add_samples([part])
    one.finish_rollout([whole, *groups_of(100)])
    assert [s.begun_version for group in data.ledger.finished for s in group] == [3, 3, 3]
    two = data.of_round(2, version=4)
    assert [[s.begun_version for s in group] for group in two.get_samples(2)] == [[3, 4], [4, 4]]
    assert [s.begun_version for group in resumed(data, path).ledger.finished for s in group] == [3, 3, 3]
    (own,) = groups_of(200)
    own[0].append_response_tokens([5], [-0.5])
    two.add_samples([own])
    three = data.of_round(3, version=5)
    three.finish_rollout(three.get_samples(1))
    assert own[0].begun_version == 4  # that of the round which made it


def test_groups_are_copied_only_where_a_save_may_find_them_under_way() -> None:
    class Source:
        def get_samples(self, num_groups: int) -> list[Group]:
            return [[Sample(group_index=i, metadata={"lock": threading.Lock()})] for i in range(num_groups)]

    assert indices(LedgeredDataSource(Source(), Ledger(), under_way=False).get_samples(2)) == [0, 1]
    with pytest.raises(RolloutError, match="cannot hold a sample as the data source gave it.*lock") as error:
        LedgeredDataSource(Source(), Ledger()).get_samples(2)
    assert error.value.where == "group 0" and "tensors" in error.value.remedy


def test_finished_samples_keep_tensors_and_what_hooks_have_set(path: str, tmp_path: Path) -> None:
    data = fresh(path)
    (group,) = groups = data.get_samples(1)
    pixels = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    for sample in group:
        sample.reward, sample.metadata["pixels"] = {"score": torch.tensor(0.5)}, pixels
        sample.mine = np.float32([1.5, math.nan])  # type: ignore[attr-defined]
    data.ledger.finish(groups)
    state = {"rollout_id": 7, "num_steps": 0, "version": 1, "evaluations": [], "args": {}, **data_state(data, 7)}
    save_checkpoint(tmp_path, 7, lambda folder: {}, state)
    again, read = fresh(path), read_state(tmp_path / "iter_0000007")
    assert read is not None
    restore_data(again, read, 7, tmp_path)
    for sample in again.ledger.finished[0]:
        score, held = sample.reward["score"], sample.metadata["pixels"]  # type: ignore[index]
        assert score.dtype is torch.float32 and score.item() == 0.5 and held.dtype is torch.bfloat16
        assert held.equal(pixels) and sample.mine.dtype == np.float32  # type: ignore[attr-defined]
        assert sample.mine[0] == 1.5 and math.isnan(sample.mine[1])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value", [{1, 2}, np.array([object()]), torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
)
def test_what_no_checkpoint_can_hold_is_named_with_its_sample(value: Any) -> None:
    sample = Sample(group_index=4, index=9)
    sample.mine = [value]  # type: ignore[attr-defined]
    args: Any = SimpleNamespace(save="x", command="train-async", partial_rollout=False)
    with pytest.raises(RolloutError, match=f"cannot hold mine of a sample: a {type(value).__name__} is") as error:
        check_savable(args, [Sample(metadata={"a": torch.ones(2), "b": b"raw"}), sample])
    assert error.value.where == "group 4, sample 9"
    args.command = "train"  # nothing is left over when it saves
    check_savable(args, [sample])


@pytest.mark.parametrize("dtype", ["O", "f4,O", "V8", "load", "float99"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_state_names_no_type_whose_bits_are_pointers(kind: str, dtype: str) -> None:
    raw = base64.b64encode(bytes(16)).decode()
    with pytest.raises(ValueError, match="array|not a 'tensor'"):
        from_text(json.dumps({"instep": kind, "dtype": dtype, "shape": [1], "base64": raw}))


def test_a_round_drops_its_own_groups_only(path: str) -> None:
    data = fresh(path)
    one, two = data.of_round(1), data.of_round(2)
    first, ahead = one.get_samples(3), two.get_samples(2)
    one.finish_rollout(first[:2])
    assert data.ledger.dropped == {"not returned by the rollout function": 1}
    assert data.ledger.outstanding == [0, 1, 3, 4]
    data.ledger.consume(first[:2])
    two.finish_rollout([*ahead, *groups_of(100)])  # one that the rollout function has made by itself
    assert data.ledger.num_dropped == 1 and data.ledger.outstanding == [3, 4, 100]
    with pytest.raises(RolloutError, match="group 3 cannot be finished: it is finished"):
        two.finish_rollout(ahead[:1])
    with pytest.raises(RolloutError, match="group 2 cannot be finished: it is closed"):
        data.ledger.finish(first[2:])
    data.ledger.check()


def test_what_a_rollout_function_keeps_on_the_data_source_outlives_its_round(path: str) -> None:
    data = fresh(path)
    data.of_round(1).cache = ["mine"]
    assert data.of_round(2).cache == ["mine"] == data.cache


def test_finished_groups_may_stay_for_a_later_round(path: str) -> None:
    """The data source's buffer outlives a rollout call."""
    data = fresh(path)
    one = data.of_round(1)
    groups = one.get_samples(2)
    groups[1][0].append_response_tokens([5], [-0.5])
    groups[1][0].status = Status.COMPLETED
    one.add_samples(groups[1:])
    one.finish_rollout(groups[:1])
    again = resumed(data, path).of_round(2).get_samples(1)
    assert again[0][0].tokens == [5] and again[0][0].status is Status.COMPLETED
    assert data.of_round(2).get_samples(1) == groups[1:] and data.ledger.num_dropped == 0


def test_checkpoints_while_another_thread_issues_are_consistent(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", rows(50))
    data, stop = fresh(path), threading.Event()

    def issue() -> None:
        rollout_id = 0
        while not stop.is_set():
            view = data.of_round(rollout_id)
            groups = view.get_samples(3)
            view.finish_rollout(groups[:2])
            data.ledger.consume(groups[:2])
            rollout_id += 1

    thread = threading.Thread(target=issue)
    thread.start()
    try:
        for _ in range(20):
            again = resumed(data, path)
            assert again.ledger.num_issued == again.source.cursor()["next_group"]
            data.ledger.check()
    finally:
        stop.set()
        thread.join(10)


def test_a_rollout_knows_its_tokens() -> None:
    group = [Sample(group_index=0) for _ in range(2)]
    group[0].append_response_tokens(
        [5, 6], [-0.5, -1.0], weight_versions=[VersionSpan("3", 0, 1), VersionSpan("4", 1, 2)]
    )
    rollout = Rollout(7, [group], {}, {"rollout": 1.0})
    assert rollout.num_response_tokens == 2

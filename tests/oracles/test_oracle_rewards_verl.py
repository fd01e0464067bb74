"""Our grader `dapo` against verl 0.9.1's `math_dapo`, for integer labels and responses with an `Answer:` line."""

from __future__ import annotations

import pytest

from instep.rollout.rewards.dapo import dapo
from tests.oracles import peers
from tests.unit.test_rewards_peers import RIGHT, WRONG

pytestmark = pytest.mark.peers
CASES = [
    (response, str(label))
    for response, label in RIGHT + WRONG
    if str(label).lstrip("-").isdigit() and dapo(response, label)["pred"] != "[INVALID]" and "<|" not in response
]


@pytest.mark.parametrize(("response", "label"), CASES)
def test_dapo_grades_as_verl_does(response: str, label: str) -> None:
    theirs = peers.load("verl.utils.reward_score.math_dapo").compute_score(response, label)
    ours = dapo(response, label)
    assert (ours["score"], ours["acc"], ours["pred"]) == (theirs["score"], theirs["acc"], theirs["pred"])


def test_there_are_cases_of_both_kinds() -> None:
    assert len(CASES) > 20 and {dapo(*case)["acc"] for case in CASES} == {True, False}

"""The graders `dapo` and `f1` by tables that were worked out from slime's sources (`rm_hub`), and by slow oracles."""

from __future__ import annotations

import pytest

from instep.rollout.rewards.dapo import dapo, normal_form
from instep.rollout.rewards.text import f1

RIGHT = [
    ("so\nAnswer: 34", "34"),
    ("Answer: 34\nanswer : 35", "35"),
    ("ANSWER:\n 34", "34"),
    ("Answer: x=5", "5"),
    ("Answer: $x = 5$", "5"),
    ("Answer: 10 cm", "10"),
    ("Answer: 12 dollars", "12"),
    (r"Answer: \$12", "12"),
    ("Answer: 1,234", "1234"),
    (r"Answer: 12{,}345", "12345"),
    (r"Answer: \boxed{34}", "34"),
    (r"Answer: $\boxed{34}$", "34"),
    (r"Answer: the number $34$.", "34"),
    (r"Answer: \text{34}", "34"),
    (r"Answer: 90^\circ", "90"),
    (r"Answer: 5 \mathrm{th}", "5"),
    ("Answer: 34<|im_end|>", "34"),
    ("Answer: -3", "-3"),
    ("Answer: 7 hours", "7"),
    ("Answer: $7.$", "7"),
    ("Answer: 42", "42.0"),
    ("Answer: 42", 42),
    ("Answer: 42", "$42$"),
    ("Answer: 1042", "1,042"),
    (r"Answer: \frac12", r"\frac{1}{2}"),  # not in slime, which takes integers only
    (r"Answer: \sqrt2", r"\sqrt{2}"),
]
WRONG = [
    ("no line", "34"),
    ("Answer 34", "34"),
    ("Answer: 34\n" + 300 * "x", "34"),  # too far from the end
    ("Answer: 34\nAnswer: 35", "34"),
    ("Answer: 42.0", "42"),
    ("Answer: 3.", "3"),
    ("Answer: 50%", "50"),
    (r"Answer: 50\%", "50"),
    ("Answer: **34**", "34"),
    ("Answer: 034", "34"),
    ("Answer: +34", "34"),
    ("Answer: 34 apples", "34"),
    (r"Answer: \frac{68}{2}", "34"),
    ("Answer: 5 = x", "5"),
    ("Answer: ", ""),
    (r"\boxed{34}", "34"),  # verl falls back to the box, slime does not
    ("Answer: 3", "3.7"),  # slime cuts the label to 3
    ("Answer: 1", "inf"),
]


@pytest.mark.parametrize(("response", "label"), RIGHT)
def test_dapo_takes_for_right_what_slime_does(response: str, label: object) -> None:
    got = dapo(response, label)
    assert (got["score"], got["acc"]) == (1.0, True), got


@pytest.mark.parametrize(("response", "label"), WRONG)
def test_dapo_takes_for_wrong_what_slime_does(response: str, label: object) -> None:
    got = dapo(response, label)
    assert (got["score"], got["acc"]) == (-1.0, False), got


def test_normal_forms() -> None:
    forms = {
        "an apple": "apple", r"\frac12": r"\frac{1}{2}", r"\sqrt3x": r"\sqrt{3}x", r"\mbox{yes}": "yes",
        r"2,\text{ and } 3": "23",
        r"x\text{and}y": "x,y", r"x,\text{and}y": "x,y", r"5\text{ m}": "5", r"5\text{m}": "5",
        "1,2,3": "123", "(1,2)": "(1,2)",
        r"a $x$ b $y$": "x", "[INVALID]": "[INVALID]",
    }  # fmt: skip
    assert {answer: normal_form(answer) for answer in forms} == forms


# response, label, F1; slime's f1_score(...)[0]
F1 = [
    ("The red big House!", "a red house", 0.8),
    ("yes", "yes", 1.0),
    ("Yes.", "yes", 1.0),
    ("yes it is", "yes", 0.0),
    ("yes", "yes it is", 0.0),
    ("no", "no answer", 0.0),
    ("noanswer", "noanswer", 1.0),
    ("noanswer here", "noanswer", 0.0),
    ("", "", 0.0),
    ("the", "a", 0.0),
    ("", "house", 0.0),
    ("house", "", 0.0),
    ("cat", "dog", 0.0),
    ("a a b b", "b b b", 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),
    ("state-of-the-art", "stateoftheart", 1.0),
    ("house", ["cat", "a house"], 1.0),
]


@pytest.mark.parametrize(("response", "label", "expected"), F1)
def test_f1_is_that_of_slime(response: str, label: object, expected: float) -> None:
    assert f1(response, label) == pytest.approx(expected)

"""The built-in rewards that read text alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from instep.rollout.rewards import text
from instep.rollout.rewards.dapo import dapo

MAX_ALGEBRA_CHARS = 1000  # a longer answer is compared as text only


class Algebra(NamedTuple):
    """A question that text alone does not decide: whether `answer` equals one of `labels` as mathematics."""

    answer: str
    labels: list[str]


def grade(name: str, response: str, label: Any, metadata: dict[str, Any]) -> float | dict[str, Any] | Algebra:
    """Grade a response by the rule that `--rm-type` calls `name`, in time linear in the length of the response."""
    if name.startswith("boxed_"):
        name, response = name.removeprefix("boxed_"), text.last_boxed(response) or ""
    if name == "exact_match":
        return text.exact(response, label)
    if name == "f1":
        return text.f1(response, label)
    if name == "gpqa":
        return text.gpqa(response, label, metadata)
    if name == "dapo":
        return dapo(response, label)
    if name == "deepscaler":
        response = text.after_thinking(response) or ""
    return _math(text.last_boxed(response), label)


def _math(answer: str | None, label: Any) -> float | Algebra:
    """Return 1.0 if the boxed answer equals the label (or one of several), else 0.0."""
    if answer is None:
        return 0.0
    hard = []
    for one in map(str, label if isinstance(label, list) else [label]):
        one = text.last_boxed(one) or one
        equal = text.quick_equal(answer, one)
        if equal:
            return 1.0
        if equal is None and max(len(answer), len(one)) <= MAX_ALGEBRA_CHARS:
            hard.append(one)
    return Algebra(answer, hard) if hard else 0.0

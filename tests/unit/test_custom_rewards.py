"""Reward functions of users, and every way in which they can fail."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from instep.errors import RewardError
from instep.rollout import runtime
from instep.rollout.rewards.dispatch import apply_rewards
from instep.types import Sample
from tests.bounds import allowed
from tests.unit.test_rewards import arguments


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    runtime.shutdown()


async def good(args: Any, sample: Sample) -> float:
    return 0.5


def plain(args: Any, sample: Sample) -> float:
    return 0.75


async def dictionary(args: Any, sample: Sample) -> dict[str, float]:
    return {"score": 2.0, "other": 1.0}


async def raises(args: Any, sample: Sample) -> float:
    raise KeyError("answer")


async def nan(args: Any, sample: Sample) -> float:
    return float("nan")


async def nothing(args: Any, sample: Sample) -> None:
    return None


async def words(args: Any, sample: Sample) -> str:
    return "1.0"


async def hangs(args: Any, sample: Sample) -> float:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # and will not be told to stop
            await asyncio.sleep(1)
            return 0.0


async def blocks(args: Any, sample: Sample) -> float:
    time.sleep(3)  # noqa: ASYNC251 - the fault under test
    return 0.0


def blocks_in_a_thread(args: Any, sample: Sample) -> float:
    time.sleep(3)
    return 0.0


async def per_group(args: Any, samples: list[Sample]) -> list[float]:
    return [float(s.index or 0) for s in samples]


async def too_few(args: Any, samples: list[Sample]) -> list[float]:
    return [1.0]


def apply(name: str, **changed: Any) -> list[Any]:
    args = arguments(rm_type=None, custom_rm_path=f"{__name__}.{name}", **changed)
    samples = [Sample(group_index=4, index=i) for i in (8, 9)]
    runtime.run(apply_rewards(args, samples, args.reward_key), timeout=30)
    return [s.reward for s in samples]


def test_custom_rewards() -> None:
    assert apply("good") == [0.5, 0.5]
    assert apply("plain") == [0.75, 0.75]
    assert apply("dictionary", reward_key="score") == [{"score": 2.0, "other": 1.0}] * 2
    assert apply("per_group", group_rm=True) == [8.0, 9.0]


@pytest.mark.parametrize(
    ("name", "message", "changed"),
    [
        ("raises", "raised KeyError", {}),
        ("nan", "nan is not a finite number", {}),
        ("nothing", "None is not a finite number", {}),
        ("words", "'1.0' is not a finite number", {}),
        ("dictionary", "is a dict with", {}),
        ("dictionary", "not 'scores'", {"reward_key": "scores"}),
        ("hangs", "took more than 0.3 s", {"reward_timeout": 0.3}),
        ("blocks", "took more than 0.3 s", {"reward_timeout": 0.3}),
        ("blocks_in_a_thread", "took more than 0.3 s", {"reward_timeout": 0.3}),
    ],
)
@pytest.mark.alone
def test_a_reward_that_fails_is_named(name: str, message: str, changed: dict[str, Any]) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match=message) as caught:
        apply(name, **changed)
    assert time.monotonic() - start < allowed(2.5)
    assert f"{__name__}.{name}" in caught.value.where
    assert "group 4, sample" in caught.value.where and caught.value.remedy


def takes_nothing() -> float:
    return 1.0


def test_a_reward_that_cannot_be_called_is_named_where_it_stands() -> None:
    with pytest.raises(RewardError, match="takes 0 positional arguments but 2 were given") as caught:
        apply("takes_nothing")
    assert f"{__file__}:{takes_nothing.__code__.co_firstlineno}, the definition of takes_nothing" in caught.value.where
    assert "runtime.py" not in caught.value.where and "f(args, sample), or TRL's" in caught.value.remedy


def test_a_group_reward_of_another_length_is_named() -> None:
    with pytest.raises(RewardError, match="for a group of 2 samples") as caught:
        apply("too_few", group_rm=True)
    assert caught.value.where.startswith(f"--custom-rm-path {__name__}.too_few, {__file__}:")
    assert caught.value.where.endswith(": group 4")


def test_the_loop_is_usable_after_it_was_blocked() -> None:
    with pytest.raises(RewardError):
        apply("blocks", reward_timeout=0.3)
    assert apply("good") == [0.5, 0.5]


@pytest.mark.alone
def test_many_quick_rewards_are_cheap() -> None:
    args, rng = arguments(), random.Random(0)
    samples = [Sample(index=i, response=rf"\boxed{{{rng.randrange(9)}}}", label="4") for i in range(2000)]
    start = time.perf_counter()
    runtime.run(apply_rewards(args, samples, None), timeout=30)
    assert time.perf_counter() - start < allowed(2.0)
    assert [s.reward for s in samples] == [float(s.response == r"\boxed{4}") for s in samples]


async def of_siblings(args: Any, samples: list[Sample] | Sample) -> Any:
    return torch.tensor([0.5 + s.index for s in samples]) if isinstance(samples, list) else np.float32(0.25)


async def one_at_a_time(args: Any, sample: Sample) -> dict[str, Any]:
    return {"score": torch.tensor(float(sample.index)), "pred": "x"}


@pytest.mark.parametrize(
    ("name", "siblings", "expected"),
    [
        ("of_siblings", True, [8.5, 9.5]),
        ("of_siblings", False, [0.25, 0.25]),
        ("one_at_a_time", True, [{"score": 8.0, "pred": "x"}, {"score": 9.0, "pred": "x"}]),
    ],
)
def test_siblings_go_to_a_function_that_takes_lists_and_numbers_are_pythons(
    name: str, siblings: bool, expected: list[Any]
) -> None:
    args = arguments(custom_rm_path=f"{__name__}.{name}", reward_key="score")
    samples = [Sample(group_index=4, index=i) for i in (8, 9)]
    runtime.run(apply_rewards(args, samples, args.reward_key, are_siblings=siblings), timeout=30)
    found = [s.reward for s in samples]
    assert found == expected and [s.get_reward_value(args) for s in samples] == [
        x["score"] if isinstance(x, dict) else x for x in expected
    ]
    values = [v for r in found for v in (r.values() if isinstance(r, dict) else [r])]
    assert {type(v) for v in values} <= {float, str}

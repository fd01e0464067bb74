"""What a hook raises or returns has methods of the user's; one that fails takes no name from the hook's error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.controller.advantage_columns import processed_rewards
from instep.errors import ConfigError, InstepError, RewardError, RolloutError
from instep.rollout import runtime
from instep.rollout.outputs import as_eval_output, as_train_output
from instep.rollout.rewards.dispatch import _guard, _one_each
from instep.system.hooks import Hook
from instep.system.hooks.user_code import described, said
from instep.types import Sample, reward_of

ME = __name__


def fails(*args: Any) -> Any:
    raise KeyError


class MuteError(BaseException):
    __repr__ = __str__ = fails  # type: ignore[assignment]


class Mute:
    """It can be neither shown nor counted."""

    __repr__ = __str__ = __len__ = __iter__ = __float__ = fails


class EndsTheProcess(SystemExit):
    __repr__ = __str__ = fails  # type: ignore[assignment]


def endless(*args: Any) -> str:
    return "x" * 1_000_000


class Endless(ValueError):
    __repr__ = __str__ = endless  # type: ignore[assignment]


RAISED = {"MuteError": MuteError, "EndsTheProcess": EndsTheProcess, "Endless": Endless}
raised: type[BaseException] = MuteError


def hook(*args: Any, **kwargs: Any) -> None:
    raise raised


async def task(*args: Any, **kwargs: Any) -> None:
    asyncio.get_running_loop().create_task(ends())
    await asyncio.sleep(600)


async def ends() -> None:
    raise EndsTheProcess


def check(error: InstepError, *names: str) -> None:
    text = str(error)
    assert all(name in text for name in names) and __file__ in text and len(text) < 3000


@pytest.mark.parametrize("kind", RAISED)
def test_what_a_hook_raises(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "raised", RAISED[kind])
    one = Hook("--rollout-sample-filter-path", f"{ME}.hook")
    with pytest.raises(RolloutError) as caught:
        one.call()
    check(caught.value, f"{ME}.hook raised ", "--rollout-sample-filter-path", "in hook")
    with pytest.raises(RewardError) as of_reward, _guard("--custom-rm-path", hook):
        hook()
    check(of_reward.value, "the reward function raised ", "in hook")


def test_what_a_task_of_a_hook_raises() -> None:
    one = Hook("--rollout-function-path", f"{ME}.task")
    with pytest.raises(RolloutError, match="a task that a hook started raised a EndsTheProcess") as caught:
        runtime.run(one.acall(), timeout=100)
    check(caught.value, "in ends")
    runtime.shutdown()


def test_what_a_hook_returns() -> None:
    mute, one = Mute(), Hook("--custom-reward-post-process-path", f"{ME}.hook")
    with pytest.raises(RolloutError, match=f"{ME}.hook returned a Mute"):
        processed_rewards(one, mute, [])
    with pytest.raises(RolloutError, match=f"{ME}.hook returned"):
        processed_rewards(one, (0, mute), [])
    with pytest.raises(RolloutError, match="returned a Mute"):
        as_train_output(mute, one)
    with pytest.raises(RolloutError, match="a group is a Mute"):
        as_train_output([mute], one)
    with pytest.raises(RolloutError, match="returned a Mute"):
        as_eval_output({mute: mute}, one)
    with pytest.raises(RewardError, match=r"the reward a Mute \(its __repr__ raises\) is not a finite number"):
        reward_of(Sample(reward=mute))  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="it returned a Mute"):
        _one_each(SimpleNamespace(custom_rm_path=""), f"{ME}.hook", [Sample()], mute)  # type: ignore[arg-type]


def test_a_module_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "mute_at_once": f"import {ME}\nraise {ME}.MuteError\n",
        "mute_when_asked": f"import {ME}\ndef __getattr__(name):\n    raise {ME}.MuteError\n",
        "found_no_module": "raise ModuleNotFoundError('pip install it')\n",
        "wrong_syntax": "raise SyntaxError('x', (object(), 1, 1, 'x'))\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=f"importing '{name}' raised ") as caught:
            Hook("--custom-rm-path", f"{name}.reward").call()
        assert f"{tmp_path}/{name}.py:{text.count(chr(10))} in " in caught.value.where


def test_what_is_said_of_a_value_is_short() -> None:
    assert said("x" * 100, 10) == "'xxxxxxxxx ..." and said([1, 2]) == "[1, 2]"
    assert said(Mute()) == "a Mute (its __repr__ raises)"
    assert described("x" * 100) == "a str of 100" and described(7) == "7"

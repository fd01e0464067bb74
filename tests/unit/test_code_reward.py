"""`--rm-type code`: programs of a model against tests, in sandboxes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from instep.data.graders import wrong_label
from instep.errors import ConfigError, RewardError
from instep.rollout.rewards import code
from instep.rollout.rewards.code import last_block, passes_all, read_tests
from instep.rollout.sandbox import Limits, run

SUM = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    if asyncio.run(run._available())[0] is None:
        pytest.skip("this host has no sandbox")


def answer(program: str) -> str:
    return f"First\n```python\nprint('a draft')\n```\nso:\n```python\n{program}\n```\nDone.<|im_end|>"


def graded(program: str, label: Any, **limits: Any) -> float:
    return asyncio.run(passes_all(answer(program), label, unsafe=False, limits=Limits(**limits)))


def test_the_last_block_counts() -> None:
    assert last_block(answer("x = 1")) == "x = 1\n"
    assert last_block("```py\na\n``` ```\nb\n```") == "b\n" and last_block("none ```python x") is None
    others = "```text\nan idea\n```\nthen\n```Python\nx = 2\n```\n```bash\nls\n```\n"
    assert last_block(others) == "x = 2\n"
    assert asyncio.run(passes_all("no code", ASSERTS, unsafe=False)) == 0.0


@pytest.mark.parametrize(
    ("program", "label", "reward"),
    [
        (SUM, ASSERTS, 1.0),
        (SUM, json.dumps(ASSERTS), 1.0),
        (SUM, "\n".join(ASSERTS), 1.0),
        (SUM.replace("+", "-"), ASSERTS, 0.0),
        ("print(sum(map(int, input().split())))", ECHO, 1.0),
        ("print(sum(map(int, input().split())))", json.dumps(ECHO), 1.0),
        ("print(3)", ECHO, 0.0),
        ("def add(", ASSERTS, 0.0),  # no Python
        ("import os; os._exit(0)", ASSERTS, 0.0),  # ends before the tests
        ("import sys; sys.exit(0)", ASSERTS, 0.0),
        ("print(sum(map(int, input().split())))\nexit()", ECHO, 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", ECHO, 1.0),
        ("print(sum(map(int, open(0).read().split())))", ECHO, 1.0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", ECHO, 0.0),
        ("print('x' * 10**7)", ASSERTS, 0.0),  # too much output
    ],
)
def test_a_program_passes_all_tests_or_has_no_reward(program: str, label: Any, reward: float) -> None:
    assert graded(program, label) == reward


def test_limits_are_the_programs_fault() -> None:
    assert graded("while True: pass", ASSERTS, seconds=4.0) == 0.0
    assert graded("x = 'a' * 10**10", ASSERTS, memory=256 << 20) == 0.0


def test_a_sandbox_that_does_not_start_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> run.Outcome:
        return run.Outcome("", "no namespaces: fork: Resource temporarily unavailable", 1)

    monkeypatch.setattr(code, "run_python", broken)
    with pytest.raises(RewardError, match="did not start, 3 times: no namespaces: fork"):
        graded(SUM, ASSERTS)


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_found", (None, "none"))
    with pytest.raises(ConfigError, match="no sandbox"):
        graded(SUM, ASSERTS)
    assert asyncio.run(passes_all(answer(SUM), ASSERTS, unsafe=True)) == 1.0


@pytest.mark.parametrize(
    "label",
    [{"inputs": ["1"]}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, [], 3.5, "", ["", "x"]],
)
def test_labels_that_are_no_tests(label: Any) -> None:
    assert wrong_label("code", label, {}) or isinstance(label, float)
    with pytest.raises(ValueError, match=r"inputs|neither|no test"):
        read_tests(label)


def test_labels_that_are() -> None:
    for label in (ECHO, ASSERTS, json.dumps(ECHO), "assert True"):
        assert wrong_label("code", label, {}) == "" and read_tests(label)

"""Built-in rewards against answers worked out by hand."""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from instep.errors import ConfigError, RewardError
from instep.rollout import runtime
from instep.rollout.rewards import text
from instep.rollout.rewards.dapo import dapo
from instep.rollout.rewards.dispatch import compute_reward
from instep.rollout.tokens import without_end
from instep.system.ports import free_port
from instep.types import Sample
from tests.assets import make_checkpoint
from tests.bounds import allowed


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    runtime.shutdown()


@functools.cache
def checkpoint() -> str:
    folder = Path(tempfile.mkdtemp(prefix="rewards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(make_checkpoint(folder / "hf"))


def arguments(**changed: Any) -> Any:
    values: dict[str, Any] = dict(rm_type="math", custom_rm_path=None, reward_key=None, group_rm=False)
    values |= dict(reward_timeout=20.0, reward_num_workers=1, rollout_seed=1)
    values |= dict(hf_checkpoint=checkpoint(), trust_remote_code=False, chat_template_text=None)
    return SimpleNamespace(**{**values, **changed})


def reward(response: str, label: Any, **changed: Any) -> Any:
    metadata = changed.pop("metadata", {})
    sample = Sample(group_index=3, index=7, response=response, label=label, metadata=metadata)
    return runtime.run(compute_reward(arguments(**changed), sample), timeout=60)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),  # cut off by the length limit
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"{ \boxed{ 5 }", "5"),
        (r"\fbox{7}", "7"),
        ("no box {3}", None),
        ("", None),
    ],
)
def test_last_boxed(response: str, expected: str | None) -> None:
    assert text.last_boxed(response) == expected


@pytest.mark.alone
def test_hostile_responses_are_read_in_linear_time() -> None:
    start = time.perf_counter()
    text.last_boxed("\\boxed{" * 50_000)
    text.normalize("{" * 50_000 + " " * 50_000)
    text.gpqa("answer" + " " * 200_000 + "answer", "A", {})
    dapo("Answer:" * 100_000, "1")
    for hostile in ("a ", "a", "the\n", "'!", "yes ", "\u0130", "\u00e9 "):
        text.f1(hostile * 20_000, ["the answer"] * 20)
    assert text.as_exact_number("9" * 100_000) is None
    assert time.perf_counter() - start < allowed(1.0)


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("34", "34", True),
        (" 34. ", "34", True),
        ("$34$", "34", True),
        ("1,234", "1234", True),
        ("12,34", "1234", None),  # no thousands
        ("0.5", "1/2", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"-\dfrac{3}{4}", "-0.75", True),
        ("34", "35", False),
        ("34.0", 34.0, True),
        ("1/0", "3", None),
        ("", "3", False),
        ("", "", False),  # nothing is no answer
        (r"\text{Tuesday}", "Tuesday", True),
        ("x+1", "1+x", None),
        ("0.30000000000000004", "0.3", False),  # exact, not floating point
    ],
)
def test_quick_equal(answer: str, label: Any, expected: bool | None) -> None:
    assert text.quick_equal(answer, str(label)) is expected


def test_math_reward() -> None:
    assert reward(r"thus \boxed{34}", "34") == 1.0
    assert reward(r"thus \boxed{34}", 34) == 1.0
    assert reward(r"thus \boxed{35}", "34") == 0.0
    assert reward("thus 34", "34") == 0.0  # not boxed
    assert reward(r"\boxed{5}", ["4", "5"]) == 1.0
    assert reward(r"\boxed{5}", r"the answer is \boxed{5}") == 1.0


def test_math_reward_knows_algebra() -> None:
    assert reward(r"\boxed{2\sqrt{2}}", r"\sqrt{8}") == 1.0
    assert reward(r"\boxed{x=5}", "5") == 1.0
    assert reward(r"\boxed{3\sqrt{2}}", r"\sqrt{8}") == 0.0


def test_the_end_of_turn_token_is_no_part_of_an_answer() -> None:
    for end in ("", "<|im_end|>", "<|im_end|>\n", "<|im_end|><|endoftext|>"):
        assert reward(f"yes{end}", "yes", rm_type="f1") == 1.0
        assert reward(f"A red house{end}", "house", rm_type="f1") == pytest.approx(2 / 3)
        assert reward(f"Answer: 34{end}", "34", rm_type="dapo")["score"] == 1.0


def test_many_end_tokens_are_cut_off_in_linear_time() -> None:
    args = arguments()
    assert without_end(args, "yes <|im_end|>") == "yes"
    start = time.perf_counter()
    assert without_end(args, "yes" + "<|im_end|>\n" * 100_000 + " " * 100_000 + "<|im_end|>" * 100_000) == "yes"
    assert time.perf_counter() - start < allowed(1.0)  # 0.01 s; where each token copies the rest 36 s


def test_other_rules() -> None:
    thought = r"<think>\boxed{1}</think> so \boxed{2}"
    assert reward(thought, "2", rm_type="deepscaler") == 1.0
    assert reward(r"\boxed{2}", "2", rm_type="deepscaler") == 0.0  # never left its thoughts
    assert reward("bla\nAnswer: 34", "34", rm_type="dapo") == {"score": 1.0, "acc": True, "pred": "34"}
    assert reward("Answer: 34\nAnswer: 35", "34", rm_type="dapo") == {"score": -1.0, "acc": False, "pred": "35"}
    assert reward("no line", "34", rm_type="dapo")["score"] == -1.0
    # 2 common words, 3 said, 2 wanted: precision 2/3, recall 1, F1 = 4/5
    assert reward("The red big House!", "a red house", rm_type="f1") == pytest.approx(0.8)
    assert reward(r"x \boxed{red house}", "a red house", rm_type="boxed_f1") == 1.0
    assert reward(r"x \boxed{3}", "3", rm_type="f1", metadata={"rm_type": "math"}) == 1.0
    twice = [reward("", "", rm_type="random") for _ in range(2)]
    assert twice[0] == twice[1] and twice[0] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"so \boxed{C}", "C", 1.0),
        ("The answer is (B).", "B", 1.0),
        ("The answer is (B). No: the answer is D", "B", 0.0),
        ("Answer can be found easily\nA", "A", 1.0),  # slime reads "can" as C
        ("the answer can be anything", "C", 0.0),
        (r"\boxed{blue}", "B", 1.0),
        ("C", "green", 1.0),  # the label may be the option's text
    ],
)
def test_gpqa(response: str, label: str, expected: float) -> None:
    assert text.gpqa(response, label, {"choices": ["red", "blue", "green", "black"]}) == expected


def ask_remote(*answers: Any, **flags: Any) -> tuple[Any, list[Any]]:
    """The reward by a server that gives these answers one after the other (a number is a status), and its requests.

    None: it is not there yet, and comes after a second."""
    seen, left, port = list[Any](), list(answers), free_port()
    args = arguments(rm_type="remote_rm", rm_url=f"http://127.0.0.1:{port}/", **flags)

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        value = left.pop(0)
        return web.Response(status=value) if type(value) is int else web.json_response(value)

    async def serve() -> Any:
        app = web.Application()
        app.add_routes([web.post("/", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        starts = asyncio.create_task(start(web.TCPSite(runner, "127.0.0.1", port)))
        if answers[0] is not None:
            await starts
        sample = Sample(prompt="1+1=", response="2", label="2")
        try:
            return await compute_reward(args, sample)
        finally:
            await starts
            await runner.cleanup()

    async def start(site: web.TCPSite) -> None:
        if answers[0] is None:
            left.pop(0)
            await asyncio.sleep(1)
        await site.start()

    return runtime.run(serve(), timeout=40), seen


@pytest.mark.parametrize(
    ("answer", "expected"), [({"reward": 0.25}, 0.25), (0.5, 0.5), ({"score": 1.0}, {"score": 1.0})]
)
def test_remote_reward(answer: Any, expected: Any) -> None:
    assert ask_remote(answer) == (expected, [{"prompt": "1+1=", "response": "2", "label": "2"}])


def test_a_reward_server_that_is_busy_or_starts_again() -> None:
    value, seen = ask_remote(429, 503, 500, 502, 429, 0.5, reward_timeout=30)
    assert value == 0.5 and len(seen) == 6
    assert ask_remote(None, 0.5, reward_timeout=30)[0] == 0.5


def test_a_reward_server_that_stays_away_or_refuses() -> None:
    with pytest.raises(RewardError, match=r"[234] attempts in 1 s failed, the last with 503"):
        ask_remote(503, 503, 503, 503, 503, reward_timeout=1.0)
    with pytest.raises(RewardError, match="refused with 400"):
        ask_remote(400, 0.5)
    assert ask_remote("good")[0] == "good"  # which `apply_rewards` refuses, as it does of any function


def test_no_reward_an_unknown_one_and_no_label() -> None:
    with pytest.raises(ConfigError, match="no reward is chosen"):
        reward("", "1", rm_type=None)
    with pytest.raises(ConfigError, match="unknown reward 'maths'"):
        reward("", "1", rm_type="maths")
    with pytest.raises(RewardError, match="no label") as caught:
        reward(r"\boxed{1}", None)
    assert "group 3, sample 7" in caught.value.where

"""Rewards in TRL's form, exact match, and what becomes of a reward or a generate function that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.data.source import load_source
from instep.errors import ConfigError, RewardError, RolloutError
from instep.preflight.inputs import check_inputs
from instep.rollout import runtime
from instep.rollout.outputs import as_train_output
from instep.rollout.rewards.dispatch import apply_rewards
from instep.rollout.sandbox import run
from instep.rollout.vllm_rollout import generate_rollout
from instep.types import Sample, Status
from tests.assets import make_checkpoint, make_prompts

ME = __name__
seen: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    seen.clear()
    yield
    runtime.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    make_checkpoint(folder / "hf", layers=1)
    make_prompts(folder / "train.jsonl", 8)
    return folder


@pytest.fixture
def make(folder: Path) -> Callable[..., Any]:
    def parsed(*more: str) -> Any:
        line = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --input-key prompt --label-key label "
        line += "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-rollout 1 --actor-num-gpus-per-node 1 "
        line += f"--device cpu --rollout-max-response-len 8 --run-dir {folder}/run "
        return parse([*line.split(), *more], "train")

    return parsed


def rewards(args: Any, samples: list[Sample], **more: Any) -> list[Any]:
    runtime.run(apply_rewards(args.view({}), samples, args.reward_key, **more), timeout=30)
    return [s.reward for s in samples]


def pair() -> list[Sample]:
    texts = ("4<|im_end|>", "<think>or 5?</think> 4 5 ")
    more: dict[str, Any] = {"group_index": 3, "label": ["4", "4 5"], "metadata": {"level": "easy"}}
    return [
        Sample(index=i, prompt="2+2=", response=t, tokens=[1, 2, i], response_length=1, **more)
        for i, t in enumerate(texts)
    ]


def lengths(completions: list[str], **kwargs: Any) -> list[float]:
    seen.append({"completions": completions, **kwargs})
    return [float(len(text)) for text in completions]


async def of_messages(prompts: list[str], completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    return [float(messages[0]["content"] == "4") for messages in completions]


def too_few(completions: list[str], **kwargs: Any) -> list[float]:
    return []


@pytest.mark.parametrize("group", [True, False])
def test_trls_form(make: Callable[..., Any], group: bool) -> None:
    args = make("--custom-rm-path", f"{ME}.lengths", *(["--group-rm"] if group else []))
    assert rewards(args, pair()) == [1.0, 24.0]
    (first, *others) = sorted(seen, key=lambda call: call["completion_ids"])
    assert len(others) == (0 if group else 1)
    n = 2 if group else 1
    assert first == {
        **{"completions": ["4", "<think>or 5?</think> 4 5"][:n], "completion_ids": [[0], [1]][:n]},
        **{"prompts": ["2+2="] * n, "label": [["4", "4 5"]] * n, "level": ["easy"] * n},
    }


def test_trls_form_for_conversations_and_siblings(make: Callable[..., Any]) -> None:
    args = make("--custom-rm-path", f"{ME}.of_messages", "--apply-chat-template")
    assert rewards(args, pair(), are_siblings=True) == [1.0, 0.0]
    with pytest.raises(RewardError, match="for a group of 1 samples"):
        rewards(make("--custom-rm-path", f"{ME}.too_few"), pair())


def test_exact_match(make: Callable[..., Any]) -> None:
    assert rewards(make("--rm-type", "exact_match"), pair()) == [1.0, 1.0]
    other = pair()
    other[0].response, other[1].response = "4.", "4  5 6"
    assert rewards(make("--rm-type", "exact_match"), other) == [0.0, 0.0]


async def of_slimes_form(args: Any, sample: Sample | list[Sample], **kwargs: Any) -> Any:
    return [0.5] * len(sample) if isinstance(sample, list) else 0.5


FORMS = {
    "built-in": ["--rm-type", "exact_match"],
    "TRL's": ["--custom-rm-path", f"{ME}.lengths"],
    "slime's": ["--custom-rm-path", f"{ME}.of_slimes_form"],
}


@pytest.mark.parametrize(
    ("form", "group"),
    [("built-in", False), *((form, group) for form in ("TRL's", "slime's") for group in (False, True))],
)
def test_a_failed_generation_is_no_zero(make: Callable[..., Any], form: str, group: bool) -> None:
    """No function is asked about it."""
    failed, args = pair(), make(*FORMS[form], *(["--group-rm"] if group else []))
    failed[1].status = Status.FAILED
    with pytest.raises(RewardError, match="has failed, so it has no reward") as caught:
        rewards(args, failed)
    assert "group 3, sample 1" in caught.value.where and FORMS[form][1] in caught.value.where
    assert failed[1].reward is None
    failed[1].reward = 0.25  # what the generate function says counts
    first, second = rewards(args, failed)
    assert first in (0.5, 1.0) and (group or second == 0.25)


# ---- failures that are counted


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.group_index == 3:
        raise ConnectionError("the tool's server is gone")
    sample.tokens = [5, 6]
    sample.append_response_tokens([7, 2], [-1.0, -1.0])
    sample.response, sample.status = "x", Status.COMPLETED
    return sample


async def fails_in_two_groups(args: Any, sample: Sample) -> float:
    if sample.group_index in (0, 2) and sample.index % 2:
        raise TimeoutError("the judge did not answer")
    return 1.0


async def fails_in_all(args: Any, sample: Sample) -> float:
    raise TimeoutError("the judge did not answer")


def rollout(args: Any) -> tuple[Any, LedgeredDataSource]:
    view = args.view({"rollout_engine_urls": []})
    source = LedgeredDataSource(load_source(args, view), Ledger())
    return as_train_output(generate_rollout(view, 0, source)), source


def test_failed_groups_are_dropped_counted_and_shown(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--custom-generate-function-path", f"{ME}.generate", "--custom-rm-path", f"{ME}.fails_in_two_groups"]
    with pytest.raises(RewardError, match="the judge did not answer"):
        rollout(make(*flags))
    caplog.set_level(logging.WARNING)
    output, source = rollout(make(*flags, "--skip-failed-groups", "--over-sampling-batch-size", "6"))
    assert len(output.samples) == 2 and {g[0].group_index for g in output.samples} <= {1, 4, 5}
    failed = output.metrics["rollout/num_groups_failed"]
    assert failed == source.ledger.dropped["failed"] == 3 and output.metrics["rollout/num_groups_surplus"] == 1
    said = caplog.text
    assert "the judge did not answer" in said and "the tool's server is gone" in said and "group 3" in said


def test_where_most_groups_fail_the_run_ends(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--custom-generate-function-path", f"{ME}.generate", "--custom-rm-path", f"{ME}.fails_in_all"]
    with pytest.raises((RewardError, RolloutError), match="the judge did not answer|tool's server"):
        rollout(make(*flags, "--skip-failed-groups"))
    assert caplog.text.count("a group is dropped") == 3  # of eight


def test_code_is_refused_where_no_sandbox_is(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_found", (None, "unshare: Operation not permitted"))
    with pytest.raises(ConfigError, match="no sandbox for the code of a model: unshare"):
        check_inputs(make("--rm-type", "code"))
    check_inputs(make("--rm-type", "code", "--unsafe-local-exec"))

"""Hooks of rollouts on a running embedded engine: generate functions, rewards, evaluation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instep.errors import RewardError, RolloutError
from instep.rollout.http import post
from instep.rollout.vllm_rollout import generate, generate_rollout
from instep.types import Sample
from tests.engines.rollouts import calls, rollout, source_of

ME = __name__


TOKENIZER = None


async def seed_generate(args, sample: Sample, sampling_params) -> Sample:
    """The example of the seeds' usage guide ("Custom Rollout Function"), word for word but for its imports."""
    from transformers import AutoTokenizer

    global TOKENIZER
    if TOKENIZER is None:
        TOKENIZER = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)

    # send request to router
    prompt_token_ids = TOKENIZER(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(
        f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate",
        {
            "model": args.hf_checkpoint,
            "token_ids": prompt_token_ids,
            "sampling_params": {"max_tokens": sampling_params["max_new_tokens"]},
        },
    )

    choice = output["choices"][0]
    response_token_ids = list(choice.get("token_ids") or [])

    # set sample
    sample.tokens = prompt_token_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    finish_reason = choice.get("finish_reason") or "stop"
    if finish_reason == "length":
        sample.status = Sample.Status.TRUNCATED
    elif finish_reason in ("abort", "cancelled"):
        sample.status = Sample.Status.ABORTED
    else:
        sample.status = Sample.Status.COMPLETED
    sample.response = TOKENIZER.decode(response_token_ids) if response_token_ids else ""

    return sample


def test_the_generate_function_of_the_seeds(make_args: Callable[..., Any]) -> None:
    output = rollout(make_args("--custom-generate-function-path", f"{ME}.seed_generate"))
    for sample in (s for group in output.samples for s in group):
        assert 1 <= sample.response_length <= 12
        assert sample.status in (Sample.Status.TRUNCATED, Sample.Status.COMPLETED) and sample.reward is not None
        assert sample.rollout_log_probs is None and sample.weight_versions == []  # unknown, and not invented


async def fan_out(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> list[Sample]:
    calls.append(evaluation)
    first = await generate(args, sample, {**sampling_params, "max_new_tokens": 4})
    second = copy.deepcopy(first)
    second.append_response_tokens([2, 2], trainable=False)
    second.metadata["part"] = 2
    return [first, second]


def test_fan_out(make_args: Callable[..., Any]) -> None:
    path = "instep.rollout.filters.check_reward_nonzero_std"
    args = make_args(
        *("--custom-generate-function-path", f"{ME}.fan_out", "--rollout-sample-hook-path", f"{ME}.sync_hook"),
        *("--rollout-sample-hook-path", f"{ME}.async_hook", "--dynamic-sampling-filter-path", path),
    )
    output = rollout(args, rollout_id=5)
    assert set(calls) == {False}
    for group in output.samples:
        assert len(group) == 4
        assert group[0].execution_id == group[1].execution_id != group[2].execution_id == group[3].execution_id
        assert [s.metadata.get("part") for s in group] == [None, 2, None, 2]
        assert all(s.reward is not None and s.metadata["hooked"] == [5, "async"] for s in group)
        assert group[1].loss_mask == [1] * (group[1].response_length - 2) + [0, 0]


def sync_hook(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    sample.metadata["hooked"] = [rollout_id]


async def async_hook(args: Any, sample: Sample) -> Sample:
    sample.metadata["hooked"].append("async")
    return sample


async def rank_in_group(args: Any, samples: list[Sample]) -> list[float]:
    calls.append([s.index for s in samples])
    return [float(i) for i in range(len(samples))]


def test_group_rewards(make_args: Callable[..., Any]) -> None:
    output = rollout(make_args("--group-rm", "--custom-rm-path", f"{ME}.rank_in_group"))
    assert sorted(calls) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [[s.reward for s in group] for group in output.samples] == [[0.0, 1.0]] * 4


async def fails_on_five(args: Any, sample: Sample) -> float:
    return float("nan") if sample.index == 5 else 0.0


def test_a_failing_reward_ends_the_rollout(make_args: Callable[..., Any]) -> None:
    args = make_args("--custom-rm-path", f"{ME}.fails_on_five")
    with pytest.raises(RewardError, match="not a finite number") as caught:
        generate_rollout(args, 0, source_of(args))
    where = caught.value.where
    assert where.startswith(f"--custom-rm-path {ME}.fails_on_five, {__file__}:") and where.endswith(
        ": group 2, sample 5"
    )


async def forgets_the_status(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.response_length = [1, 2, 3], 1
    return sample


async def breaks(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample.metadata["missing"]


@pytest.mark.parametrize(("name", "message"), [("forgets_the_status", "still PENDING"), ("breaks", "KeyError")])
def test_a_bad_generate_function_is_named(make_args: Callable[..., Any], name: str, message: str) -> None:
    args = make_args("--custom-generate-function-path", f"{ME}.{name}")
    with pytest.raises(RolloutError, match=message) as caught:
        generate_rollout(args, 0, source_of(args))
    assert name in str(caught.value) and "group 0, sample 0" in caught.value.where


# ---- evaluation


def test_evaluation_on_three_sets(make_args: Callable[..., Any], tmp_path: Path) -> None:
    easy, other = tmp_path / "easy.jsonl", tmp_path / "other.jsonl"
    easy.write_text("".join(json.dumps({"prompt": f"{i}", "label": "1"}) + "\n" for i in range(3)))
    other.write_text("".join(json.dumps({"question": f"{i}?", "gold": "2"}) + "\n" for i in range(4)))
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"""
eval:
  defaults: {{temperature: 0.0}}
  datasets:
    - {{name: easy, path: {easy}, max_response_len: 5}}
    - name: other
      path: {other}
      input_key: question
      label_key: gold
      n_samples_per_eval_prompt: 2
      temperature: 1.0
      max_response_len: 7
      rm_type: math
      custom_generate_function_path: {ME}.evaluated
      metadata_overrides: {{kind: b}}
    - {{name: own, path: {easy}, max_response_len: 5, custom_rm_path: {ME}.measured, reward_key: length}}
"""
    )
    args = make_args("--eval-config", str(config), "--eval-interval", "1")
    output = generate_rollout(args, 0, None, evaluation=True)
    assert set(output.data) == {"easy", "other", "own"}
    first, second, third = (output.data[name] for name in ("easy", "other", "own"))
    assert [len(first[k]) for k in ("rewards", "truncated", "samples")] == [3, 3, 3]
    assert [len(second[k]) for k in ("rewards", "truncated", "samples")] == [8, 8, 8]
    assert [s.prompt for s in first["samples"]] == [
        f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n" for i in range(3)
    ]
    assert first["rewards"] == [float(sum(s.tokens[-s.response_length :]) % 2) for s in first["samples"]]
    assert all(s.response_length <= 5 and s.sampling_params["temperature"] == 0.0 for s in first["samples"])
    assert second["rewards"] == [1.0] * 8  # by its own rm_type, although --custom-rm-path is given
    assert all(s.metadata["kind"] == "b" and s.label == "2" for s in second["samples"])
    assert calls == [(True, 7, 1.0)] * 8
    assert third["rewards"] == [s.response_length for s in third["samples"]] and len(third["rewards"]) == 3
    assert all(s.reward["label"] == "1" for s in third["samples"])  # by its own custom_rm_path, not --custom-rm-path
    again = generate_rollout(args, 9, None, evaluation=True)
    assert [s.tokens for s in again.data["easy"]["samples"]] == [s.tokens for s in first["samples"]]
    assert len({tuple(s.tokens) for s in second["samples"]}) > 4  # n samples of one prompt differ


async def measured(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    return {"length": sample.response_length, "label": sample.label}


async def evaluated(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    calls.append((evaluation, sampling_params["max_new_tokens"], sampling_params["temperature"]))
    sample = await generate(args, sample, sampling_params)
    sample.response = r"so \boxed{2}"
    return sample

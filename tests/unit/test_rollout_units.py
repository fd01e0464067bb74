"""The parts of the rollout side that need no engine: seeds, parameters, outputs, filters, sft."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from instep.data.batch import build_batch
from instep.engines.stops import find_stop
from instep.engines.wire import Completion
from instep.errors import ConfigError, DataError, RewardError, RolloutError
from instep.rollout import sft_rollout
from instep.rollout.client import get_model_url, to_vllm
from instep.rollout.execute import sampling_seed
from instep.rollout.filters import (
    DynamicFilterOutput,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    verdict_of,
)
from instep.rollout.group_request import ended_at_joint, take
from instep.rollout.outputs import as_eval_output, as_train_output
from instep.rollout.tokens import encode, tokenizer_of
from instep.system.hooks import Hook
from instep.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, Status, VersionSpan
from tests.assets import make_checkpoint

# ---- seeds, parameters, URLs, texts ----------------------------------------------------------------------------------


def test_sampling_seeds_are_the_same_in_every_process_and_all_different() -> None:
    code = "from instep.rollout.execute import sampling_seed as s; print(s(42, 0, 0, 0), s(42, 7, 3, 1))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [int(x) for x in other] == [sampling_seed(42, 0, 0, 0), sampling_seed(42, 7, 3, 1)]
    seeds = {sampling_seed(r, g, i, a) for r in (1, 2) for g in range(50) for i in range(8) for a in (0, 1)}
    assert len(seeds) == 1600 and all(0 <= s < 2**63 for s in seeds)
    assert sampling_seed(1, 11) != sampling_seed(11, 1)


def test_names_of_sampling_parameters() -> None:
    given = {"max_new_tokens": 5, "temperature": 0.5, "stop": None, "min_new_tokens": 2, "top_k": -1}
    assert to_vllm(given) == {"max_tokens": 5, "temperature": 0.5, "min_tokens": 2, "top_k": -1}
    assert to_vllm({"max_new_tokens": 5, "max_tokens": 5}) == {"max_tokens": 5}
    with pytest.raises(RolloutError, match="contradicts"):
        to_vllm({"max_new_tokens": 5, "max_tokens": 6})


def test_urls() -> None:
    routers = {"actor": ("10.0.0.1", 1), "ref": ("fe80::1", 2)}
    args = SimpleNamespace(vllm_router_ip="10.0.0.1", vllm_router_port=1, vllm_model_routers=routers)
    assert get_model_url(args) == "http://10.0.0.1:1/inference/v1/generate"
    assert get_model_url(args, "ref", "/health") == "http://[fe80::1]:2/health"
    with pytest.raises(ConfigError, match="no model 'critic'"):
        get_model_url(args, "critic")


def stops_at(text: str, stops: list[str], min_tokens: int) -> tuple[int, str | None]:
    """What an engine makes of `text`, a token for each character: how many it samples, and the stop string."""
    for n in range(min_tokens + 1, len(text) + 1):
        for stop in stops:
            if text[:n].endswith(stop):
                return n, stop
    return len(text), None


def test_a_response_that_was_aborted_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    """The engine sees the text of the continuation alone; a tool has written what stands before the turn."""
    make_checkpoint(tmp_path)
    args: Any = SimpleNamespace(hf_checkpoint=tmp_path, trust_remote_code=False, chat_template_text=None)
    (a,), (b,) = (tokenizer_of(args)(letter)["input_ids"] for letter in "ab")

    async def continued(text: str, k: int, stops: list[str], min_tokens: int) -> tuple[int, str | None]:
        ids = [a if letter == "a" else b for letter in text]
        left = max(0, min_tokens - k)
        n, stop = stops_at(text[k:], stops, left)
        new, spans = ids[k : k + n], [VersionSpan("1", 0, 1), VersionSpan("2", 1, n)]
        log_probs, reason = [-0.1 * i for i in range(n)], "stop" if stop else "abort"
        out = Completion(new, log_probs, spans, reason, stop, np.ones((n, 1, 1)))
        sample = Sample(tokens=[a, a, a, *ids[:k]], response_length=k + 2)
        params = {"stop": stops, "min_tokens": left}
        out = await ended_at_joint(args, sample, params, out, begun=k)
        n = len(out.token_ids)
        assert (out.token_ids, out.log_probs, out.weight_versions[-1].end) == (new[:n], log_probs[:n], n)
        assert len(out.routed_experts) == n and (out.status is Status.COMPLETED) == (out.stop_reason is not None)
        return k + n, out.stop_reason

    async def run() -> int:
        rng, parted = random.Random(5), 0
        for _ in range(2000):
            text = "".join(rng.choices("ab", k=rng.randint(3, 12)))
            stops = ["".join(rng.choices("ab", k=rng.randint(2, 5))) for _ in range(rng.randint(1, 3))]
            k, min_tokens = rng.randint(1, len(text) - 2), rng.choice([0, 0, 2, 5])
            expected = stops_at(text, stops, min_tokens)
            if expected[0] > k:
                assert await continued(text, k, stops, min_tokens) == expected
                parted += expected[1] is not None and expected[0] - len(expected[1]) < k
        return parted

    assert asyncio.run(run()) > 100


def test_the_stop_string_that_the_last_token_completed() -> None:
    assert find_stop("a END", "a EN", ["x", "END"]) == (2, "END")
    assert find_stop("a END.", "a E", ["END"]) == (2, "END")  # a token may end beyond it
    assert find_stop("a\n\n", "a", ["\n"]) == (1, "\n")  # or hold it twice
    assert find_stop("END", "", ["END"]) == (0, "END")
    assert find_stop("a END b", "a END", ["END"]) is None  # one that min_tokens passed over
    assert find_stop("END b END", "END b EN", ["END"]) == (6, "END")
    assert find_stop("a END", "a END", ["END"]) is None  # the end-of-sequence token, which has no text
    assert find_stop("a", "", ["x"]) is None
    assert find_stop("a\u05f1", "a\ufffd", ["a\u05f1"]) == (0, "a\u05f1")  # a character of two tokens
    assert find_stop("a.\n", "a", ["\n", ".\n", "."]) == (1, ".")  # the one that ends first
    assert find_stop("a.\n", "a", ["\n", ".\n"]) == (2, "\n")  # of two that end together the first


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize(("kept", "text"), [(False, "a"), (True, "a\n")])
def test_the_text_of_a_turn_is_cut_at_its_own_stop_string(
    reported: bool, kept: bool, text: str, tmp_path: Path
) -> None:
    """What a tool has said, or the header after it, may end with that."""
    make_checkpoint(tmp_path)
    args: Any = SimpleNamespace(
        hf_checkpoint=tmp_path, trust_remote_code=False, chat_template_text=None, use_rollout_routing_replay=False
    )
    before, turn = (encode(args, said) for said in ("b\nb\n", "a\n"))
    sample = Sample(tokens=[*before, *before], response_length=len(before), loss_mask=[0] * len(before))
    sample.rollout_log_probs = [0.0] * len(before)
    out = Completion(turn, [-1.0] * len(turn), [], "stop", "\n" if reported else None)
    params = {"stop": ["\n"], "include_stop_str_in_output": kept}
    asyncio.run(take(args, sample, params, out, evaluation=False))
    assert sample.response == "b\nb\n" + text and sample.tokens[-len(turn) :] == turn


# ---- outputs ---------------------------------------------------------------------------------------------------------


def done(group: int, index: int, **changed: Any) -> Sample:
    sample = Sample(group_index=group, index=index, tokens=[1, 2, 3], response_length=2, reward=1.0)
    sample.status = Status.COMPLETED
    for name, value in changed.items():
        setattr(sample, name, value)
    return sample


def test_train_outputs_in_every_form() -> None:
    plain = as_train_output([[done(0, 0), done(0, 1)], [done(1, 2)]])
    assert [len(g) for g in plain.samples] == [2, 1]
    assert len({s.execution_id for g in plain.samples for s in g}) == 3
    nested = as_train_output(RolloutFnTrainOutput([[[done(0, 0), done(0, 0)], done(0, 1)]], {"m": 1.0}))
    ids = [s.execution_id for s in nested.samples[0]]
    assert ids[0] == ids[1] != ids[2] and nested.metrics == {"m": 1.0}
    named = as_train_output([[[done(0, 0, execution_id="a"), done(0, 0)]]])
    assert [s.execution_id for s in named.samples[0]] == ["a", "a"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned None"),
        ([[]], r"a group is \[\]"),
        ([done(0, 0)], "a group is Sample"),
        ([["text"]], "holds str, not Sample"),
        ([[done(0, 0)], [done(0, 1)]], "given twice"),
        ([[done(0, 0), done(1, 1)]], "mixed"),
        ([[done(None, 0)]], "missing"),  # type: ignore[arg-type]
        ([[[done(0, 0, execution_id="a"), done(0, 0, execution_id="b")]]], "several execution ids"),
        ([[done(0, 0, execution_id="0")], [done(1, 1, execution_id="0")]], "'0' is in two groups"),
        ([[done(0, 0, loss_mask=[1])]], "loss_mask has 1 entries for 2"),
        ([[done(0, 0, rollout_log_probs=[0.0])]], "rollout_log_probs has 1 entries for 2"),
        ([[done(0, 0, rollout_log_probs=[0.0, float("nan")])]], "not all finite"),
        ([[done(0, 0, rollout_log_probs=["-1", 0.0])]], "not all finite"),
        ([[done(0, 0, response_length=3)]], "response_length 3 with 3 tokens"),
        ([[done(0, 0, status=Status.PENDING)]], "still PENDING"),
        ([[done(0, 0, weight_versions=[VersionSpan("1", 0, 3)])]], "reach 3 of 2"),
        ([[done(0, 0, weight_versions=["3", "default"])]], "weight_versions holds 'default', neither"),
        ([[done(0, 0, weight_versions=[3, None])]], "weight_versions holds None"),
        ([[done(0, 0, weight_versions=None)]], "weight_versions holds None"),
        ([[done(0, 0, weight_versions=[VersionSpan(None, 0, 2)])]], "holds VersionSpan"),  # type: ignore[arg-type]
        ([[done(0, 0, weight_versions=[True])]], "weight_versions holds True"),
    ],
)
def test_bad_train_outputs_are_refused(output: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        as_train_output(output)


def test_a_token_that_is_not_trained_on_needs_no_log_prob() -> None:
    groups = as_train_output([[done(0, 0, loss_mask=[0, 1], rollout_log_probs=[None, -1.0])]]).samples
    assert build_batch(groups).token_columns["rollout_log_probs"].tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("given", "spans", "names"),
    [
        (["3"], [("3", 0, 2)], None),
        (["3", 3, "3"], [("3", 0, 2)], None),
        (("3",), [("3", 0, 2)], None),
        ([VersionSpan("3", 0, 1), "4"], [("3", 0, 1), ("4", 1, 2)], None),  # a partial rollout that went on
        ([VersionSpan("3", 0, 2), "3"], [("3", 0, 2)], None),
        ([VersionSpan(3, 0, 2)], [("3", 0, 2)], None),  # type: ignore[arg-type]
        ([VersionSpan("3", 0, 1), "4", 5], [("3", 0, 1)], ["4", 5]),
        (["3", "4"], [], ["3", "4"]),
    ],
)
def test_versions_by_number_become_spans(given: Any, spans: list[Any], names: list[Any] | None) -> None:
    sample = as_train_output([[done(0, 0, weight_versions=given)]]).samples[0][0]
    assert [(s.version, s.start, s.end) for s in sample.weight_versions] == spans
    assert sample.extra.get("weight_versions") == names
    assert Sample.from_dict(sample.to_dict()).weight_versions == sample.weight_versions


def test_eval_outputs() -> None:
    full = {"rewards": [0.5], "truncated": [False], "samples": [done(0, 0)]}
    assert as_eval_output({"a": full}).data["a"]["rewards"] == [0.5]
    derived = as_eval_output(RolloutFnEvalOutput({"a": {"samples": [done(0, 0), done(1, 1, truncated=True)]}})).data[
        "a"
    ]
    assert derived["rewards"] == [1.0, 1.0] and derived["truncated"] == [False, True]
    with pytest.raises(RolloutError, match="has no rewards"):
        as_eval_output({"a": {"samples": []}})
    with pytest.raises(RolloutError, match="nan is no finite number"):
        as_eval_output({"a": {**full, "rewards": [float("nan")]}})
    with pytest.raises(RolloutError, match="returned a list of 1"):
        as_eval_output([full])


def test_the_spread_filter_counts_executions() -> None:
    args = SimpleNamespace(reward_key=None)

    def verdict(*rewards: tuple[str, float]) -> Any:
        return check_reward_nonzero_std(args, [done(0, 0, execution_id=e, reward=r) for e, r in rewards])

    assert verdict(("a", 1.0), ("b", 0.0)).keep
    assert not verdict(("a", 1.0), ("b", 1.0)).keep
    assert verdict(("a", 1.0), ("b", 1.0)).reason == "zero_std_1.0"
    assert verdict(("a", 0.1), ("b", 0.1 + 1e-9)).keep
    # Siblings differ, their executions do not: (1 + 0) / 2 = 0.5.
    assert not verdict(("a", 1.0), ("a", 0.0), ("b", 0.5)).keep
    keyed = SimpleNamespace(reward_key="x")
    assert check_reward_nonzero_std(keyed, [done(0, 0, reward={"x": 1}), done(0, 1, reward={"x": 2})]).keep
    with pytest.raises(RewardError, match="is a dict"):
        check_reward_nonzero_std(args, [done(0, 0, reward={"x": 1})])


def test_what_filters_may_return() -> None:
    def verdict(answer):
        hook = Hook("--dynamic-sampling-filter-path", f"{__name__}.answers")
        return asyncio.run(verdict_of(hook, SimpleNamespace(answer=answer), [done(0, 0)]))

    assert verdict(True).keep
    assert verdict(False).reason == "answers"
    assert verdict(SimpleNamespace(keep=False, reason="dull")).reason == "dull"
    tensor = torch.tensor([1.0, 2.0]).std() > 0  # what older filters of slime return
    assert verdict(tensor).keep and not verdict(~tensor).keep
    kept = DynamicFilterOutput(keep=~tensor, reason="dull", keep_when_insufficient=True)
    assert verdict(kept) == DynamicFilterOutput(False, "dull", True)
    alike = [done(0, i, execution_id=str(i), reward=1.0) for i in range(2)]
    output = check_reward_nonzero_std_with_fallback(SimpleNamespace(reward_key=None), alike)
    assert output == DynamicFilterOutput(False, "zero_std_1.0", True)
    with pytest.raises(RolloutError, match="answers returned None"):
        verdict(None)


def answers(args: Any, group: list[Sample]) -> Any:
    return args.answer


# ---- sft -------------------------------------------------------------------------------------------------------------


class Conversations:
    """A data source of fixed groups."""

    def __init__(self, prompts: list[Any]):
        self.groups = [[Sample(group_index=i, index=i, prompt=p)] for i, p in enumerate(prompts)]

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        taken, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        return taken


def test_sft_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "hf", layers=1)
    args = SimpleNamespace(
        hf_checkpoint=str(checkpoint),
        trust_remote_code=False,
        chat_template_text=None,
        rollout_batch_size=2,
        loss_mask_type="qwen",
        apply_chat_template_kwargs={},
    )

    def talk(*turns: tuple[str, str, int]) -> list[dict[str, Any]]:
        return [{"role": role, "content": text, "step_loss_mask": mask} for role, text, mask in turns]

    source = Conversations(
        [
            talk(("user", "1+1=?", 1), ("assistant", "2", 1)),
            talk(("user", "a", 1), ("assistant", "b", 0), ("user", "c", 1), ("assistant", "de", 1)),
            "not a conversation",
        ]
    )
    output = as_train_output(sft_rollout.generate_rollout(args, 0, source))
    first, second = (group[0] for group in output.samples)
    tokenizer = sft_rollout.tokenizer_of(args)

    def trained(sample: Sample) -> str:
        ids = sample.tokens[-sample.response_length :]
        assert sample.loss_mask is not None and len(ids) == len(sample.loss_mask) and sample.loss_mask[0] == 1
        return tokenizer.decode([i for i, m in zip(ids, sample.loss_mask, strict=True) if m])

    assert trained(first) == "2<|im_end|>" and trained(second) == "de<|im_end|>"
    assert first.reward == 0.0 and first.status is Status.COMPLETED
    assert tokenizer.decode(first.tokens).startswith("<|im_start|>user\n1+1=?<|im_end|>")
    with pytest.raises(DataError, match="the prompt is text") as caught:
        sft_rollout.generate_rollout(args, 1, source)
    # A template that writes the last turn otherwise: a sample for each turn, which are one execution.
    dot = "{{ '.' if loop.last and m.role == 'assistant' }}<|im_end|>"
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("<|im_end|>", dot))
    source_of_two = Conversations(
        [talk(("user", "a", 1), ("assistant", "b", 1), ("user", "c", 1), ("assistant", "d", 1))]
    )
    [siblings] = as_train_output(sft_rollout.generate_rollout(args, 0, source_of_two)).samples
    assert [trained(s) for s in siblings] == ["b.<|im_end|>", "d.<|im_end|>"] and len(
        {id(s.prompt) for s in siblings}
    ) == 2
    assert {(s.group_index, s.execution_id) for s in siblings} == {(0, "0.0")}
    assert "group 2" in caught.value.where
    with pytest.raises(RolloutError, match="no more groups"):
        sft_rollout.generate_rollout(args, 2, source)

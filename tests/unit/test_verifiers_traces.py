"""Episodes of verifiers, made by hand: deltas put together, traces as samples, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.errors import RewardError, RolloutError
from instep.rollout import runtime
from instep.types import Sample, Status
from instep_neighbours.verifiers import rollout
from instep_neighbours.verifiers.client import Assembly
from instep_neighbours.verifiers.rollout import metrics_of
from instep_neighbours.verifiers.servers import settings_of
from instep_neighbours.verifiers.traces import CutError, paths, samples_of
from tests.assets import make_checkpoint


def node(parent: int | None, ids: list[int], sampled: int = 0, **more: Any) -> dict[str, Any]:
    """A node whose last `sampled` tokens the model has sampled, with the log-prob -id / 100 each."""
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    log_probs = [-i / 100 for i in ids[len(ids) - sampled :]]
    return {"parent": parent, "token_ids": ids, "mask": mask, "logprobs": log_probs, "sampled": sampled > 0, **more}


def trace(nodes: list[dict[str, Any]], reason: str = "stop", **more: Any) -> dict[str, Any]:
    calls = [{"node": i, "finish_reason": reason} for i, n in enumerate(nodes) if n["sampled"]]
    rewards = {"right": {"score": 0.5, "weight": 2.0}, "short": {"score": 1.0, "weight": 0.25}, "none": None}
    whole = {"id": "t", "agent": {"name": "agent", "trainable": True}, "nodes": nodes, "calls": calls, "errors": []}
    return {**whole, "rewards": rewards, "metrics": {"steps": 3.0}, "stop_condition": "agent_completed", **more}


def samples(*traces: dict[str, Any], **head: Any) -> list[Sample]:
    issued = Sample(group_index=3, index=7, begun_version=4, metadata={"task": {"idx": 5}})
    episode = {"ok": True, "errors": [], "traces": list(traces), **head}
    return samples_of(issued, episode, {"temperature": 0.7, "max_tokens": 9}, lambda ids: " ".join(map(str, ids)))


TURNS = [
    node(None, [1, 2]),  # the system's and the user's message
    node(0, [3, 4, 5], sampled=2),  # the generation prompt, and what was sampled
    node(1, [6, 7]),  # a tool's answer
    node(2, [8, 9], sampled=1),
]


def test_a_conversation_is_one_sample() -> None:
    (sample,) = samples(trace(TURNS))
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sample.response_length == 6 and sample.prompt_length == 3
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.04, -0.05, 0.0, 0.0, 0.0, -0.09]
    assert sample.response == "4 5 6 7 8 9"
    assert sample.reward == 0.5 * 2 + 0.25
    assert sample.status is Status.COMPLETED
    assert sample.weight_versions == [] and sample.begun_version == 4
    assert sample.sampling_turns == [{"temperature": 0.7}]


def test_branches_are_siblings_that_train_each_token_once() -> None:
    """Node 1 is in both texts; the second text goes on from it in another way."""
    nodes = [*TURNS, node(1, [10]), node(4, [11, 12], sampled=2)]
    first, second = samples(trace(nodes))
    assert first.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9] and first.loss_mask == [1, 1, 0, 0, 0, 1]
    assert second.tokens == [1, 2, 3, 4, 5, 10, 11, 12] and second.loss_mask == [0, 0, 0, 1, 1]
    assert second.rollout_log_probs == [-0.04, -0.05, 0.0, -0.11, -0.12]
    assert first.reward == second.reward
    assert metrics_of([first, second]) == {
        "rollout/env/num_turns": 3.0,
        "rollout/env/rewards/right": 0.5,
        "rollout/env/rewards/short": 1.0,
        "rollout/env/metrics/steps": 3.0,
    }


def test_an_evaluation_has_a_reward_for_each_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    async def run(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"ok": True, "errors": [], "traces": [trace([*TURNS, node(1, [10]), node(4, [11, 12], sampled=2)])]}

    rows = [{"input": f"task {i}", "metadata": {"task": {"idx": i}}} for i in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = SimpleNamespace(tasks=lambda: tmp_path / "tasks.jsonl", folder=tmp_path, run=run)
    monkeypatch.setattr(rollout, "environment_of", lambda args, evaluation=False: environment)
    words = (
        f"--hf-checkpoint {make_checkpoint(tmp_path / 'hf', layers=1)} --env vowels --env-eval-args {{}} --eval-top-p 1"
    )
    words += (
        " --num-rollout 1 --rollout-batch-size 1 --eval-interval 1 --n-samples-per-eval-prompt 2 --eval-temperature 0.5"
    )
    words += f" --actor-num-gpus-per-node 1 --rollout-max-response-len 12 --run-dir {tmp_path / 'run'}"
    engines = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": 1, "rollout_engine_urls": []}
    args = parse(words.split()).view({**engines, "rollout_engine_kind": "vllm"})
    try:
        output = rollout.generate_rollout(args, 0, None, evaluation=True)
    finally:
        runtime.shutdown()
    found = output.data["vowels"]
    assert found["rewards"] == [1.25] * 6 and found["truncated"] == [False] * 6
    assert [s.metadata["task"]["idx"] for s in found["samples"]] == [0, 0, 1, 1, 2, 2]
    assert output.metrics["eval/vowels/num_turns"] == 3.0 and output.metrics["eval/vowels/metrics/steps"] == 3.0
    assert len(asked) == 6 and asked[0]["sampling"]["temperature"] == 0.5 and asked[0]["sampling"]["max_tokens"] == 12


def test_texts_without_new_sampled_tokens_and_other_agents_are_left_out() -> None:
    """A prompt that no model has answered, a text that is written anew, and an agent that is not trained."""
    nodes = [*TURNS, node(3, [13]), node(None, [1, 2, 3])]
    user = trace([node(None, [20]), node(0, [21], sampled=1)], agent={"name": "user", "trainable": False})
    (sample,) = samples(trace(nodes), user)
    assert sample.tokens[-1] == 13 and sample.loss_mask == [1, 1, 0, 0, 0, 1, 0]
    with pytest.raises(RolloutError, match="holds no token that the model has sampled"):
        samples(user)


@pytest.mark.parametrize("accepted", [False, True])
def test_an_attempt_to_shorten_history_counts_if_the_agent_went_on_from_it(accepted: bool) -> None:
    attempt = node(1, [30], sampled=1, semantic_parents=[{"node": 1, "type": "compaction_attempt"}])
    links = [{"node": 4, "type": "compaction"}] if accepted else []
    nodes = [*TURNS, attempt, node(None, [31]), node(5, [32], sampled=1, semantic_parents=links)]
    assert [path[-1] for path in paths(trace(nodes))] == ([3, 4, 6] if accepted else [3, 6])


@pytest.mark.parametrize(
    ("reason", "more"),
    [("length", {}), ("stop", {"stop_condition": "max_turns"}), ("stop", {"is_timeout": True})],
)
def test_what_was_cut_off_by_a_limit_is_truncated(reason: str, more: dict[str, Any]) -> None:
    assert samples(trace(TURNS, reason, **more))[0].status is Status.TRUNCATED


def test_an_agents_own_sampling_parameters_are_what_its_tokens_were_drawn_with() -> None:
    calls = [
        {"node": 1, "finish_reason": "stop", "sampling": {"temperature": 0.2, "top_p": 0.9, "max_tokens": None}},
        {"node": 3, "finish_reason": "stop", "sampling": {}},
    ]
    (sample,) = samples(trace(TURNS, calls=calls))
    assert sample.sampling_turns == [{"temperature": 0.2, "top_p": 0.9}, {"temperature": 0.7}]


def test_a_turn_that_an_engine_has_ended_early_makes_the_episode_void() -> None:
    with pytest.raises(CutError):
        samples(trace(TURNS, reason="abort"))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            trace([node(None, [1]), {**node(0, [2, 3], sampled=2), "logprobs": [-1.0]}]),
            "2 of them sampled, and 1 log-pro",
        ),
        (
            trace([node(None, [1]), {**node(0, [2], sampled=1), "mask": [True, True]}]),
            "has 1 tokens, 2 of them sampled",
        ),
        (trace([node(None, [2], sampled=1)]), "starts with a sampled token"),
        (trace(TURNS, rewards={"right": None}), "no reward"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(RolloutError, match=said) as caught:
        samples(broken)
    assert "task 5, group 3, sample 7" in caught.value.where


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(RewardError, match="nan"):
        samples(trace(TURNS, rewards={"right": {"score": float("nan"), "weight": 1.0}}))


def test_a_failed_episode_says_what_has_failed() -> None:
    error = {"type": "HarnessError", "message": "exit code 1\nmore"}
    with pytest.raises(RolloutError, match="HarnessError: exit code 1"):
        samples(trace(TURNS, errors=[error]), ok=False)
    calls = [{"node": None, "error": {"type": "ProviderError", "message": "no answer"}}]
    with pytest.raises(RolloutError, match="HarnessError: exit code 1; its last .* failed: ProviderError: no answer"):
        samples(trace(TURNS, errors=[error], calls=calls), ok=False)
    with pytest.raises(RolloutError, match="TaskError: bad"):
        samples(trace(TURNS), ok=False, errors=[{"type": "TaskError", "message": "bad"}])


# ---- deltas ----------------------------------------------------------------------------------------------------------


def test_deltas_make_up_the_traces() -> None:
    assembly, turns = Assembly(), copy.deepcopy(TURNS)
    assembly.apply({"trace": "gone", "open": {"version": 1}, "nodes": [TURNS[0]]})
    assembly.apply({"trace": "a", "open": {"version": 1}, "nodes": turns[:2], "set": {"ok": False}})
    assembly.apply({"trace": "gone", "discard": True})
    assembly.apply({"trace": "a", "links": {1: [{"node": 0, "type": "x"}]}, "pending": [{"role": "tool"}]})
    assembly.apply({"trace": "a", "nodes": turns[2:], "calls": [{"node": 1}], "set": {"ok": True}})
    episode = assembly.finish({"id": "e"}, [{"id": "a", "nodes": 4, "calls": 1}])
    (whole,) = episode["traces"]
    assert [n["token_ids"] for n in whole["nodes"]] == [n["token_ids"] for n in TURNS]
    assert whole["nodes"][1]["semantic_parents"] == [{"node": 0, "type": "x"}]
    assert whole["ok"] and whole["calls"] == [{"node": 1}]


@pytest.mark.parametrize("size", [{"id": "a", "nodes": 2, "calls": 0}, {"id": "b", "nodes": 0, "calls": 0}])
def test_a_missing_delta_is_noticed(size: dict[str, Any]) -> None:
    assembly = Assembly()
    assembly.apply({"trace": "a", "open": {}, "nodes": TURNS[:1]})
    with pytest.raises(RolloutError, match="came with"):
        assembly.finish({}, [size])


def test_the_settings_of_evaluations_lie_over_those_of_training() -> None:
    class Args:
        env = "gsm8k"
        env_args = {"taskset": {"split": "train", "n": 1}, "select": {"limit": 9}, "serve": {"max_concurrent": 4}}
        env_eval_args = {"taskset": {"split": "test"}, "select": {"limit": 2}}

    train, select, serve = settings_of(Args(), evaluation=False)  # type: ignore[arg-type]
    assert serve == {"max_concurrent": 4}
    assert (train, select) == ({"taskset": {"split": "train", "n": 1, "id": "gsm8k"}}, {"limit": 9})
    held_out, select, _ = settings_of(Args(), evaluation=True)  # type: ignore[arg-type]
    assert (held_out, select) == ({"taskset": {"split": "test", "n": 1, "id": "gsm8k"}}, {"limit": 2})

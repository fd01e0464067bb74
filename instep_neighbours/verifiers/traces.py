"""An episode of verifiers as samples: the tokens and log-probs of its nodes, as the engine returned them.

A trace is a graph of messages. Each node has the tokens that its message adds, and marks the tokens that the model has
sampled. The path from a root to a leaf is a text that the engine has seen. A conversation that continues in one text is
one sample. If history was rewritten, or agents were started, there are several paths, which become siblings of one
execution. Tokens that several paths share are trained on in the first of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from instep.data.sampling import distribution_of
from instep.errors import RewardError, RolloutError
from instep.types import Sample, Status, as_number, name_of

Node = dict[str, Any]
Trace = dict[str, Any]

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
_FINISHED = ("stop", "length", "tool_calls")
REMEDY = "see the environment's log; --skip-failed-groups drops the groups of such episodes"


class CutError(Exception):
    """An engine has cut off a request of the episode, so a turn is not the policy's."""


def samples_of(
    issued: Sample, episode: dict[str, Any], wanted: dict[str, Any], decode: Callable[[list[int]], str]
) -> list[Sample]:
    """Return the samples of an episode: copies of `issued` with tokens, reward, status and sampling distributions.

    Args:
        wanted: the sampling parameters of the run, with vLLM's names; an agent of the environment may have others.

    Raises:
        CutError: a turn was cut off.
        RolloutError, RewardError: the episode has failed, has no reward, or its tokens and log-probs do not fit.
    """
    where = f"task {(issued.metadata.get('task') or {}).get('idx')}, {name_of(issued)}"
    _check_ended(episode, where)
    samples = []
    for trace in episode["traces"]:
        if not (trace.get("agent") or {}).get("trainable", True):
            continue
        reward, facts, trained = _reward(trace, where), _facts(trace), set[int]()
        for path in paths(trace):
            new = [i for i in path if any(trace["nodes"][i]["mask"]) and i not in trained]
            if not new:
                continue
            sample = copy.copy(issued)
            sample.metadata = {**issued.metadata, "env": {**facts, "first_of_trace": not trained}}
            sample.reward = reward
            _fill(sample, trace, path, trained, where)
            trained.update(new)
            sample.response = decode(sample.tokens[len(sample.tokens) - sample.response_length :])
            sample.status = _status(trace, path)
            sample.sampling_turns = _drawn_from(trace, new, wanted)
            sample.sampling_params = dict(wanted)
            samples.append(sample)
    if not samples:
        what = "the episode holds no token that the model has sampled"
        raise RolloutError(what, where=where, remedy="its agents must use the given model, and be trainable")
    return samples


def paths(trace: Trace) -> Iterator[list[int]]:
    """Return the nodes of each trained text, from its root to its leaf, in the order of the leaves.

    A shortened history counts only if the conversation has continued from it.
    """
    nodes: list[Node] = trace["nodes"]
    parents = {node["parent"] for node in nodes}
    links = [link for node in nodes for link in node.get("semantic_parents") or ()]
    accepted = {link["node"] for link in links if link["type"] == "compaction"}
    for leaf in (i for i in range(len(nodes)) if i not in parents):
        kinds = {link["type"] for link in nodes[leaf].get("semantic_parents") or ()}
        if "compaction_attempt" in kinds and leaf not in accepted:
            continue
        path, at = list[int](), leaf
        while at is not None:
            path.append(at)
            at = nodes[at]["parent"]
        yield path[::-1]


def _fill(sample: Sample, trace: Trace, path: list[int], trained: set[int], where: str) -> None:
    """Set the columns of `sample`; the response starts with the first sampled token."""
    tokens, mask, log_probs = list[int](), list[int](), list[float]()
    begun: int | None = None
    for i in path:
        node = trace["nodes"][i]
        ids, sampled, known = node["token_ids"], node["mask"], iter(node["logprobs"])
        if len(ids) != len(sampled) or sum(sampled) != len(node["logprobs"]):
            what = (
                f"node {i} has {len(ids)} tokens, {sum(sampled)} of them sampled, and {len(node['logprobs'])} log-probs"
            )
            raise RolloutError(what, where=where, remedy="its client must have type train (as verifiers' own)")
        if begun is None and any(sampled):
            begun = len(tokens) + list(sampled).index(True)
        tokens += ids
        mask += [int(own and i not in trained) for own in sampled]
        log_probs += [next(known) if own else 0.0 for own in sampled]
    if not begun:
        raise RolloutError("a text starts with a sampled token", where=where, remedy="a prompt has at least one token")
    sample.tokens, sample.response_length = tokens, len(tokens) - begun
    sample.loss_mask = mask[begun:]
    sample.rollout_log_probs = log_probs[begun:]
    sample.weight_versions = []  # verifiers does not keep the engines' versions


def _status(trace: Trace, path: list[int]) -> Status:
    calls = {call["node"]: call for call in trace["calls"] if call.get("node") is not None}
    last: dict[str, Any] = next((calls[i] for i in reversed(path) if i in calls), {})
    cut = trace.get("stop_condition") in LIMITS or trace.get("is_timeout") or last.get("finish_reason") == "length"
    return Status.TRUNCATED if cut else Status.COMPLETED


def _drawn_from(trace: Trace, nodes: list[int], wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the distributions of the sampled tokens of `nodes`: an agent's own sampling parameters override the
    run's."""
    turns = []
    for call in trace["calls"]:
        if call.get("node") in nodes:
            given = {name: value for name, value in (call.get("sampling") or {}).items() if value is not None}
            turn = distribution_of({**wanted, **given})
            turns += [turn] if turn not in turns else []
    return turns or [distribution_of(wanted)]


def _reward(trace: Trace, where: str) -> float:
    """Return the weighted sum of the trace's rewards."""
    given = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward is not None}
    if not given:
        remedy = "its task needs a @vf.reward, or its scoring more time"
        raise RolloutError("the environment has given no reward", where=where, remedy=remedy)
    total = as_number(sum(reward["score"] * reward.get("weight", 1.0) for reward in given.values()))
    if total is None:
        what = f"the rewards are not finite numbers: { {name: reward['score'] for name, reward in given.items()} }"
        raise RewardError(what, where=where, remedy="correct the environment's @vf.reward")
    return total


def _facts(trace: Trace) -> dict[str, Any]:
    """Return the data of a trace for metrics and dumps."""
    rewards = {name: r["score"] for name, r in (trace.get("rewards") or {}).items() if r is not None}
    metrics = {name: value for name, value in (trace.get("metrics") or {}).items() if value is not None}
    turns = sum(bool(node.get("sampled")) for node in trace["nodes"])
    agent = (trace.get("agent") or {}).get("name", "agent")
    facts = {"trace": trace["id"], "agent": agent, "stop": trace.get("stop_condition"), "num_turns": turns}
    return {**facts, "rewards": rewards, "metrics": metrics}


def _check_ended(episode: dict[str, Any], where: str) -> None:
    """Raise CutError or RolloutError for an incomplete episode."""
    traces = episode["traces"]
    for trace in traces:
        for call in trace["calls"]:
            if call.get("node") is not None and call.get("finish_reason") not in _FINISHED:
                raise CutError
    if episode.get("ok"):
        return
    errors = [*(episode.get("errors") or ()), *(error for trace in traces for error in trace["errors"])]
    last = errors[-1] if errors else {"type": "an error", "message": "which it does not name"}
    what = f"the episode has failed: {_said(last)}"
    asked = [call["error"] for trace in traces for call in trace["calls"] if call.get("error")]
    if asked and asked[-1].get("message") != last.get("message"):
        what += f"; its last request to the model that failed: {_said(asked[-1])}"
    raise RolloutError(what, where=where, remedy=REMEDY)


def _said(error: dict[str, Any]) -> str:
    """Return the type of an error, and its first line."""
    lines = str(error.get("message", "")).strip().splitlines() or [""]
    return f"{error['type']}: {lines[0]}"

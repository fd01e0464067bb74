"""What sglang-router would drop of a request is sent in one of its labels, which instep's plugin unpacks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from instep.engines import keys
from instep.engines.router import Router
from instep.engines.sglang_router import PASSED, SglangRouter
from instep.rollout.http import post
from instep.rollout.request_gate import gate
from instep.system.run_context import RunContext
from instep_engine.sglang import expand
from tests.sglang_worker import Worker

EXPERTS: dict[str, Any] = {
    "input_ids": [5, 6],
    "return_routed_experts": True,
    "sampling_params": {"temperature": 0.5, "logit_bias": {"5": 1.0}, "custom_params": {"a": 1}},
}


@dataclass
class Request:
    """Some fields of SGLang's `GenerateReqInput`."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: Any = None
    custom_labels: dict[str, str] | None = None
    return_routed_experts: bool = False


def is_packed(payload: dict[str, Any]) -> bool:
    return SglangRouter.packed("/generate", payload) is not payload


def test_what_the_router_drops_is_sent_in_a_label() -> None:
    worker = Worker("key")
    with RunContext().entered():
        keys.know(worker.url, worker.key)
        gate().guarded, gate().packed = worker.url, SglangRouter.packed
        asyncio.run(post(worker.url + "/generate", EXPERTS))
    worker.shutdown()
    worker.server_close()
    ((_, body),) = worker.asked
    rest = {"return_routed_experts": True, "sampling_params": EXPERTS["sampling_params"]}
    assert body == {**EXPERTS, "custom_labels": {"instep": json.dumps(rest)}}


def test_the_plugin_unpacks_the_label() -> None:
    batch = {"sampling_params": [{"top_k": 1}, EXPERTS["sampling_params"]], "custom_labels": {"a": "b"}}
    for one in (EXPERTS, EXPERTS | batch):
        packed = SglangRouter.packed("/generate", one)
        passed = {name: value for name, value in packed.items() if name in PASSED} | {"sampling_params": {"n": 1}}
        asked = Request(**passed)
        expand(None, asked)
        assert vars(asked) == {"custom_labels": {}, **one, "text": None}
    for label in ('{"return_routed_experts": "often"}', '{"no_such": 1}', "[1]", "{"):
        with pytest.raises(ValueError, match="return_routed|no_such|dict|JSON|bool"):
            expand(None, Request(custom_labels={"instep": label}))


@pytest.mark.parametrize(
    ("payload", "packed"),
    [
        ({"return_routed_experts": True}, True),
        ({"return_routed_experts": False, "sampling_params": {"spaces_between_special_tokens": True}}, False),
        ({"sampling_params": {"logit_bias": None, "temperature": 1.0}}, False),
        ({"sampling_params": [{"temperature": 1.0}, {"custom_params": {"a": 1}}]}, True),
    ],
)
def test_which_requests_have_a_label(payload: dict[str, Any], packed: bool) -> None:
    assert is_packed(payload) is packed
    assert SglangRouter.packed("/v1/completions", payload) is Router.packed("/generate", payload) is payload

"""What the model of an engine says in a plain forward pass, and what the engine answered, for the conformance suite."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import torch

from tests.bounds import allowed
from tests.engines.running import MAX_MODEL_LEN, Engine

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47]
EOS = 1


def oracle(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Float32 logits `[len(tokens), vocab]` of a plain forward pass."""
    with torch.no_grad():
        return engine.hf(torch.tensor([tokens])).logits[0].float()


def expected_log_probs(engine: Engine, choice: dict[str, Any], temperature: float = 1.0) -> list[float]:
    tokens = PROMPT + choice["token_ids"]
    log_probs = (oracle(engine, tokens) / temperature).log_softmax(-1)
    return [float(log_probs[i - 1, tokens[i]]) for i in range(len(PROMPT), len(tokens))]


def returned_log_probs(choice: dict[str, Any]) -> list[float]:
    content = choice["logprobs"]["content"]
    names = [c["token"] if "token_id" not in c else f"token_id:{c['token_id']}" for c in content]  # vLLM 0.26, 0.32
    assert names == [f"token_id:{t}" for t in choice["token_ids"]]
    return [c["logprob"] for c in content]


def ending(engine: Engine, choice: dict[str, Any], reason: int | str | None) -> bool:
    """Whether the response says that it stopped, and at what, where the engine can say that."""
    told = choice["stop_reason"] == reason if engine.capabilities.stop_reasons else "stop_reason" not in choice
    return choice["finish_reason"] == "stop" and told


def partial(engine: Engine, end: str, **params: Any) -> dict[str, Any]:
    """A long response that the route `end` interrupted midway; tried again if the machine was too quick or too slow."""
    for wait in (0.2, 0.1, 0.4, 0.05, 1.0):
        future = engine.submit(PROMPT, ignore_eos=True, logprobs=0, **params)
        time.sleep(wait)
        engine.ok(end)
        done, _ = concurrent.futures.wait([future], allowed(5))
        if not done:  # it came after the pause, and waits
            engine.ok("/resume")
        choice = future.result(timeout=60)
        if 0 < len(choice["token_ids"]) < MAX_MODEL_LEN - len(PROMPT):
            return choice
        engine.ok("/resume")
    raise AssertionError("never interrupted midway")

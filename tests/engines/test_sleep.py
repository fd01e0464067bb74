"""The sleep of the embedded engine, by vLLM's routes. (vLLM's own: `tests/gpu/test_offload.py`, as a CPU lacks it.)"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.bounds import until
from tests.engines.oracle import PROMPT
from tests.engines.running import Engine

pytestmark = pytest.mark.parametrize("engine", [("embedded", "tied")], indirect=True)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_refuses_until_its_cache_is_awake(engine: Engine, level: int, tmp_path: Path) -> None:
    free = engine.generate(PROMPT, ignore_eos=True, seed=4, max_tokens=5)["token_ids"]
    scores = engine.prompt_log_probs(PROMPT)
    control, (status, refusal) = engine.control(), engine.call("/sleep?level=3")
    assert status == 400 and "1 or 2" in refusal["error"]["message"]
    control.sleeps = True
    future = engine.submit(PROMPT, ignore_eos=True, max_tokens=900)
    until(engine.at_work)
    control.sleep(level, timeout=20)
    assert future.result(timeout=60)["finish_reason"] == "abort" and control.has_weights == (level == 1)
    assert engine.ok("/is_sleeping", method="GET") == {"is_sleeping": True} and control.healthy(5)
    for tag in ("weights", "kv_cache"):
        status, refusal = engine.call("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}})
        assert status == 503 and "sleeps" in refusal["error"]["message"]
        if tag == "weights":
            status, refusal = engine.call("/start_weight_update", {"version": "9"})
            assert status == 409 and "wake_up?tags=weights" in refusal["error"]["message"]
        control.wake(tag, timeout=20)
    assert engine.ok("/is_sleeping", method="GET") == {"is_sleeping": False} and not control.asleep
    if level == 2:
        assert len(set(engine.prompt_log_probs(PROMPT))) == 1, "the weights were dropped: each token is as likely"
        folder = tmp_path / "instep-golden-1"
        folder.mkdir(mode=0o700)
        shutil.copytree(engine.path, folder / "hf")
        control.pause("abort", timeout=10)
        control.start_update("1", "nonce", timeout=10)
        control.update({"backend": "disk", "path": str(folder / "hf")}, timeout=60)
        control.finish_update("1", [], timeout=10)
        control.resume(timeout=10)
    assert engine.prompt_log_probs(PROMPT) == scores, "buffers come back by themselves"
    assert engine.generate(PROMPT, ignore_eos=True, seed=4, max_tokens=5)["token_ids"] == free

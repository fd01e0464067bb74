"""vLLM with tensor parallelism: each worker checks every byte of a sync and takes its own shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.cluster.engine_plan import plan_engines
from instep.cluster.engine_start import start_engine
from tests.engines.running import TOLERANCE, Engine, make_checkpoint, vllm_args
from tests.engines.test_weights import PROMPT, Q1, disk_session, flip, gap, log_probs, perturbed, session

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_workers_take_their_shards(tmp_path: Path, tied: bool) -> None:
    (tmp_path := tmp_path / "instep-sync-1").mkdir(mode=0o700)  # engines take it for the folder of a run
    hf = make_checkpoint(tmp_path / "model", tied=tied)
    args = vllm_args(tmp_path / "model", "--rollout-num-gpus-per-engine", "2")
    started = start_engine(args, plan_engines(args)[0], num_threads=1, log_dir=tmp_path)
    try:
        started.wait_ready(240)
        engine = Engine("vllm", started.url, tmp_path / "model", hf, None)
        assert gap(engine.prompt_log_probs(PROMPT), log_probs(hf, PROMPT)) < TOLERANCE
        new = perturbed(hf)
        assert session(engine, new, tmp_path / "bucket", "1") is None
        assert gap(engine.prompt_log_probs(PROMPT), log_probs(new, PROMPT)) < TOLERANCE
        refusal = session(engine, new, tmp_path / "bucket", "2", flip)
        assert refusal is not None and refusal.tensor == Q1
        other = perturbed(hf, seed=5)
        assert session(engine, other, tmp_path / "bucket", "3") is None
        assert gap(engine.prompt_log_probs(PROMPT), log_probs(other, PROMPT)) < TOLERANCE
        (golden := tmp_path / "instep-golden-1").mkdir(mode=0o700)
        new.save_pretrained(golden / "hf")
        disk_session(engine, golden / "hf", "4")
        assert gap(engine.prompt_log_probs(PROMPT), log_probs(new, PROMPT)) < TOLERANCE
    finally:
        started.stop()

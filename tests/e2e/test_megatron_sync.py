"""Syncs of a sharded Megatron trainer to real vLLM, which scores as the trainer does."""

import pytest

from tests.e2e.test_families import stack, train_once

pytestmark = pytest.mark.vllm
MEGATRON = ["--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--weight-sync", "shm"]
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
LAYOUTS = [
    pytest.param("qwen3", TP2, id="tp2"),
    pytest.param("qwen3", PP2, id="pp2", marks=pytest.mark.slow),
    pytest.param("qwen2", PP2, id="qwen2-pp2", marks=pytest.mark.slow),
    pytest.param("llama", TP2, id="llama-tp2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", ["--expert-model-parallel-size", "2"], id="ep2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", [*TP2, "--sequence-parallel"], id="etp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_sharded_trainer_is_proven_by_vllm(name, layout, tmp_path):
    """The golden way is `disk`, whose files vLLM's own loader reads; after each step every log-prob is compared."""
    with stack(name, tmp_path, *MEGATRON, *layout) as made:
        sync = made.sync()
        try:
            for way in ("shm", "disk", "shm"):
                off, _ = made.difference(sync, way)
                assert off <= 1e-5
                train_once(made.actor)
        finally:
            sync.close()

"""Families of models with real SGLang: each trains, and each way brings its weights to an engine that proves them."""

import pytest

from instep.errors import EngineError, SyncError
from instep.weights.way import SINGLE_COPY
from tests.e2e.test_families import LIMITS, by_every_way, in_one_memory, stack, train_once

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
# What published DeepSeeks have, and SGLang wants on a CPU.
DEEPSEEK = {
    "intermediate_size": 128, "moe_intermediate_size": 128,  # of other widths it pads the halves of two ranks
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
# SGLang 0.5.17 on a CPU has no sliding window, and no heads of another size in Mixtral.
FAMILIES = {
    "deepseek_v3": DEEPSEEK,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "llama": {},
    "yi": {},
    "phi3": {},
    "gemma3": {},
    "mistral": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "mixtral": {"head_dim": 16},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_and_is_proven_by_every_way(name, tmp_path):
    with stack(name, tmp_path, "--weight-sync", "shm", kind="sglang", sizes=FAMILIES[name]) as made:
        assert all(off <= allowed <= LIMITS["fp32"] for off, allowed in by_every_way(made))


def test_deepseek_is_proven_by_every_way_on_two_ranks(tmp_path):
    two = ["--weight-sync", "shm", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"]
    with stack("deepseek_v3", tmp_path, *two, kind="sglang", sizes=DEEPSEEK) as made:
        assert all(off <= allowed <= LIMITS["fp32"] for off, allowed in by_every_way(made))


@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "phi3", "gemma3"])
def test_a_family_shares_one_memory_with_the_trainer(name, tmp_path):
    with stack(name, tmp_path, "--weight-sync", SINGLE_COPY, kind="sglang") as made:
        assert all(off <= allowed <= LIMITS["fp32"] for off, allowed in in_one_memory(made))


def test_halves_of_a_joined_weight_may_come_in_two_buckets(tmp_path):
    """DeepSeek's q_a_proj and kv_a_proj_with_mqa. Values that it derives are no part of a shared memory."""
    small = ["--weight-sync", "nccl", "--update-weight-buffer-size", "1000"]
    with stack("deepseek_v3", tmp_path / "nccl", *small, kind="sglang", sizes=DEEPSEEK) as made:
        sync = made.sync()
        for _ in range(2):  # the second copies directly, without SGLang's loader, which derives values itself
            off, allowed = made.difference(sync, "nccl")
            assert off <= allowed <= LIMITS["fp32"]
            train_once(made.actor)
        sync.close()
    with pytest.raises(EngineError, match="DeepseekV3ForCausalLM derives some of its weights; use --weight-sync shm"):
        with stack("deepseek_v3", tmp_path / "one", "--weight-sync", SINGLE_COPY, kind="sglang", sizes=DEEPSEEK):
            raise AssertionError("the engine has started")


def test_a_model_that_changes_what_it_loads_is_refused_by_name(tmp_path):
    """SGLang's Gemma adds 1 to norms, in the memory that it is given."""
    with stack("gemma", tmp_path, "--weight-sync", "shm", kind="sglang") as made:
        sync = made.sync()
        with pytest.raises(SyncError, match="input_layernorm.weight: this engine changes it"):
            sync.run([made.engine])
        sync.close()

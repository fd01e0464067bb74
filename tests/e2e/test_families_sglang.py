"""Families of models with real SGLang: each trains, and each way brings its weights to an engine that proves them."""

import pytest

from instep.errors import SyncError
from instep.weights.way import SINGLE_COPY
from tests.e2e.test_families import LIMITS, by_every_way, in_one_memory, stack

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
# SGLang 0.5.17 on a CPU has no sliding window, and no heads of another size in Mixtral.
FAMILIES = {
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


@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "phi3", "gemma3"])
def test_a_family_shares_one_memory_with_the_trainer(name, tmp_path):
    with stack(name, tmp_path, "--weight-sync", SINGLE_COPY, kind="sglang") as made:
        assert all(off <= allowed <= LIMITS["fp32"] for off, allowed in in_one_memory(made))


def test_a_model_that_changes_what_it_loads_is_refused_by_name(tmp_path):
    """SGLang's Gemma adds 1 to norms, in the memory that it is given."""
    with stack("gemma", tmp_path, "--weight-sync", "shm", kind="sglang") as made:
        sync = made.sync()
        with pytest.raises(SyncError, match="input_layernorm.weight: this engine changes it"):
            sync.run([made.engine])
        sync.close()

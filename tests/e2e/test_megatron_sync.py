"""Syncs of a sharded Megatron trainer to real vLLM, which scores as the trainer does; of DeepSeek-V3 to the embedded
engine, as vLLM's latent attention on a CPU knows no float32."""

import pytest

from tests.e2e.test_families import stack, train_once

MEGATRON = ["--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--weight-sync", "shm"]
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
TP2_SP, EP2 = [*TP2, "--sequence-parallel"], ["--expert-model-parallel-size", "2"]
GROUPS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}  # a key head for each rank
LAYOUTS = [
    pytest.param("qwen3", TP2, id="tp2"),
    pytest.param("qwen3", PP2, id="pp2", marks=pytest.mark.slow),
    pytest.param("qwen2", TP2, id="qwen2-tp2", marks=pytest.mark.slow),
    pytest.param("qwen2", PP2, id="qwen2-pp2", marks=pytest.mark.slow),
    pytest.param("llama", TP2, id="llama-tp2", marks=pytest.mark.slow),
    pytest.param("llama", PP2, id="llama-pp2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", EP2, id="ep2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", TP2_SP, id="etp2", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", PP2, id="moe-pp2", marks=pytest.mark.slow),
]


def check_syncs(kind, name, layout, folder):
    """The golden way is `disk`, whose files the engine's loader reads; after each step every log-prob is compared."""
    sizes = GROUPS if name == "qwen2" else {}
    with stack(name, folder, *MEGATRON, *layout, kind=kind, sizes=sizes) as made:
        sync = made.sync()
        try:
            for way in ("shm", "disk", "shm"):
                off, _ = made.difference(sync, way)
                assert off <= 1e-5
                train_once(made.actor)
        finally:
            sync.close()


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_sharded_trainer_is_proven_by_vllm(name, layout, tmp_path):
    check_syncs("vllm", name, layout, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP2_SP, id="tp2-sp"),
        pytest.param(PP2, id="pp2"),
        pytest.param([*TP2_SP, *EP2, "--expert-tensor-parallel-size", "1"], id="tp2-sp-ep2"),
    ],
)
def test_deepseek_is_proven_by_the_embedded_engine(layout, tmp_path):
    check_syncs("embedded", "deepseek_v3", layout, tmp_path)

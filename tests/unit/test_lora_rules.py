"""The flags of LoRA: what they set, what they need, what contradicts them, and what engines are told."""

from __future__ import annotations

import pytest

from instep.arguments.parse import parse
from instep.checkpoints.adapter import Lora, lora_of
from instep.cluster.engine_plan import plan_engines
from tests.command_line import argv, make_folder, refusal

HF = "--train-backend hf --lora-rank 20 "


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "extra, expected",
    [
        ("--train-backend hf", None),
        (HF, Lora(20, 40, None)),
        ("--train-backend fsdp --lora-r 8 --lora-alpha 4 --lora-dropout 0", Lora(8, 4, None)),
        (HF + "--lora-target-modules q_proj v_proj", Lora(20, 40, ("q_proj", "v_proj"))),
        (HF + "--lora-target-modules kv_b_proj", Lora(20, 40, ("kv_b_proj",))),
        (
            HF + "--lora-target-modules kv_b_proj --weight-sync lora --rollout-backend embedded --device cpu",
            Lora(20, 40, ("kv_b_proj",)),
        ),
    ],
)
def test_what_the_flags_mean(extra, expected):
    assert lora_of(parse(argv(extra))) == expected


@pytest.mark.parametrize(
    "extra, words",
    [
        ("--lora-rank 8 --lora-dropout 0.1", ("--lora-dropout 0.1", "has no dropout")),
        ("--lora-rank 8 --weight-sync lora --lora-target-modules q_proj experts", ("experts", "use --weight-sync shm")),
        ("--lora-rank 8 --moe-router-bias-update-rate 0.001", ("moves biases of the base", "leave it out")),
        ("--lora-rank 513", ("--lora-rank", "at most 512")),
        ("--lora-alpha 8", ("--lora-alpha", "has no effect without --lora-rank")),
        ("--lora-target-modules q_proj", ("--lora-target-modules", "has no effect without --lora-rank")),
        ("--weight-sync lora", ("--weight-sync lora", "there is no adapter")),
        ("--vllm-quantization fp8", ("weights in fp8 does not hold the trained weights", "--weight-sync lora")),
        (HF + "--weight-sync shm --vllm-quantization fp8", ("weights in fp8", "--vllm-quantization fp8")),
        ("--save-hf out --save-hf-as adapter", ("--save-hf-as adapter", "there is no adapter")),
        (HF + "--save-hf-as adapter", ("there is no folder to save to", "give --save-hf")),
        (HF + "--weight-sync single-copy --device cpu", ("with --lora-rank", "use --weight-sync lora")),
        (HF + "--lora-dropout 0.05", ("--lora-dropout 0.05", "has no dropout")),
        (HF + "--weight-sync lora --ref-load base", ("--ref-load base", "name the base as --hf-checkpoint")),
        (HF + "--weight-sync lora --vllm-max-lora-rank 16", ("16 is below --lora-rank 20",)),
        (
            HF + "--weight-sync lora --rollout-backend vllm --lora-target-modules o_proj kv_b_proj",
            ("kv_b_proj", "use --weight-sync shm"),
        ),
        (HF + "--weight-sync lora --vllm-no-enable-lora", ("--vllm-no-enable-lora", "is needed by --weight-sync lora")),
    ],
)
def test_contradictions_are_named(extra, words, folder):
    (folder / "base").mkdir()
    message = refusal(extra)
    assert all(word in message for word in words), message


def test_the_embedded_engine_takes_an_adapter_of_every_layer():
    words = f"{HF}--device cpu --weight-sync lora --rollout-backend embedded --lora-target-modules kv_b_proj"
    assert parse(argv(words)).lora_target_modules == ["kv_b_proj"]


def test_engines_get_room_for_the_adapter_and_others_none():
    vllm = "--rollout-backend vllm --device cuda --precision bf16 --actor-num-gpus-per-node 1 "
    (engine,) = plan_engines(parse(argv(HF + vllm + "--weight-sync lora")))
    assert engine.own["enable_lora"] == ["--enable-lora"]
    assert engine.own["max_lora_rank"] == ["--max-lora-rank", "32"]  # vLLM has 1, 8, 16, 32, ...
    assert engine.own["weight_transfer_config"][1] == '{"backend": "instep_shm"}'
    assert engine.own["additional_config"] == ["--additional-config", '{"instep_adapter": 1}']
    (small,) = plan_engines(parse(argv(HF + vllm + "--weight-sync lora --lora-rank 4")))
    assert small.own["max_lora_rank"] == ["--max-lora-rank", "16"]  # the least of the plugin's kernel
    (on_cpu,) = plan_engines(parse(argv(HF + vllm + "--device cpu --weight-sync lora --lora-rank 4")))
    assert on_cpu.own["max_lora_rank"] == ["--max-lora-rank", "8"] and "additional_config" not in on_cpu.own
    (merged,) = plan_engines(parse(argv(HF + vllm + "--weight-sync shm")))
    assert "enable_lora" not in merged.own and "weight_transfer_config" in merged.own

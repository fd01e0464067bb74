"""Planted faults of a sync with the trainer and vLLM on GPUs; `tests/e2e/test_planted.py` has the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.assets import make_prompts
from tests.e2e.commands import on_vllm
from tests.e2e.test_planted import FAULTS, ON_VLLM, Fault, Stack, limit_of, make_stack, seconds_until_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = [
    "--vllm-kv-cache-memory-bytes",
    str(1 << 30),
    "--vllm-enforce-eager",
    "--no-offload-train",
    "--no-offload-rollout",
]
ON_ONE = [fault for fault in ON_VLLM if fault.way != "nccl"]  # NCCL joins no two processes on one GPU
# vLLM converts what it loads, so the probe alone tells that a bucket names its tensors wrongly.
UNNAMED = {"names exchanged", "another dtype"}
GOLDEN = "changed by .* over the golden path"
ON_TWO = [replace(f, words=GOLDEN) if f.name in UNNAMED else f for f in FAULTS if f.way == "nccl"]
# vLLM's adapters are bf16 on a GPU, in which the probe tells less of this model than the checks of the engine.
CHECKED = {
    "half written",
    "old bytes",
    "old message",
    "another rank",
    "not a number",
    "missing tensor",
    "one tensor more",
}
OF_ADAPTER = [fault for fault in FAULTS if fault.way == "lora" and fault.name in CHECKED]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_prompts(folder / "train.jsonl", 8)
    return folder


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("one")
    yield from make_stack(folder, data, *on_vllm(), *SMALL, head_dim=32, device="cuda")


@pytest.fixture(scope="module")
def adapter(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    words = [*on_vllm(), *SMALL, "--lora-rank", "4", "--weight-sync", "lora"]
    words += ["--precision", "bf16"]
    folder = tmp_path_factory.mktemp("adapter")
    # vLLM 0.26 warms up an adapter of a tied embedding with as many rows as columns: 64
    yield from make_stack(folder, data, *words, head_dim=32, vocab_size=64, device="cuda", precision="bf16")


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    words = [*on_vllm(trainer=False), *SMALL, "--weight-sync", "nccl"]
    yield from make_stack(tmp_path_factory.mktemp("two"), data, *words, head_dim=32, device="cuda", gpu=1)


def told(stack: Stack, fault: Fault, kept: Path) -> float:
    seconds = seconds_until_named(stack, fault, kept)
    print(f"{fault}: named after {seconds:.2f} s")
    return seconds


@pytest.mark.parametrize("fault", ON_ONE, ids=str)
def test_a_planted_fault_is_named(one: Stack, fault: Fault, tmp_path: Path) -> None:
    assert told(one, fault, tmp_path) <= limit_of(fault)


@pytest.mark.parametrize("fault", OF_ADAPTER, ids=str)
def test_a_planted_fault_of_an_adapter_is_named(adapter: Stack, fault: Fault, tmp_path: Path) -> None:
    assert told(adapter, fault, tmp_path) <= limit_of(fault)


@pytest.mark.parametrize("fault", ON_TWO, ids=str)
def test_a_planted_fault_of_a_stream_is_named(two: Stack, fault: Fault, tmp_path: Path) -> None:
    assert told(two, fault, tmp_path) <= limit_of(fault)

"""What `instep plan` says against a GPU: memory at three sizes, and the profile of the card."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.random_model import make_model
from benchmarks.train_step import measure
from instep.preflight.plan.card import card_of
from instep.system.gpus import memory_of_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES = [  # of models of 0.5, 0.6 and 4 B dimensions; tokens of a micro-batch
    ("0.5b", "hf", 16384),
    ("0.6b", "megatron", 16384),
    ("0.6b", "hf --recompute-granularity full", 32768),
    ("4b", "hf --recompute-granularity full --optimizer adamw_8bit", 8192),
    ("4b", "megatron --optimizer adamw_8bit", 6400),
]


@pytest.mark.parametrize("size, case, tokens", CASES)
def test_training_needs_what_is_planned(tmp_path: Path, size: str, case: str, tokens: int) -> None:
    model = make_model(tmp_path / size, size, device="cuda")
    torch.cuda.empty_cache()
    (model / "train.jsonl").write_text('{"prompt": "1"}\n')
    options = argparse.Namespace(
        device="cuda", max_tokens_per_gpu=tokens, num_samples=128, prompt=128, response=512, steps=3
    )
    options.turns, options.kernels = False, 0
    row = measure(options, model, case, tmp_path / "run")
    print(f"\n{size} {case}: planned {row['planned_gib']} GiB, seen {row['peak_gib']} GiB, {row['seconds']} s")
    assert row["planned_gib"] == pytest.approx(row["peak_gib"], rel=0.1)


def test_the_profile_of_a_card_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card, path = card_of("here")
    print(f"\n{path.read_text()}")
    assert card.matmul > 1e14 and card.memory > 1e12 and card.to_host > 1e9 and card.to_device > 1e9
    assert 1e-7 < card.op < 1e-3 and set(card.train) == {1024, 4096}
    assert card.train[4096] > card.train[1024] > 1e12, "wide layers are nearer to the card's peak"


def test_the_memory_of_gpus_is_that_of_cuda() -> None:
    assert memory_of_gpus() == pytest.approx(torch.cuda.get_device_properties(0).total_memory / 2**30, rel=0.03)

"""Layouts of the megatron backend on four ranks, and more on two, as `test_megatron_backend.py` has them."""

from __future__ import annotations

import pytest

from tests.distributed.megatron_checks import compute, same_export, same_resume, same_scores, same_steps
from tests.distributed.megatron_layouts import CUDA, LAYOUTS, RESUMES, SLOW

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(CUDA, reason="more ranks than a host has GPUs: they meet over gloo"),
]

RARE = {name for name, (ranks, *_) in LAYOUTS.items() if ranks == 4 or name in SLOW}
RESUMED = [pair for pair in RESUMES if RARE & {*pair}]
NAMES = [name for name in LAYOUTS if name in RARE.union(*RESUMED)]


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> dict:
    return compute(tmp_path_factory.mktemp("layouts"), NAMES, RESUMED)


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_computes_and_trains_as_transformers_and_adamw(computed, name):
    assert same_scores(computed, name) > 0
    assert same_steps(computed, name) > 0
    assert same_export(computed, name) > 0


@pytest.mark.parametrize(("saved", "name"), RESUMED)
def test_a_checkpoint_goes_on_under_another_layout(computed, saved, name):
    assert same_resume(computed, saved, name) > 0

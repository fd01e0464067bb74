"""Ranks of Megatron read their slices of matrices in block-quantized FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_layouts import MODELS, random_model
from tests.distributed.megatron_runs import export, make_backend
from tests.fp8 import quantize

MEGATRON = True  # what the ranks have imported


def load(root: Path, layout: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from instep.training.megatron import cpu_platform

    cpu_platform.install()  # before the first import of megatron.core
    backend, hf = make_backend(root, layout, dtype=dtype, with_optimizer=False)
    backend.load_hf(hf)
    return export(backend)


@pytest.mark.parametrize(
    ("model", "layout", "dtype"),
    [
        ("deepseek", "tp2-sp-deepseek", torch.bfloat16),
        ("moe-mixed", "tp2-sp-ep2", torch.float32),
        ("tied", "tp2-tied", torch.bfloat16),
    ],
)
def test_ranks_load_what_it_stands_for(tmp_path: Path, run_ranks: Any, model: str, layout: str, dtype: torch.dtype):
    """A rank's rows and columns begin and end within blocks (of 16 x 24)."""
    random_model(MODELS[model]).bfloat16().save_pretrained(tmp_path / model)
    meant = quantize(tmp_path / model)
    loaded = run_ranks(load, 2, tmp_path, layout, dtype)[0]
    assert loaded.keys() == meant.keys()
    for name, tensor in loaded.items():
        own = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        assert tensor.dtype is own and torch.equal(tensor, meant[name].to(own)), name

"""Checkpoints that the `megatron.training` of Megatron-LM core_v0.16.1 has written: see `megatron_training.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.checkpoints.convert import main as convert
from tests.distributed.megatron_layouts import random_model
from tests.distributed.megatron_runs import export, make_args, refusal
from tests.distributed.megatron_training import BETAS, CHECKPOINTS, CONFIG, GRADIENT

MEGATRON = True  # what the ranks have imported
DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_they_are_converted_bit_by_bit(tmp_path, name):
    random_model(CONFIG).save_pretrained(tmp_path / "hf")
    words = ["--load", str(DATA / name), "--hf-checkpoint", str(tmp_path / "hf"), "--save", str(tmp_path / "new")]
    assert convert(["megatron-to-hf", *words]) == 0
    wanted, read = load_file(DATA / name / "weights.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    assert read.keys() == wanted.keys() and all(torch.equal(read[key], tensor) for key, tensor in wanted.items())
    before = load_file(tmp_path / "hf" / "model.safetensors")
    assert not any(torch.equal(read[key], before[key]) for key in wanted), "a step of Megatron's has moved them"


def load(folder: Path, optimizer: bool, sizes: dict[str, Any]) -> dict[str, Any]:
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    from megatron.core import parallel_state

    from instep.training.megatron.backend import MegatronBackend

    parallel_state.destroy_model_parallel()
    more: dict[str, Any] = dict(device=torch.device("cpu"), dtype=torch.float32, with_optimizer=True)
    backend = MegatronBackend(make_args(**sizes), hf_config=CONFIG, **more)
    if optimizer and folder.parent.name == "torch":
        return dict(refused=refusal(lambda: backend.load(folder)))
    backend.load(folder, optimizer=optimizer)
    inner = backend.optimizer.chained_optimizers[0].optimizer
    moments = [[s[key] for s in inner.state.values() if key in s] for key in ("exp_avg", "exp_avg_sq")]
    return dict(read=export(backend), moments=moments)


@pytest.mark.parametrize("sizes", [dict(pipeline_model_parallel_size=2), dict(use_distributed_optimizer=True)], ids=str)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_run_begins_with_them_under_another_layout(run_ranks, name, sizes):
    folder, goes_on = DATA / name / "iter_0000007", name == "torch_dist"
    results = run_ranks(load, 2, folder, goes_on, sizes)
    wanted = load_file(DATA / name / "weights.safetensors")
    assert results[0]["read"].keys() == wanted.keys()
    assert all(torch.equal(results[0]["read"][key], tensor) for key, tensor in wanted.items())
    if goes_on:  # what Adam makes of one gradient; rows that pad the vocabulary begin anew
        for i, (beta, gradient) in enumerate(zip(BETAS, (GRADIENT, GRADIENT**2), strict=True)):
            moments = torch.cat([m.flatten() for result in results for m in result["moments"][i]])
            moments = moments[moments != 0]
            assert moments.numel() == sum(tensor.numel() for tensor in wanted.values())
            torch.testing.assert_close(moments, torch.full_like(moments, (1 - beta) * gradient))
    else:
        error = run_ranks(load, 2, folder, True, sizes)[0]["refused"]
        assert "--no-load-optim" in error.remedy, error

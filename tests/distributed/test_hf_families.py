"""Mixtures of experts, linear attention, and what is trained padded, under FSDP2, against plain transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from instep.checkpoints.hf_export import export_hf
from tests.distributed.hf_runs import make_backend, oracle_training, train, weights_of
from tests.families import FAMILIES, make_family

SLOW = pytest.mark.slow
NAMES = ["mixtral", "gemma2", "qwen3_5", pytest.param("deepseek_v2", marks=SLOW)]


def _train_rank(path, recompute, out):
    backend = make_backend(path, recompute_granularity=recompute)
    loaded = weights_of(backend)
    remark = backend.remark()
    steps = train(backend, range(3))
    export_hf(backend.weight_source(), path, out)
    return steps, loaded, weights_of(backend), remark


@pytest.mark.parametrize("world_size, recompute", [pytest.param(1, None, marks=SLOW), (2, None), (2, "full")])
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_equal_plain_transformers(run_ranks, tmp_path: Path, name, world_size, recompute):
    if recompute and name != "qwen3_5":
        pytest.skip("one family shows it")
    path, out = make_family(name, tmp_path / "hf"), tmp_path / "out"
    expected_steps, expected = oracle_training(path)
    results = run_ranks(_train_rank, world_size, path, recompute, out)
    steps, loaded, trained, remark = results[0]
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected_steps), rtol=1e-5, atol=0)
    assert (remark == "") is FAMILIES[name].packed and all(r[0] == steps for r in results)
    before, after = load_file(path / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() == trained.keys()
    assert all(torch.equal(loaded[n], before[n]) and torch.equal(trained[n], after[n]) for n in before)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for n, weight in again.named_parameters():
        assert (weight - expected[n]).norm() <= 3e-5 * expected[n].norm(), n

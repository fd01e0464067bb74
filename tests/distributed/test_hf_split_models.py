"""Tensor parallelism of every architecture for which docs/models.md promises it, and refusals of the others."""

import pytest

from instep.errors import ConfigError
from instep.training.hf.shards import TP, mesh_of
from tests.architectures import PACKED, REASONS, SPLIT, compare


def _compared_rank(names):
    found = {}
    for name in names:
        try:
            found[name] = compare(name, mesh=mesh_of("cpu", 2)[TP])
        except ConfigError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_ranks_compute_what_one_does(run_ranks, part):
    for found in run_ranks(_compared_rank, 2, SPLIT[part::4]):
        for name, result in found.items():
            assert not isinstance(result, str), (name, result)
            assert result.log_probs < 1e-5 and result.gradients < 1e-5, (name, result)


def test_the_others_are_refused_by_name(run_ranks):
    others = [name for name in (*PACKED, *REASONS) if name not in SPLIT]
    few = ["mixtral", "deepseek_v2", "gpt2", "diffllama", "gpt_oss"]
    assert set(few) <= set(others)
    for name, result in run_ranks(_compared_rank, 2, few)[0].items():
        assert isinstance(result, str) and "cannot be split" in result, (name, result)
        assert "--tensor-model-parallel-size 2" in result and "FSDP2" in result

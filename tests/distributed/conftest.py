"""Processes and checkpoints that the tests of the `hf` backend share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run_ranks(request: pytest.FixtureRequest) -> Iterator[Run]:
    """`run_ranks(fn, world_size, *args)` on processes that this module's tests share; `MEGATRON` there says of what."""
    from tests.distributed.helpers import RankPool

    pools: dict[int, RankPool] = {}
    megatron = getattr(request.module, "MEGATRON", False)

    def run(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        if world_size not in pools or pools[world_size].closed:
            pools[world_size] = RankPool(world_size, megatron=megatron)
        return pools[world_size].run(fn, *args)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory) -> Path:
    from tests.distributed.hf_runs import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("hf"), tied=request.param)


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory) -> Path:
    from tests.distributed.hf_runs import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)

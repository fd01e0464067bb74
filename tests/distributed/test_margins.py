"""Right syncs pass and wrong ones fail, with a margin: random and peaked models of ten families, bf16 and fp32.

A peaked model is one under which random tokens are as unlikely as under a trained one. `margins.json` has what was
measured, the real model's row too; docs/weight-sync.md shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.controller.sync.proof import ALLOWED
from tests.distributed.helpers import RankPool
from tests.distributed.margins import FAMILIES, TABLE, of_families

MARGIN = 3.0
# One with biases, one with experts, one whose norms lie around 0; the committed table has the others.
FAST = {("qwen2", "bf16"), ("qwen2", "fp32"), ("qwen3_moe", "bf16"), ("gemma", "fp32")}
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in ((name, precision) for name in FAMILIES for precision in ("bf16", "fp32"))
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as made:
        yield made


@pytest.mark.parametrize("name, precision", CASES)
def test_right_syncs_pass_and_wrong_ones_fail(pool: RankPool, name: str, precision: str, tmp_path: Path) -> None:
    rows = pool.run(of_families, tmp_path, [name], precision)[0]
    assert len(rows) == 2
    for row, found in rows.items():
        least = min(found["wrong"], key=found["wrong"].get)
        assert found["right"] < ALLOWED < found["wrong"][least], (row, least, found)
        assert found["wrong"][least] >= MARGIN * found["right"], (row, least, found)
        assert len(found["wrong"]) >= 5


def test_the_committed_table_has_the_margin() -> None:
    table = json.loads(TABLE.read_text())
    kinds = {f"{name}, {kind}, {p}" for name in FAMILIES for kind in ("flat", "peaked") for p in ("bf16", "fp32")}
    assert kinds < set(table) and "gemma-3-270m, real, bf16" in table
    for row, found in table.items():
        assert found["right"] < ALLOWED and min(found["wrong"].values()) >= MARGIN * found["right"], row

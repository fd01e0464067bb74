"""The faults of `test_planted.py` with real SGLang: no token and no loss sees wrong weights, at TP 1 and at TP 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.commands import on_sglang
from tests.e2e.test_planted import FAULTS, LORA, ON_VLLM, Fault, Stack, limit_of, make_stack, seconds_until_named

pytestmark = pytest.mark.sglang
TWO = ("--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2")
# SGLang's ranks answer with one verdict, rank 0's; instep gathers theirs. So what one rank sees must stop all.
ON_TWO = [f for f in FAULTS if f.way not in (*LORA, "restart") and f.side in ("stream", "way", "engine")]
ADAPTERS = ("--lora-rank", "4", "--weight-sync", "lora")
# SGLang gives no digests of its weights. What its plugin cannot see, the golden path does, without a name.
TOLD = {
    ("names exchanged", "stream"): "changed by .* over the golden path",
    ("forged", "way"): "no checkpoint in",
    ("another checkpoint", "engine"): "this engine was started on",
}


def told(fault: Fault) -> Fault:
    return replace(fault, words=TOLD.get((fault.name, fault.side), fault.words))


def _marked(faults: list[Fault]) -> list[object]:
    return [pytest.param(f, marks=[] if f in ON_VLLM else [pytest.mark.slow], id=str(f)) for f in faults]


@pytest.fixture(scope="module")
def planted_sglang(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from make_stack(tmp_path_factory.mktemp("sglang"), tiny, *on_sglang())


@pytest.fixture(scope="module")
def planted_sglang_two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from make_stack(tmp_path_factory.mktemp("sglang"), tiny, *on_sglang(), *TWO)


@pytest.fixture(scope="module")
def planted_sglang_lora(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from make_stack(tmp_path_factory.mktemp("sglang"), tiny, *ADAPTERS, *on_sglang())


@pytest.mark.parametrize("fault", _marked([f for f in FAULTS if f.way not in LORA]))
def test_a_planted_fault_is_named(planted_sglang: Stack, fault: Fault, tmp_path: Path) -> None:
    assert seconds_until_named(planted_sglang, told(fault), tmp_path) <= limit_of(fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ON_TWO, ids=str)
def test_a_planted_fault_is_named_by_all_ranks(planted_sglang_two: Stack, fault: Fault, tmp_path: Path) -> None:
    assert seconds_until_named(planted_sglang_two, told(fault), tmp_path) <= limit_of(fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.way in LORA], ids=str)
def test_a_planted_fault_of_an_adapter_is_named(planted_sglang_lora: Stack, fault: Fault, tmp_path: Path) -> None:
    assert seconds_until_named(planted_sglang_lora, fault, tmp_path) <= limit_of(fault)

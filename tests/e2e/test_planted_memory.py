"""Faults of the way `single-copy`: of the trainer's write, between it and the engine's comparison, and of its map."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.errors import SyncError
from instep.rollout.request_gate import gate
from instep.system.scratch import Scratch, memory_root
from instep.weights.memory import attach
from instep.weights.spec import TensorSpec
from instep_engine.place import SYNC
from tests.bounds import allowed
from tests.e2e import plants
from tests.e2e.test_planted import SECONDS
from tests.e2e.test_single_copy import SGLANG, SLOW, Pair, pairs

UP = "model.layers.1.mlp.up_proj.weight"
K, V = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")
Change = Callable[[Pair, dict[str, torch.Tensor], dict[str, Any]], None]


def _of(pair: Pair, name: str) -> torch.Tensor:
    view = pair.memory().whole(name)
    assert view is not None
    return view


def exchanged(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    k, v = _of(pair, K), _of(pair, V)
    kept = k.clone()
    k.copy_(v)
    v.copy_(kept)


def half_old(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    half = old[UP].shape[0] // 2
    _of(pair, UP)[half:].copy_(old[UP][half:])


def element(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    _of(pair, UP)[0, 0] += 0.5


def not_a_number(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    _of(pair, UP)[0, 0] = float("nan")


def shards_exchanged(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    view = _of(pair, UP)
    view.copy_(torch.cat(view.clone().chunk(2)[::-1]))


def transposed(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    view = _of(pair, K)
    view.copy_(view.T.clone())


def other_memory(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    (told,) = info["digests"].values()
    info["digests"] = {"0" * 16: told}


def not_written(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    for told in info["digests"].values():
        del told[UP]


def old_digest(pair: Pair, old: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
    for told in info["digests"].values():
        told[UP] = "0" * 32


FAULTS: dict[str, tuple[Change, str]] = {
    "stale tensor": (lambda pair, old, info: (_of(pair, UP).copy_(old[UP]), None)[1], UP),
    "exchanged tensors": (exchanged, K),
    "half written": (half_old, UP),
    "one element off": (element, UP),
    "not a number": (not_a_number, UP),
    "wrong shard": (shards_exchanged, UP),
    "transposed": (transposed, K),
    "memory of another engine": (other_memory, "attached to other memory"),
    "a weight that was not written": (not_written, UP),
    "an old digest": (old_digest, UP),
}


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("vllm", marks=SLOW), pytest.param("sglang", marks=SGLANG)]
)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("shared")
    yield from pairs(folder, request.param, "bf16", env=plants.environment(folder))


@pytest.fixture
def sync(shared: Pair) -> Iterator[WeightSync]:
    made = WeightSync(shared.args, shared.actor, "single-copy", shared.folder, vocab_size=50, max_len=128)
    yield made
    made.close()


# By digests, as a stale tensor.
ALIKE = ("half written", "one element off", "wrong shard", "transposed")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow) if f in ALIKE else f for f in FAULTS])
def test_a_planted_fault_is_named(shared: Pair, sync: WeightSync, monkeypatch: Any, fault: str) -> None:
    change, words = FAULTS[fault]
    sync.run([shared.engine])
    memory = shared.memory()
    old = {name: _of(shared, name).clone() for name in memory.shapes}
    sync.hold([shared.engine])
    shared.step(1e-2)
    update = Engine.update

    def planted(self: Engine, info: dict[str, Any], *, timeout: float) -> None:
        if info["backend"] == "single-copy":
            info = json.loads(json.dumps(info))
            change(shared, old, info)
        update(self, info, timeout=timeout)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "update", planted)
        began = time.monotonic()
        with pytest.raises(SyncError, match=words.replace(".", r"\.")) as caught:
            sync.run([shared.engine])
    assert time.monotonic() - began <= allowed(SECONDS)
    assert shared.engine.name in str(caught.value) and caught.value.remedy and gate().closed
    for name, tensor in old.items():
        _of(shared, name).copy_(tensor)
    shared.step(1e-2)  # the masters go into the memory again
    sync.run([shared.engine])


@pytest.mark.parametrize("plant", plants.WRITES)
def test_a_write_that_does_not_reach_the_memory_is_named(shared: Pair, sync: WeightSync, plant: str) -> None:
    """What is told comes from the masters, not from the memory."""
    sync.run([shared.engine])
    mark = shared.logs.parent / "plant"
    sync.hold([shared.engine])
    shared.step(1e-4)
    mark.write_text(plant)
    began = time.monotonic()
    try:
        with pytest.raises(SyncError, match=f"{plants.WRITTEN} .*is not what the trainer has") as caught:
            sync.run([shared.engine])
    finally:
        mark.unlink()
    assert time.monotonic() - began <= allowed(SECONDS)
    assert shared.engine.name in str(caught.value) and caught.value.remedy and gate().closed
    shared.step(1e-4)
    sync.run([shared.engine])


LIES = {
    "shape": rf"{UP} is .* in the trainer and .* in engine 0",
    "dtype": rf"{UP} is bfloat16 in the trainer and float16 in engine 0",
    "name": r"engine 0 has .*other.weight, the trainer has not",
    "offset": "is outside the memory|cannot be opened",
    "nothing": "cannot be opened",
    "another folder": "cannot be opened",
}


def test_a_map_that_lies_is_refused_before_a_write(shared: Pair, sync: WeightSync) -> None:
    """A trainer that attaches compares the map with its weights: another architecture, dtype, or half a file."""
    sync.run([shared.engine])
    memory = shared.memory()
    specs = [TensorSpec(name, memory.shapes[name], getattr(torch, memory.dtypes[name])) for name in memory.shapes]
    for what, words in LIES.items():
        content = json.loads((shared.folder / "memory-0.json").read_text())
        tensor = content["tensors"][UP]
        if what == "shape":
            tensor["shape"] = tensor["shape"][::-1]
        elif what == "dtype":
            tensor["dtype"] = "float16"
        elif what == "name":
            content["tensors"]["model.layers.1.mlp.other.weight"] = content["tensors"].pop(UP)
        elif what == "offset":
            tensor["slices"][0]["offset"] = 1 << 40
        elif what == "another folder":
            content["memories"][0]["path"] = str(Path(__file__).absolute())
        with Scratch(f"{SYNC}lies-", memory_root()) as folder:
            (folder / "memory-0.json").write_text("{" if what == "nothing" else json.dumps(content))
            with pytest.raises(SyncError, match=words) as caught:
                attach(folder, lock=True).check(specs)
        assert shared.engine.name in caught.value.what and caught.value.remedy and caught.value.where, what
    sync.run([shared.engine])

"""The proof that an engine holds the weights that were sent, against trainer and engines whose scores are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from instep.controller.sync.proof import Proof
from instep.controller.turns import Turns
from instep.errors import SyncError
from instep.weights.manifest import TensorRecord
from instep.weights.way import Sent

LENGTH, LARGEST = 6, 40.0  # of the two probes; the largest |log-prob| in them


class World:
    """A session in which the trainer's scores fall from -1 to -40; those of the engine are off by `off` and `shift`."""

    def __init__(self) -> None:
        self.off, self.shift, self.version = 0.0, 0.0, "1"
        digests = SimpleNamespace(digests=False)
        engine = SimpleNamespace(name="engine 0", url="http://e", num_replicas=1, capabilities=digests)
        engine.prompt_log_probs = lambda tokens, **_: [x + self.off for x in self.scores()]
        self.engines = [engine]
        actor = SimpleNamespace(check_weights=lambda timeout: None, weight_digests=lambda way, timeout: {})
        actor.probe_log_probs = lambda batch, timeout: [*self.scores(), *self.scores()]
        self.actor = actor
        self.turns = Turns(SimpleNamespace(offload_train=False, offload_rollout=False, weight_sync="shm"))

    def hand_over(self) -> None:
        """The engines answer already."""

    def scores(self) -> list[float]:
        return [-1.0 - i - self.shift for i in range(LENGTH - 2)] + [-LARGEST]

    def each(self, call: Any) -> dict[str, Any]:
        return {engine.url: call(engine) for engine in self.engines}

    def seconds_left(self) -> float:
        return 10.0


def sent(digest: str) -> Sent:
    return Sent((TensorRecord("w", (1,), "float32", 0, 4, digest),), "xxh3-128")


@pytest.fixture
def proof() -> Proof:
    args: Any = SimpleNamespace(precision="fp32", sync_tolerance=None, vllm_overrides={})
    return Proof(args, vocab_size=50, max_len=LENGTH + 1)


def test_in_fp32_scores_may_differ_by_roundings_of_the_largest(proof: Proof) -> None:
    world: Any = World()
    world.off = 3.5e-4
    proven = proof.prove(world, "shm", sent("a"))
    assert proven.tolerance == pytest.approx(1e-5 * LARGEST) and proven.last == pytest.approx(3.5e-4)
    world.off = 5e-4
    with pytest.raises(SyncError, match=r"does not hold version 1: .* differ from the trainer's by 0.0005"):
        proof.prove(world, "shm", sent("b"))


def test_old_scores_after_a_change_of_weights_are_old_weights(proof: Proof) -> None:
    world: Any = World()
    proof.prove(world, "shm", sent("a"))
    proof.prove(world, "shm", sent("a"))  # a step that was skipped changes nothing
    world.shift = 0.5
    proof.prove(world, "shm", sent("b"))
    with pytest.raises(SyncError, match=r"still answers with old weights: 1 tensors changed \(w, ...\)"):
        proof.prove(world, "shm", sent("c"))


def test_the_half_of_an_adapter_that_is_multiplied_by_zero_may_change_without_effect(proof: Proof) -> None:
    """With rewards that are all alike weight decay moves A alone, and B is still the 0 that it began with."""

    def adapter(a: str, b: str) -> Sent:
        names = {"q.lora_A.weight": a, "q.lora_B.weight": b}
        return Sent(tuple(TensorRecord(n, (1,), "float32", 0, 4, d) for n, d in names.items()), "xxh3-128")

    world: Any = World()
    proof.prove(world, "lora", adapter("a", "zero"))
    proof.prove(world, "lora", adapter("decayed", "zero"))
    with pytest.raises(SyncError, match=r"still answers with old weights: 1 tensors changed \(q.lora_B.weight, ...\)"):
        proof.prove(world, "lora", adapter("decayed", "moved"))


# ---- bf16: what engines have loaded by themselves is a golden twin ---------------------------------------------------


class Bf16World(World):
    """A session whose engine rounds otherwise than the trainer; `transfers` are the ways that were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.off, self.transfers, self.off_after = 0.05, list[str](), None

    def transfer(self, way: str) -> None:
        self.transfers.append(way)
        self.off = self.off if self.off_after is None else self.off_after


@pytest.fixture
def bf16() -> Proof:
    args: Any = SimpleNamespace(
        precision="bf16", sync_tolerance=None, vllm_overrides={}, sync_timeout=10.0, pause_mode="abort"
    )
    proof = Proof(args, vocab_size=50, max_len=LENGTH + 1)
    proof._wrongly_sent = lambda *_: []  # type: ignore[method-assign]
    return proof


def test_the_first_session_is_compared_with_what_the_engine_has_loaded(bf16: Proof) -> None:
    world: Any = Bf16World()
    bf16.score_loaded(world.engines)
    assert bf16.prove(world, "shm", sent("a")).tolerance == pytest.approx(0.1)
    assert world.transfers == []  # it has scored the same after both ways
    world.off, world.shift = 0.2, 0.5
    assert bf16.prove(world, "shm", sent("b")).tolerance == pytest.approx(0.4)
    assert world.transfers == ["disk"]


def test_an_engine_that_scores_otherwise_than_what_it_had_loaded_is_compared_on_disk(bf16: Proof) -> None:
    world: Any = Bf16World()
    bf16.score_loaded(world.engines)
    world.off = 0.06
    bf16.prove(world, "shm", sent("a"))
    assert world.transfers == ["disk"]


def test_later_sessions_never_take_old_scores_for_the_golden_ones(bf16: Proof) -> None:
    """An engine that has gone back to what it had loaded at the start must not pass."""
    world: Any = Bf16World()
    world.off = 0.0
    bf16.score_loaded(world.engines)
    bf16.prove(world, "shm", sent("a"))  # within the tolerance: nothing is to be compared
    world.shift, world.off = 0.1, 0.1  # the trainer has moved, the engine's scores are the old ones
    bf16.prove(world, "shm", sent("b"))
    assert world.transfers == ["disk"]


def test_an_engine_that_was_started_anew_is_not_started_once_more(bf16: Proof) -> None:
    """Each start may round otherwise, and 0.5 is the most that rounding explains."""
    world: Any = Bf16World()
    bf16.score_loaded(world.engines)
    world.off = 0.06
    assert bf16.prove(world, "restart", sent("a")).tolerance == pytest.approx(0.12)
    world.off, world.shift = 0.6, 0.1
    with pytest.raises(SyncError, match=r"differ from the trainer's by 0.6, on the golden path as well, more than 0.5"):
        bf16.prove(world, "restart", sent("b"))
    assert world.transfers == []


@pytest.mark.parametrize(("mode", "after", "holds"), [
    ("abort", 0.06, True), ("abort", 0.07, False), ("keep", 0.035, True), ("keep", 0.07, True), ("keep", 0.02, False),
])  # fmt: skip
def test_beside_responses_that_go_on_an_engine_may_round_otherwise(
    bf16: Proof, mode: str, after: float, holds: bool
) -> None:
    """By as much as it differs from the trainer: that is what one more pass of the same weights may change."""
    world: Any = Bf16World()
    bf16._args.pause_mode = mode  # type: ignore[misc]
    world.off, world.off_after = 0.06, after
    if holds:
        assert bf16.prove(world, "shm", sent("a")).tolerance == pytest.approx(2 * after)
    else:
        with pytest.raises(SyncError, match=r"changed by 0.0[14] over the golden path, more than 0.0"):
            bf16.prove(world, "shm", sent("a"))
    assert world.transfers == ["disk"]

"""The proof that an engine holds the weights that were sent, against trainer and engines whose scores are given."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.controller.sync.probe import difference
from instep.controller.sync.proof import ALLOWED, Proof
from instep.controller.turns import Turns
from instep.errors import SyncError
from instep.types import Sample
from instep.weights.way import Sent
from instep_engine.manifest import TensorRecord

LENGTH = 6  # of the two texts
ROUNDING = 1e-3  # relative, of the trainer's scores


class World:
    """A session in which the trainer's scores fall from -1 to -40; those of the engine are off by `off`, relatively."""

    def __init__(self, folder: Path) -> None:
        self.off, self.shift, self.version, self.off_after = 0.0, 0.0, "1", None
        self.rounding, self.transfers, self.wrong = ROUNDING, list[str](), dict[str, str]()
        (folder / "config.json").write_text(json.dumps({"model_type": "x", "sliding_window": 512}))
        self.args = SimpleNamespace(hf_checkpoint=str(folder), precision="bf16")
        digests = SimpleNamespace(digests=False)
        engine = SimpleNamespace(name="engine 0", url="http://e", num_replicas=1, capabilities=digests)
        engine.prompt_log_probs = lambda tokens, **_: [x * (1 + self.off) for x in self.scores()]
        self.engines = [engine]
        actor = SimpleNamespace(check_weights=lambda timeout: None, weight_digests=lambda way, timeout: self.wrong)
        actor.probe_log_probs = self.trainer_scores
        self.actor = actor
        self.turns = Turns(SimpleNamespace(offload_train=False, offload_rollout=False, weight_sync="shm"))

    def trainer_scores(self, batch: Any, timeout: float) -> tuple[list[float], list[float]]:
        plain = [*self.scores(), *self.scores()]
        return plain, [x * (1 + self.rounding) for x in plain]

    def freeze(self) -> None:
        """Let the engine answer as it does now."""
        (engine,), scores = self.engines, self.scores()
        engine.prompt_log_probs = lambda tokens, **_: scores

    def hand_over(self) -> None:
        """The engines answer already."""

    def transfer(self, way: str) -> None:
        self.transfers.append(way)
        self.off = self.off if self.off_after is None else self.off_after

    def scores(self) -> list[float]:
        return [-1.0 - i - self.shift for i in range(LENGTH - 2)] + [-40.0]

    def each(self, call: Any) -> dict[str, Any]:
        return {engine.url: call(engine) for engine in self.engines}

    def seconds_left(self) -> float:
        return 10.0


@pytest.fixture
def world(tmp_path: Path) -> Any:
    return World(tmp_path)


def sent(digest: str) -> Sent:
    return Sent((TensorRecord("w", (1,), "float32", 0, 4, digest),), "xxh3-128")


def make_proof(**settings: Any) -> Proof:
    defaults = {"precision": "bf16", "sync_tolerance": None, "pause_mode": "abort"}
    defaults |= {"vllm_overrides": {}, "sglang_overrides": {}}
    defaults |= {"weight_sync": "shm"}
    proof = Proof(SimpleNamespace(**defaults | settings), vocab_size=50, max_len=LENGTH + 1)  # type: ignore[arg-type]
    proof._wrongly_sent = lambda *_: []  # type: ignore[method-assign]
    return proof


@pytest.fixture
def proof() -> Proof:
    return make_proof()


def test_scores_may_differ_by_what_rounding_explains(proof: Proof, world: Any) -> None:
    world.off = 0.9 * ALLOWED * ROUNDING
    proven = proof.prove(world, "shm", sent("a"))
    assert proven.tolerance == pytest.approx(ALLOWED * ROUNDING) and proven.rounding.rms == pytest.approx(ROUNDING)
    assert proven.last.rms == pytest.approx(world.off) and world.transfers == []
    assert proven.last.largest == pytest.approx(40 * world.off) and proven.first == proven.last


def test_what_differs_once_is_scored_again(proof: Proof, world: Any) -> None:
    asked, (engine,) = list[int](), world.engines
    engine.prompt_log_probs = lambda tokens, **_: [
        x * (1 + 0.5 * (len(asked) < 2)) for x in asked.append(1) or world.scores()
    ]
    proven = proof.prove(world, "shm", sent("a"))
    assert proven.first.rms > proven.tolerance > proven.last.rms == 0


def test_texts_of_which_the_policy_is_certain_show_little_rounding(proof: Proof, world: Any) -> None:
    proof.prove(world, "shm", sent("a"))
    world.rounding, world.off, world.shift = 1e-5, 2e-3, 0.5  # below three times what the last proof has shown
    assert proof.prove(world, "shm", sent("b")).tolerance == pytest.approx(ALLOWED * ROUNDING)
    fresh = make_proof()
    world.off = 0.02  # at first the golden path must show that it is rounding
    assert fresh.prove(world, "shm", sent("a")).tolerance == pytest.approx(0.03)
    assert world.transfers == ["disk"]
    world.shift, world.rounding, world.off = 0.7, 5e-3, 0.9  # which allows no more of other texts
    with pytest.raises(SyncError, match="compute differently"):
        fresh.prove(world, "shm", sent("b"))


def test_float32_is_not_better_than_its_digits(proof: Proof, world: Any) -> None:
    world.rounding, world.off = 1e-8, 9e-6
    assert proof.prove(world, "shm", sent("a")).tolerance == 1e-5


def test_wrong_tensors_are_named(proof: Proof, world: Any) -> None:
    proof._wrongly_sent = lambda *_: ["w"]  # type: ignore[method-assign]
    world.off = 0.5
    with pytest.raises(SyncError, match=r"does not hold version 1: .* by 0.5 .*more than 0.003. .*sent wrongly: w"):
        proof.prove(world, "shm", sent("a"))
    assert world.transfers == []


def test_an_engine_whose_scores_change_over_the_golden_path_did_not_hold_the_weights(proof: Proof, world: Any) -> None:
    world.off, world.off_after = 0.005, 0.001
    with pytest.raises(SyncError, match=r"does not hold version 1: .* changed by 0.00398 over the golden path"):
        proof.prove(world, "shm", sent("a"))
    assert world.transfers == ["disk"]


@pytest.mark.parametrize(("off", "allowed"), [(4, 8), (6, 10)])
def test_an_engine_that_rounds_more_may_go_on_so(proof: Proof, world: Any, off: int, allowed: int) -> None:
    world.off = off * ROUNDING
    assert proof.prove(world, "shm", sent("a")).tolerance == pytest.approx(allowed * ROUNDING)
    world.shift = 0.5
    proof.prove(world, "shm", sent("b"))
    assert world.transfers == ["disk"]  # once
    world.shift, world.rounding, world.off = 0.6, 5e-3, 0.9
    with pytest.raises(SyncError, match="compute differently"):
        proof.prove(world, "shm", sent("c"))


def test_float32_that_differs_by_more_is_compared_once(world: Any) -> None:
    """By eleven roundings, as vLLM does on a CPU with Gemma 3 270M."""
    proof = make_proof(precision="fp32")
    world.rounding, world.off = 2e-6, 2.2e-5
    for number in range(3):
        proven = proof.prove(world, "shm", sent(str(number)))
        assert proven.last.rms <= proven.tolerance == pytest.approx(4.4e-5)
        world.shift += 0.5
    assert world.transfers == ["disk"]


def test_an_engine_that_computes_otherwise_is_not_said_to_hold_wrong_weights(proof: Proof, world: Any) -> None:
    world.off = 0.04
    with pytest.raises(SyncError) as caught:
        proof.prove(world, "shm", sent("a"))
    error = caught.value
    assert "trainer and engine 0 compute differently, although its weights are the trainer's" in error.what
    assert "0.4 nats in the mean and 1.6 at most, 40 times what rounding explains" in error.what
    assert "does not hold" not in error.what
    assert "--sync-tolerance 0.06 accepts it" in error.remedy


def test_an_adapter_that_moves_away_later_is_scaled_wrongly(proof: Proof, world: Any) -> None:
    """Its golden path would be scaled wrongly, too."""
    world.off = 1.6 * ROUNDING
    proof.prove(world, "lora", sent("a"))  # B is 0
    world.shift, world.off = 0.5, 3.1 * ROUNDING  # slowly
    assert proof.prove(world, "lora", sent("b")).tolerance == pytest.approx(6.2 * ROUNDING)
    world.shift, world.off = 0.6, 7 * ROUNDING
    with pytest.raises(SyncError, match="compute differently.* another alpha"):
        proof.prove(world, "lora", sent("c"))


def test_a_tolerance_of_the_user_is_all_that_counts(world: Any) -> None:
    proof = make_proof(sync_tolerance=0.3)
    world.off = 0.25
    assert proof.prove(world, "shm", sent("a")).tolerance == 0.3
    world.off, world.shift = 0.35, 0.5
    with pytest.raises(SyncError, match="compute differently"):
        proof.prove(world, "shm", sent("b"))
    assert world.transfers == []


def test_a_base_that_the_engine_quantizes_differs_by_more_than_rounding(world: Any) -> None:
    proof = make_proof(vllm_overrides={"quantization": ["--quantization", "fp8"]})
    world.off = 0.2
    assert proof.prove(world, "shm", sent("a")).tolerance == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("method", "backend", "most"), [("fp8", "vllm", 0.5), ("gptq", "vllm", 0), ("fp8", "embedded", 0)]
)
def test_a_base_that_is_stored_quantized_may_differ_where_its_layers_round_what_goes_into_them(
    world: Any, method: str, backend: str, most: float
) -> None:
    config = Path(world.args.hf_checkpoint) / "config.json"
    config.write_text(json.dumps({"model_type": "x", "quantization_config": {"quant_method": method, "bits": 4}}))
    of_run = {"hf_checkpoint": world.args.hf_checkpoint, "weight_sync": "lora", "rollout_backend": backend}
    proof = make_proof(**of_run)
    world.off = 0.2
    if most:
        assert proof.prove(world, "lora", sent("a")).tolerance == pytest.approx(0.4)
        world.shift, world.off = 0.5, 0.6
    with pytest.raises(SyncError, match="compute differently"):
        proof.prove(world, "lora", sent("b"))


def test_scores_that_are_no_numbers_are_never_within_the_tolerance(proof: Proof, world: Any) -> None:
    world.off = math.nan
    with pytest.raises(SyncError, match="engine 0 computes log-probs that are not numbers with version 1"):
        proof.prove(world, "shm", sent("a"))
    assert world.transfers == []
    world.off, world.rounding = 0.1, math.nan  # a trainer whose second pass overflows explains nothing
    with pytest.raises(SyncError, match="compute differently"):
        proof.prove(world, "restart", sent("b"))


def test_old_scores_after_a_change_of_weights_are_old_weights(proof: Proof, world: Any) -> None:
    proof.prove(world, "shm", sent("a"))
    proof.prove(world, "shm", sent("a"))  # a step that was skipped changes nothing
    world.shift = 0.5
    proof.prove(world, "shm", sent("b"))
    proof.prove(world, "shm", sent("c"))  # the trainer's scores are the same, too
    world.freeze()
    world.shift = 0.501
    with pytest.raises(SyncError, match=r"still answers with old weights: 1 tensors changed \(w, ...\)"):
        proof.prove(world, "shm", sent("d"))


def test_old_scores_are_seen_in_the_text_that_stayed(proof: Proof, world: Any) -> None:
    proof.prove(world, "shm", sent("a"))
    proof.probe.offer([[Sample(tokens=list(range(LENGTH)), response_length=2)]])
    proof.probe.turn()
    world.freeze()
    world.shift = 1e-3
    with pytest.raises(SyncError, match="still answers with old weights"):
        proof.prove(world, "shm", sent("b"))


def test_the_half_of_an_adapter_that_is_multiplied_by_zero_may_change_without_effect(proof: Proof, world: Any) -> None:
    """With rewards that are all alike weight decay moves A alone, and B is still the 0 that it began with."""

    def adapter(a: str, b: str) -> Sent:
        names = {"q.lora_A.weight": a, "q.lora_B.weight": b}
        return Sent(tuple(TensorRecord(n, (1,), "float32", 0, 4, d) for n, d in names.items()), "xxh3-128")

    proof.prove(world, "lora", adapter("a", "zero"))
    world.freeze()
    world.shift = 1e-3
    proof.prove(world, "lora", adapter("decayed", "zero"))
    world.shift = 2e-3
    with pytest.raises(SyncError, match=r"still answers with old weights: 1 tensors changed \(q.lora_B.weight, ...\)"):
        proof.prove(world, "lora", adapter("decayed", "moved"))


@pytest.mark.parametrize(("mode", "after", "holds"), [
    ("abort", 5.9, True), ("abort", 4.5, False), ("keep", 3.5, True), ("keep", 2.5, False),
])  # fmt: skip
def test_beside_responses_that_go_on_an_engine_may_round_otherwise(
    world: Any, mode: str, after: float, holds: bool
) -> None:
    """By as much as it differs from the trainer: that is what one more pass of the same weights may change."""
    proof = make_proof(pause_mode=mode)
    world.off, world.off_after = 6 * ROUNDING, after * ROUNDING
    if holds:
        assert proof.prove(world, "shm", sent("a")).tolerance == pytest.approx(10 * ROUNDING)
    else:
        with pytest.raises(SyncError, match="over the golden path, more than 0.00"):
            proof.prove(world, "shm", sent("a"))
    assert world.transfers == ["disk"]


def test_an_engine_that_was_started_anew_is_not_started_once_more(proof: Proof, world: Any) -> None:
    """Each start may round otherwise: its kernels are tuned once more."""
    world.off = 6 * ROUNDING
    assert proof.prove(world, "restart", sent("a")).tolerance == pytest.approx(10 * ROUNDING)
    assert world.transfers == []


def test_the_gap_of_sampled_tokens_is_bounded_by_that_of_the_probe(world: Any) -> None:
    proof = make_proof()
    proof.prove(world, "shm", sent("a"))
    mean = difference(*world.trainer_scores(None, 0.0)).mean
    assert mean == pytest.approx(1e-2) and proof.gap_limit == pytest.approx(10 * mean)
    world.rounding = 1e-7
    proof.prove(world, "shm", sent("a"))
    assert proof.gap_limit == 1e-3
    world.rounding = 0.1
    proof.prove(world, "shm", sent("a"))
    assert proof.gap_limit == 0.5
    assert make_proof(sync_tolerance=3.0).gap_limit == 3.0

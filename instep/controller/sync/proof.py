"""The proof of a sync: engine and trainer score the same tokens, the probe, and must agree (docs/architecture.md).

The engines have compared the digests of all tensors (`Sent`) before they loaded them. The proof shows that each engine
computes with these weights, and that its scores have changed if the weights have.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from instep.controller.sync.session import Session
from instep.engines.engine import Engine, EngineRefusal
from instep.errors import SyncError
from instep.types import TokenBatch
from instep.weights.way import GOLDEN, OF_ADAPTERS, RESTART, SINGLE_COPY, Sent, golden

if TYPE_CHECKING:
    from instep.arguments.settings import Settings
    from instep.controller.role import RoleTrainer

FP32_TOLERANCE = 1e-5  # times the largest |log-prob| of the probe: rounding grows with the logits
BF16_TOLERANCE = 2e-2  # until a comparison with the golden path shows that the arithmetic differs by more
GOLDEN_FACTOR = 2.0
ARITHMETIC_LIMIT = 0.5  # no rounding explains more: then the trainer exports something else than it trains
GOLDEN_TOLERANCE = 1e-3  # between the scores of an engine that does nothing else, of one version loaded in two ways
GAP_FACTOR = 10.0  # of the tolerance, which is for the largest difference of the probe: for a mean over sampled tokens
LEAST_GAP_LIMIT = 1e-3
NOT_A_NUMBER = "float values are not JSON compliant"  # what vLLM answers where a log-prob is NaN
ENGINE_DIGESTS = "xxh3-128"  # the kind that `/weight_checker` gives


class Proven(NamedTuple):
    """The largest |trainer - engine| log-prob difference of the probe, at first and at last, and the one allowed."""

    first: float
    last: float
    tolerance: float


class Proof:
    """Proves one session after another, and remembers the scores of the engines under the previous weights.

    Args:
        args: `precision`, `sync_tolerance`, `pause_mode`.
        vocab_size: the probe's tokens are drawn below it.
        max_len: most tokens of a sequence.
    """

    def __init__(self, args: Settings, *, vocab_size: int, max_len: int):
        self._args = args
        length = max(4, min(64, max_len - 1))
        generator = torch.Generator().manual_seed(0)
        self._probe = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for _ in range(2)]
        # Where engine and trainer round alike; a base that the engine quantizes differs as bf16 does, but more.
        self._exact = args.precision == "fp32" and not args.vllm_overrides.get("quantization")
        self._sent: Sent | None = None  # last proven
        self._scores: dict[str, list[float]] = {}  # engine url -> probe scores under it
        self._loaded: dict[str, list[float]] = {}  # those of what an engine has loaded by itself
        self._tolerance: float = BF16_TOLERANCE if args.sync_tolerance is None else args.sync_tolerance

    @property
    def gap_limit(self) -> float:
        """The largest mean gap (nats) of tokens of proven weights: 1e-3 in fp32, 0.2 to 0.5 in bf16 as calibrated."""
        limit = max(LEAST_GAP_LIMIT, GAP_FACTOR * self._tolerance)
        return limit if self._args.sync_tolerance is not None else min(limit, ARITHMETIC_LIMIT)

    def score_loaded(self, engines: Sequence[Engine]) -> None:
        """Score the probe with the checkpoint that `engines` have loaded by themselves, and the trainer, too.

        The first session brings the same weights, so that these scores take the place of a comparison with the golden
        path, which would have the engines load that checkpoint again. In fp32 nothing is compared with it.
        """
        if not self._exact and self._args.sync_tolerance is None:
            deadline = time.monotonic() + self._args.sync_timeout
            with ThreadPoolExecutor(max(1, len(engines))) as pool:
                jobs = {e.url: pool.submit(self._scores_of, e, lambda: deadline - time.monotonic()) for e in engines}
            self._loaded = {url: job.result() for url, job in jobs.items()}

    def differing(self, session: Session) -> dict[str, float]:
        """Score the probe once more; returns URL -> difference of each engine that is not within the tolerance."""
        expected = self._trainer_scores(session)
        session.hand_over()
        scores = session.each(lambda engine: self.engine_scores(engine, session))
        gaps = {url: largest_gap(expected, s) for url, s in scores.items()}
        return {url: gap for url, gap in gaps.items() if not gap <= self._tolerance}

    def prove(self, session: Session, way: str, sent: Sent) -> Proven:
        """Show that each engine of the session holds the weights that were sent.

        On a CPU, one first forward pass of a process in about eighty was off by 2e-5 of its log-probs, and exact from
        then on (torch 2.13, reason unknown). So what differs in fp32 is scored once more: wrong weights stay wrong.

        Raises:
            SyncError: an engine does not; the error names it and the tensors that differ.
        """
        expected, scores = self._both_score(session, way)
        loaded, self._loaded = self._loaded, {}  # for the first session alone
        if self._exact and self._args.sync_tolerance is None:
            self._tolerance = FP32_TOLERANCE * max(1.0, *map(abs, expected))
        gaps = {url: largest_gap(expected, s) for url, s in scores.items()}
        first = max(gaps.values())
        if not self._exact and not first <= self._tolerance:
            alike = [largest_gap(loaded[url], own) for url, own in scores.items() if url in loaded]
            same = len(alike) == len(scores) and max(alike) <= GOLDEN_TOLERANCE
            self._compare_with_golden(session, way, scores, expected, sent, scores if same else None)
        elif not first <= self._tolerance:
            expected = self._trainer_scores(session)
            scores = session.each(lambda engine: self.engine_scores(engine, session))
            gaps = {url: largest_gap(expected, s) for url, s in scores.items()}
        changed = self._changed(sent)
        for engine in session.engines:
            gap = gaps[engine.url]
            if not gap <= self._tolerance:
                how = f"differ from the trainer's by {gap:.3g}"
                raise self._wrong(session, engine, how, self._tolerance, way, sent)
            if changed and any_equal(scores[engine.url], self._scores.get(engine.url, []), len(expected)):
                raise SyncError(
                    f"{engine.name} still answers with old weights: {len(changed)} tensors changed "
                    f"({', '.join(changed[:3])}, ...), but not one of its probe scores did",
                    where=engine.url,
                    remedy=f"resume from the last checkpoint; try --weight-sync {GOLDEN} if it happens again",
                )
        self._scores, self._sent = {**self._scores, **scores}, sent
        return Proven(first, max(gaps.values()), self._tolerance)

    def _changed(self, sent: Sent) -> list[str]:
        """Return the names of the tensors that differ from the last proven ones; none if the digests' kinds differ."""
        if self._sent is None or self._sent.digest_kind != sent.digest_kind:
            return []
        before = self._sent.digests
        changed = [name for name, digest in sent.digests.items() if before.get(name) != digest]
        return [name for name in changed if not name.endswith(".lora_A.weight")]  # without effect while B is 0

    def _compare_with_golden(
        self,
        session: Session,
        way: str,
        scores: dict[str, list[float]],
        expected: list[float],
        sent: Sent,
        rescored: dict[str, list[float]] | None,
    ) -> None:
        """Send the same version once more through a checkpoint on disk, and compare the scores before and after.

        In bf16 trainer and engine round differently, by how much depends on the weights. An engine must score the same
        after both ways; the difference to the trainer that remains is rounding, and sets the tolerance from now on.
        Engines of the way `restart` are not started a second time.

        Args:
            rescored: the scores with the same weights from disk, if they are known (`score_loaded`): nothing is sent.
        """
        if way == RESTART:
            rescored = scores  # it is the slow way, and each start may round otherwise: its kernels are tuned anew
        elif rescored is None:
            session.transfer(golden(way))
            session.hand_over()
            rescored = session.each(lambda engine: self.engine_scores(engine, session))
        wrong = self._wrongly_sent(session, way, sent)  # what is sent wrongly by both ways is no rounding
        for engine in session.engines:
            after = rescored[engine.url]
            between, gap = largest_gap(after, scores[engine.url]), largest_gap(expected, after)
            # Beside responses that go on an engine rounds otherwise each time, by what it differs from the trainer.
            allowed = GOLDEN_TOLERANCE if self._args.pause_mode != "keep" else max(GOLDEN_TOLERANCE, gap)
            if not between <= allowed:
                raise self._wrong(session, engine, f"changed by {between:.3g} over the golden path", allowed, way, sent)
            if wrong:
                how = f"differ from the trainer's by {gap:.3g}"
                raise self._wrong(session, engine, how, self._tolerance, way, sent)
            if not gap <= ARITHMETIC_LIMIT:
                how = f"differ from the trainer's by {gap:.3g}, on the golden path as well"
                raise self._wrong(session, engine, how, ARITHMETIC_LIMIT, way, sent)
            self._tolerance = max(self._tolerance, GOLDEN_FACTOR * gap)

    def _wrong(self, session: Session, engine: Engine, how: str, tolerance: float, way: str, sent: Sent) -> SyncError:
        return SyncError(
            f"{engine.name} does not hold version {session.version}: its log-probs of the probe {how}, more than "
            f"{tolerance:.3g}. {self._name_culprits(session, engine, way, sent)}",
            where=engine.url,
            remedy="if both are right and the arithmetic differs, set --sync-tolerance; else resume from the last "
            "checkpoint",
        )

    def _both_score(self, session: Session, way: str) -> tuple[list[float], dict[str, list[float]]]:
        """The scores of the trainer, and by URL those of the engines, at once unless they take turns on the GPUs."""
        with ThreadPoolExecutor(1) as pool:
            ours = pool.submit(self._trainer_looks, session, way)
            if session.turns.are_taken:
                ours.result()
                session.hand_over()
            scores = session.each(lambda engine: self.engine_scores(engine, session))
            return ours.result(), scores

    def rehearse(self, actor: RoleTrainer) -> None:
        """Let the trainer score the probe, so that its first session compiles nothing."""
        actor.probe_log_probs(self._batch(), self._args.sync_timeout)

    def _batch(self) -> TokenBatch:
        lengths = torch.tensor([len(p) for p in self._probe])
        return TokenBatch(
            tokens=torch.tensor([t for p in self._probe for t in p]),
            total_lengths=lengths,
            response_lengths=lengths - 1,
            sample_columns={"temperature": torch.ones(len(self._probe))},
        )

    def _trainer_looks(self, session: Session, way: str) -> list[float]:
        """Its scores. By single copy it first finds each bit that it has written in the engines' memory."""
        if way == SINGLE_COPY and (unwritten := session.actor.unwritten_weights(session.seconds_left())):
            raise SyncError(
                f"the memory of {', '.join(engine.name for engine in session.engines)} does not hold version "
                f"{session.version}: what was written of {', '.join(unwritten[:3])} is not what the trainer has",
                where=unwritten[0],
                remedy=f"resume from the last checkpoint; try --weight-sync {GOLDEN} if it happens again",
            )
        return self._trainer_scores(session)

    def _trainer_scores(self, session: Session) -> list[float]:
        with session.turns.borrowed(session, optimizer=False):
            scores = session.actor.probe_log_probs(self._batch(), session.seconds_left())
            if not all(map(math.isfinite, scores)):
                session.actor.check_weights(session.seconds_left())  # the better name for it
        return scores

    def engine_scores(self, engine: Engine, session: Session) -> list[float]:
        """Return the scores of the probe by each replica of an engine, one after the other."""
        return self._scores_of(engine, session.seconds_left)

    def _scores_of(self, engine: Engine, seconds_left: Callable[[], float]) -> list[float]:
        out: list[float] = []
        replicas = range(engine.num_replicas) if engine.num_replicas > 1 else [None]
        for replica, tokens in itertools.product(replicas, self._probe):
            try:
                out += engine.prompt_log_probs(tokens, timeout=seconds_left(), replica=replica)
            except EngineRefusal as refusal:
                if NOT_A_NUMBER not in refusal.what:
                    raise
                out += [math.nan] * (len(tokens) - 1)
        return out

    def _wrongly_sent(self, session: Session, way: str, sent: Sent) -> list[str]:
        """The names of the tensors that were not sent as the trainer holds them now."""
        ours, told = self._trainer_digests(session, way), sent.digests
        return sorted(name for name in {*ours, *told} if ours.get(name) != told.get(name))

    def _trainer_digests(self, session: Session, way: str) -> dict[str, str]:
        with session.turns.borrowed(session, optimizer=False):
            return session.actor.weight_digests(way, session.seconds_left())

    def _name_culprits(self, session: Session, engine: Engine, way: str, sent: Sent) -> str:
        """Name the weights whose digests differ: what the trainer holds now, what was sent, what the engine holds."""
        wrong_sent = self._wrongly_sent(session, way, sent)
        if way in OF_ADAPTERS:
            if wrong_sent:
                return f"Tensors that were sent wrongly: {', '.join(wrong_sent[:8])}."
            return (
                "The adapter is the trainer's, tensor by tensor: the engine has another base than --hf-checkpoint or "
                "another alpha, or its requests do not use the adapter."
            )
        if not engine.capabilities.digests:
            return f"Sent wrongly: {', '.join(wrong_sent[:8]) or 'nothing'}; this engine cannot say what it holds."
        ours = self._trainer_digests(session, way if sent.digest_kind == ENGINE_DIGESTS else GOLDEN)
        theirs = engine.weight_digests(timeout=session.seconds_left())
        wrong_held = sorted(n for n, d in ours.items() if n in theirs and theirs[n] != d)
        if wrong_held:
            return f"Tensors that differ from the trainer's: {', '.join(wrong_held[:8])}."
        if wrong_sent:
            return f"Tensors that were sent wrongly: {', '.join(wrong_sent[:8])}."
        return "Every tensor of the engine equals the trainer's byte for byte: the two compute differently."


def largest_gap(expected: list[float], scores: list[float]) -> float:
    """Return max |a - b| over all replicas; it is infinite where a score is not a number."""
    gaps = [abs(x - y) for x, y in zip(itertools.cycle(expected), scores, strict=False)]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def any_equal(scores: list[float], before: list[float], num: int) -> bool:
    """Whether a replica scores as before; each replica has `num` scores."""
    return any(scores[i : i + num] == before[i : i + num] for i in range(0, len(scores), num))

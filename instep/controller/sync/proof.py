"""The proof of a sync: engine and trainer score the same tokens, the probe, and must agree (docs/architecture.md).

The engines have compared the digests of all tensors (`Sent`) before they loaded them. The proof shows that each engine
computes with these weights, and that its scores changed if the weights did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from instep.arguments.settings import Settings
from instep.checkpoints.quantization import PACKED, quantization_of
from instep.controller.sync.probe import Difference, Probe, Text, difference
from instep.controller.sync.session import Session
from instep.engines.engine import Engine, EngineRefusal
from instep.engines.flags import passed_on
from instep.engines.kind import kind_of
from instep.errors import SyncError
from instep.models.config_file import read_config
from instep.system.run_context import RunThreads
from instep.weights.way import GOLDEN, LORA, OF_ADAPTERS, RESTART, SINGLE_COPY, Sent, golden

ALLOWED = 3.0  # times the effect of one rounding of the embeddings on the trainer's scores; 0.4 to 1.8 were measured
# The limit if the golden path shows that the engine has the right weights. vLLM's CPU kernels reach 11 in float32; the
# smallest fault is thousands of roundings away there.
MOST_ALLOWED = {"bf16": 10.0, "fp32": 100.0}
MOST_OF_CERTAIN = {"bf16": 0.03, "fp32": 1e-5}  # the same for texts with too few uncertain tokens to show rounding
NUM_ROUNDINGS = 8  # the remembered proofs
LEAST_TOLERANCE = 1e-5  # float32 scores are sent as text and are not more exact
MOST_QUANTIZED = 0.5  # an engine that quantizes its base, or the inputs of its layers, differs by more than rounding
GAP_FACTOR = 10.0  # the mean gap of sampled tokens, relative to the probe's
LEAST_GAP_LIMIT, MOST_GAP_LIMIT = 1e-3, 0.5
SAMPLE_SECONDS = 60.0  # for the first texts; a paused engine writes no text
NOT_A_NUMBER = "float values are not JSON compliant"  # vLLM's answer if a log-prob is NaN
TRAINER = ""  # used instead of an engine's URL
ENGINE_DIGESTS = "xxh3-128"  # the kind of `/weight_checker`


class TrainerScores(NamedTuple):
    """The trainer's scores of the probe, and its scores after one more rounding (`Worker.score`)."""

    plain: list[float]
    rounded: list[float]


class Proven(NamedTuple):
    """The measurements of a proof.

    Attributes:
        first, last: the largest difference of an engine at first, and after a second scoring, if there was one.
        rounding: the effect of one rounding of the embeddings on the trainer's scores.
        tolerance: the allowed `rms`.
    """

    first: Difference
    last: Difference
    rounding: Difference
    tolerance: float


class Proof:
    """Prove one session after another; remember the engines' scores with the previous weights.

    Args:
        args: `precision`, `sync_tolerance`, `pause_mode`.
        vocab_size, max_len, start: see `Probe`.
    """

    def __init__(self, args: Settings, *, vocab_size: int, max_len: int, start: int = 0):
        self._args = args
        self.probe = Probe(vocab_size=vocab_size, max_len=max_len, start=start)
        words = passed_on(args)
        cache = words.get("kv_cache_dtype", ["auto"])[-1]
        self._quantized = bool(words.get("quantization")) or "8" in cache or "4" in cache
        if args.weight_sync == LORA and not kind_of(args.rollout_backend).dequantizes:
            how = quantization_of(read_config(args.hf_checkpoint), args.hf_checkpoint)
            self._quantized |= how is not None and how.name not in PACKED
        self._sent: Sent | None = None  # by the last proof
        self._scores: dict[str, dict[tuple[int, Text], list[float]]] = {}  # engine url -> its scores of `_sent`
        self._allowed, self._least, self._typical_gap = ALLOWED, LEAST_TOLERANCE, 0.0
        self._largest_ratio = 1.0  # of a difference to the effect of rounding, in a proven session
        self._roundings: deque[float] = deque(maxlen=NUM_ROUNDINGS)  # of the last proofs

    @property
    def gap_limit(self) -> float:
        """The largest mean gap (nats) for tokens of proven weights: ten times the probe's mean difference, or ten
        times the effect of rounding on it; at least 1e-3, at most 0.5 or --sync-tolerance."""
        most = max(MOST_GAP_LIMIT, self._args.sync_tolerance or 0.0)
        return min(most, max(LEAST_GAP_LIMIT, GAP_FACTOR * self._typical_gap, self._args.sync_tolerance or 0.0))

    def begin(self, engines: Sequence[Engine]) -> None:
        """Let one of the serving `engines` write the first texts of the probe; only the first call does."""
        self.probe.sample([e for e in engines if e.role != "prefill"], min(SAMPLE_SECONDS, self._args.sync_timeout))

    def differing(self, session: Session) -> dict[str, Difference]:
        """Score the probe again; return URL -> difference of each engine outside the tolerance."""
        expected = self._trainer_scores(session)
        session.hand_over()
        scores = session.each(lambda engine: self.engine_scores(engine, session))
        tolerance = self.tolerance(expected)
        return {url: d for url, d in self._differences(expected, scores).items() if not d.rms <= tolerance}

    def prove(self, session: Session, way: str, sent: Sent) -> Proven:
        """Show that each engine of the session has the weights that were sent.

        On a CPU, in one process of eighty the first forward pass was off by 2e-5 of its log-probs. Later passes were
        exact (torch 2.13, reason unknown). So a difference is scored again: wrong weights stay wrong.

        Raises:
            SyncError: an engine does not have them; the error names it and the tensors that differ. Or it has them,
                and computes differently from the trainer.
        """
        expected, scores = self._both_score(session, way)
        found = self._differences(expected, scores)
        first, tolerance = max(found.values()), self.tolerance(expected)
        if not first.rms <= tolerance:
            expected = self._trainer_scores(session)
            scores = session.each(lambda engine: self.engine_scores(engine, session))
            found, tolerance = self._differences(expected, scores), self.tolerance(expected)
        self._check_changed(session, sent, expected, scores)
        if not max(found.values()).rms <= tolerance:
            self._explain(session, way, sent, expected, scores)
            tolerance = self.tolerance(expected)
        self._scores |= {url: self.probe.by_text(own) for url, own in {TRAINER: expected.plain, **scores}.items()}
        self._sent = sent
        rounding, last = self.rounding(expected), max(found.values())
        if LEAST_TOLERANCE <= rounding.rms:
            self._largest_ratio = max(self._largest_ratio, last.rms / rounding.rms)
        self._typical_gap = max(rounding.mean, *(d.mean for d in found.values()))
        self.remember(expected)
        return Proven(first, last, rounding, tolerance)

    def rounding(self, expected: TrainerScores) -> Difference:
        """Return the effect of rounding, from this probe or as the mean of the last ones if that is larger.

        A text with a nearly certain policy has few tokens that show rounding.
        """
        found = difference(expected.plain, expected.rounded)
        found = found if math.isfinite(found.rms) else Difference(0.0, 0.0, 0.0)
        return found._replace(rms=max(found.rms, fmean(self._roundings))) if self._roundings else found

    def remember(self, expected: TrainerScores) -> None:
        """Remember the effect of rounding in a proven session for the next ones."""
        found = difference(expected.plain, expected.rounded).rms
        if math.isfinite(found):
            self._roundings.append(found)

    def tolerance(self, expected: TrainerScores) -> float:
        if self._args.sync_tolerance is not None:
            return self._args.sync_tolerance
        return max(self._least, self._allowed * self.rounding(expected).rms)

    def _differences(self, expected: TrainerScores, scores: dict[str, list[float]]) -> dict[str, Difference]:
        return {url: difference(expected.plain, own, self.probe.made) for url, own in scores.items()}

    def _check_changed(
        self, session: Session, sent: Sent, expected: TrainerScores, scores: dict[str, list[float]]
    ) -> None:
        """Raise SyncError if tensors have changed, but an engine's scores have not.

        With a text of which the policy is certain, the trainer's scores may not change either: then this shows nothing.
        """

        def alike(url: str, own: list[float]) -> bool:
            return scores_alike(self.probe.by_text(own), self._scores.get(url, {}))

        changed = self._changed(sent)
        if not changed or alike(TRAINER, expected.plain):
            return
        for engine in session.engines:
            if alike(engine.url, scores[engine.url]):
                raise SyncError(
                    f"{engine.name} still answers with old weights: {len(changed)} tensors changed "
                    f"({', '.join(changed[:3])}, ...), but not one of its probe scores did",
                    where=engine.url,
                    remedy=f"resume from the last checkpoint; try --weight-sync {GOLDEN} if it happens again",
                )

    def _changed(self, sent: Sent) -> list[str]:
        """Return the names of tensors that changed since the last proof; none if the digests' kinds differ."""
        if self._sent is None or self._sent.digest_kind != sent.digest_kind:
            return []
        before = self._sent.digests
        changed = [name for name, digest in sent.digests.items() if before.get(name) != digest]
        return [name for name in changed if not name.endswith(".lora_A.weight")]  # no effect while B is 0

    def _explain(
        self, session: Session, way: str, sent: Sent, expected: TrainerScores, scores: dict[str, list[float]]
    ) -> None:
        """Find out why engines differ by more than the tolerance: allow more from now on, or raise.

        Weights are wrong if their digests differ. They are also wrong if an engine's scores change when it gets the
        same version again as a checkpoint on disk: the golden path (not for the way `restart`). Otherwise trainer and
        engine compute differently. Then twice the difference is allowed from now on, if it is below `MOST_ALLOWED`
        times the effect of rounding. With adapters this limit grows slowly: the golden path shows no wrong scale.

        Raises:
            SyncError: see `prove`.
        """
        rounding, tolerance = self.rounding(expected), self.tolerance(expected)
        most = MOST_ALLOWED[self._args.precision]
        off = {url: d for url, d in self._differences(expected, scores).items() if not d.rms <= tolerance}
        for engine in [e for e in session.engines if e.url in off]:
            if wrong := self._wrong_tensors(session, engine, way, sent):
                gap = off[engine.url]
                how = f"differ from the trainer's by {gap.rms:.3g} (the largest by {gap.largest:.3g} nats)"
                raise self._wrong(session, engine, how, tolerance, wrong)
        for name, own in {"the trainer": expected.plain, **{e.name: scores[e.url] for e in session.engines}}.items():
            if not all(map(math.isfinite, own)):
                what = f"{name} computes log-probs that are not numbers with version {session.version}"
                raise SyncError(what, where=name, remedy="resume from the last checkpoint; lower the learning rate")
        if self._args.sync_tolerance is None and way != RESTART:
            session.transfer(golden(way))
            session.hand_over()
            for url, after in session.each(lambda engine: self.engine_scores(engine, session)).items():
                engine = next(e for e in session.engines if e.url == url)
                between = difference(scores[url], after).rms
                # With `keep`, responses run beside the probe: rounding changes each time, by as much as the gap.
                gap = self._differences(expected, {url: after})[url]
                allowed = max(LEAST_TOLERANCE, rounding.rms)
                allowed = max(allowed, gap.rms) if self._args.pause_mode == "keep" else allowed
                if not between <= allowed:
                    why = "Its previous adapter was different, or had another alpha." if way in OF_ADAPTERS else ""
                    raise self._wrong(session, engine, f"changed by {between:.3g} over the golden path", allowed, why)
        for engine in [e for e in session.engines if e.url in off]:
            gap = off[engine.url]
            if self._args.sync_tolerance is not None or not gap.rms <= self._most(way, rounding.rms):
                shown = way != RESTART and self._args.sync_tolerance is None
                raise self._otherwise(engine, way, gap, rounding, tolerance, shown=shown)
            if gap.rms <= most * rounding.rms:
                self._allowed = max(self._allowed, min(most, 2 * gap.rms / rounding.rms))
            else:
                self._least = max(self._least, min(2 * gap.rms, self._most(way, rounding.rms)))

    def _most(self, way: str, rounding: float) -> float:
        """Return the largest `rms` of an engine with right weights; a larger one is not rounding."""
        if self._quantized:
            return MOST_QUANTIZED
        if way in OF_ADAPTERS and self._sent is not None:  # a wrong scale shows at once
            return max(10 * LEAST_TOLERANCE, 2 * self._largest_ratio * rounding)
        return max(MOST_OF_CERTAIN[self._args.precision], MOST_ALLOWED[self._args.precision] * rounding)

    def _wrong(self, session: Session, engine: Engine, how: str, tolerance: float, tensors: str) -> SyncError:
        return SyncError(
            f"{engine.name} does not hold version {session.version}: its log-probs of the probe {how}, more than "
            f"{tolerance:.3g}. {tensors}".rstrip(),
            where=engine.url,
            remedy=f"resume from the last checkpoint; try --weight-sync {GOLDEN} if it happens again",
        )

    def _otherwise(
        self, engine: Engine, way: str, gap: Difference, rounding: Difference, tolerance: float, *, shown: bool
    ) -> SyncError:
        """Return the error of `engine`, whose scores of the probe differ by `gap` although its weights are right.

        Args:
            shown: digests or the golden path showed that its weights are right; else only that they were sent right.
        """
        holds = "its weights are the trainer's" if shown else "what was sent is what the trainer has"
        times = f"{gap.rms / rounding.rms:.0f} times what rounding explains" if rounding.rms else "without any rounding"
        what = (
            f"trainer and {engine.name} compute differently, although {holds}: on {self.probe.num_scores} tokens "
            f"their log-probs differ by {gap.mean:.3g} nats in the mean and {gap.largest:.3g} at most, {times} "
            f"(relative {gap.rms:.3g}, allowed {tolerance:.3g})"
        )
        if way in OF_ADAPTERS:
            what += ". Its base is not --hf-checkpoint, or it has another alpha, or its requests do not use the adapter"
        return SyncError(
            what,
            where=engine.url,
            remedy="a difference that stays with --precision fp32 is not rounding; compare versions of vLLM and "
            f"transformers; --sync-tolerance {1.5 * gap.rms:.2g} accepts it (the loss can correct it: --use-tis)",
        )

    def _both_score(self, session: Session, way: str) -> tuple[TrainerScores, dict[str, list[float]]]:
        """Return the scores of the trainer, and by URL of the engines: in parallel unless they take turns on GPUs."""
        with RunThreads(1) as pool:
            ours = pool.submit(self._trainer_looks, session, way)
            if session.turns.are_taken:
                ours.result()
                session.hand_over()
            scores = session.each(lambda engine: self.engine_scores(engine, session))
            return ours.result(), scores

    def _trainer_looks(self, session: Session, way: str) -> TrainerScores:
        """Return the trainer's scores. With single copy, first check each written bit in the engines' memory."""
        if way == SINGLE_COPY and (unwritten := session.actor.unwritten_weights(session.seconds_left())):
            raise SyncError(
                f"the memory of {', '.join(engine.name for engine in session.engines)} does not hold version "
                f"{session.version}: what was written of {', '.join(unwritten[:3])} is not what the trainer has",
                where=unwritten[0],
                remedy=f"resume from the last checkpoint; try --weight-sync {GOLDEN} if it happens again",
            )
        return self._trainer_scores(session)

    def _trainer_scores(self, session: Session) -> TrainerScores:
        with session.turns.borrowed(session, optimizer=False):
            scores = TrainerScores(*session.actor.probe_log_probs(self.probe.batch(), session.seconds_left()))
            if not all(map(math.isfinite, scores.plain)):
                session.actor.check_weights(session.seconds_left())  # its error is clearer
        return scores

    def engine_scores(self, engine: Engine, session: Session) -> list[float]:
        """Return the scores of the probe by each replica of an engine, one after the other."""
        out: list[float] = []
        for replica in range(engine.num_replicas) if engine.num_replicas > 1 else [None]:
            for tokens in (list(text.tokens) for text in self.probe.texts):
                try:
                    out += engine.prompt_log_probs(tokens, timeout=session.seconds_left(), replica=replica)
                except EngineRefusal as refusal:
                    if NOT_A_NUMBER not in refusal.what:
                        raise
                    out += [math.nan] * (len(tokens) - 1)
        return out

    def _wrongly_sent(self, session: Session, way: str, sent: Sent) -> list[str]:
        """Return the names of tensors that were not sent as the trainer has them now."""
        ours, told = self._trainer_digests(session, way), sent.digests
        return sorted(name for name in {*ours, *told} if ours.get(name) != told.get(name))

    def _trainer_digests(self, session: Session, way: str) -> dict[str, str]:
        with session.turns.borrowed(session, optimizer=False):
            return session.actor.weight_digests(way, session.seconds_left())

    def _wrong_tensors(self, session: Session, engine: Engine, way: str, sent: Sent) -> str:
        """Name the weights whose digests differ between trainer, sent tensors and engine."""
        if way not in OF_ADAPTERS and engine.capabilities.digests:
            ours = self._trainer_digests(session, way if sent.digest_kind == ENGINE_DIGESTS else GOLDEN)
            theirs = engine.weight_digests(timeout=session.seconds_left())
            if wrong := sorted(name for name, d in ours.items() if name in theirs and theirs[name] != d):
                return f"Tensors that differ from the trainer's: {', '.join(wrong[:8])}."
        wrong = self._wrongly_sent(session, way, sent)
        return f"Tensors that were sent wrongly: {', '.join(wrong[:8])}." if wrong else ""


def scores_alike(scores: dict[tuple[int, Text], list[float]], before: dict[tuple[int, Text], list[float]]) -> bool:
    """Return whether a replica gives all known texts the same scores as before."""
    known = {key: own == before[key] for key, own in scores.items() if key in before}
    return any(all(same for (other, _), same in known.items() if other == replica) for replica, _ in known)

"""A sync is a session: trainer -> engines, and then the proof that each engine holds the trainer's weights.

    close admission -> pause -> workers publish while engines load -> finish (version) -> reset caches -> resume
    -> prove -> open admission

One deadline covers all of it. No request to the policy is sent before the proof (`rollout/admission.py`). What becomes
of those under way says `--pause-mode`:

- abort: they end with what they have; who asked continues them under the new weights.
- wait: they end first.
- keep: the engine freezes them, and goes on with a cache that it makes anew. Their next tokens are made before the
  proof; if that fails the run ends, so that none of them is trained on.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from instep.controller.role import RoleTrainer
from instep.engines.launch import DYING_SECONDS, Engine, EngineRefusal
from instep.errors import EngineError, SyncError
from instep.processes import Process
from instep.rollout import admission
from instep.types import TokenBatch
from instep.weights.manifest import BucketManifest

T = TypeVar("T")
FP32_TOLERANCE = 1e-5  # times the largest |log-prob| of the probe: rounding grows with the logits
BF16_TOLERANCE = 2e-2  # until a comparison with the golden path shows that the arithmetic differs by more
GOLDEN_FACTOR = 2.0
ARITHMETIC_LIMIT = 0.5  # no rounding explains more: then the trainer exports something else than it trains
GOLDEN_TOLERANCE = 1e-3  # between an engine's scores of one version after two ways of loading it


@dataclass
class SyncResult:
    """What a session did: seconds, bytes, the largest |trainer - engine| log-prob difference of the probe.

    `first_diff` is that of the first scoring: larger than the other where the probe had to be scored again.
    """

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    probe_max_abs_diff: float
    first_diff: float
    tolerance: float

    def metrics(self) -> dict[str, float]:
        """`sync/*` of the rollout before it."""
        return {
            "sync/version": self.version,
            "sync/probe_max_abs_diff": self.probe_max_abs_diff,
            "sync/probe_tolerance": self.tolerance,
            "sync/bytes": self.num_bytes,
        }


class EngineGone(EngineError):
    """The last engine of a session has died."""


class WeightSync:
    """Owns the versions of the policy and the sessions that carry them to the engines.

    Args:
        args: `sync_way`, `pause_mode`, `sync_timeout`, `sync_tolerance`, `precision`.
        vocab_size: the probe's tokens are drawn below it.
    """

    def __init__(self, args: Any, actor: RoleTrainer, engines: Sequence[Engine], *, vocab_size: int, max_len: int):
        self._args, self._actor, self.engines = args, actor, list(engines)
        for engine in self.engines:
            engine.capabilities.check_pause(args.pause_mode)
        self._targets = self.engines  # of the session that runs
        self._began: dict[str, Process | None] = {}  # by URL, the process that it began with
        self.version = 0
        length = max(4, min(64, max_len - 1))
        generator = torch.Generator().manual_seed(0)
        self._probe = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for _ in range(2)]
        self._digests: dict[str, str] = {}  # of the weights last proven
        self._scores: dict[str, list[float]] = {}  # engine url -> probe scores under them
        self._tolerance: float = BF16_TOLERANCE if args.sync_tolerance is None else args.sync_tolerance
        self._directory = _scratch_directory()

    def close(self) -> None:
        admission.reset()
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, way: str | None = None) -> SyncResult:
        """One session with all engines, to a new version. One that dies in it is taken out of `engines`.

        Raises:
            SyncError: something does not add up; it names engine and tensor.
            EngineGone: no engine is left.
        """
        if not self.engines:
            raise EngineGone("no engine is left that could take weights", remedy="see the messages before this one")
        self.version += 1
        self._targets = self.engines
        admission.close()
        result = self._session(way, drain=True)
        spans = all(engine.capabilities.version_spans for engine in self.engines)
        admission.open_again(None if spans else str(self.version))
        return result

    def rejoin(self, engine: Engine) -> SyncResult:
        """Bring the present version to one engine that has been started anew; the others serve on.

        Raises:
            EngineGone: it has died again.
        """
        self._targets = [engine]
        result = self._session(None)
        if engine not in self.engines:
            self.engines.append(engine)
        return result

    def _session(self, way: str | None, drain: bool = False) -> SyncResult:
        started = time.monotonic()
        deadline = started + self._args.sync_timeout
        self._began = {engine.url: engine.process for engine in self._targets}
        if drain:
            self._drain(deadline)
        manifests = self._transfer(way or self._args.sync_way, deadline)
        first, largest = self._prove(manifests, deadline)
        tensors = [t for m in manifests for t in m.tensors]
        return SyncResult(
            version=self.version,
            seconds=time.monotonic() - started,
            num_bytes=sum(t.nbytes for t in tensors),
            num_tensors=len(tensors),
            probe_max_abs_diff=largest,
            first_diff=first,
            tolerance=self._tolerance,
        )

    def _drain(self, deadline: float) -> None:
        """Until no request of this run is under way; with `keep` they stay, and engines tell the versions."""
        while self._args.pause_mode != "keep" and admission.num_under_way():
            if self._args.pause_mode == "abort":  # again and again: one may have been on its way to an engine
                self._post("/abort_requests", deadline)
            time.sleep(admission.LOOK_SECONDS)
            self._actor.watch()
            _left(deadline)

    # ---- transfer ------------------------------------------------------------------------------------------------

    def _transfer(self, way: str, deadline: float) -> list[BucketManifest]:
        nonce = secrets.token_hex(8)
        try:
            self._post("/pause", deadline, mode=self._args.pause_mode)
            self._each(lambda e: e.start_update(str(self.version), nonce, timeout=_left(deadline)))
            manifests = self._send_shm(nonce, deadline) if way == "shm" else self._send_disk(deadline)
            names = [t.name for m in manifests for t in m.tensors]
            self._each(lambda e: e.finish_update(str(self.version), names, timeout=_left(deadline)))
            self._post("/reset_prefix_cache", deadline)
            self._post("/resume", deadline)
        except EngineRefusal as refusal:
            tensor = f" (tensor {refusal.tensor})" if refusal.tensor else ""
            raise SyncError(
                f"version {self.version} did not arrive: {refusal.what}{tensor}",
                where=refusal.where,
                remedy="the run stops before a token is made with wrong weights; resume from the last checkpoint, "
                "and try --sync-way disk if it happens again",
            ) from refusal
        return manifests

    def _send_shm(self, nonce: str, deadline: float) -> list[BucketManifest]:
        manifests: list[BucketManifest] = []
        loads: list[Future[None]] = []

        def load(manifest: BucketManifest) -> None:
            info = {"backend": "shm", "manifest": manifest.to_json()}
            try:
                self._each(lambda e: e.update(info, timeout=_left(deadline)))
            finally:
                Path(manifest.path).unlink(missing_ok=True)

        def on_event(manifest: BucketManifest) -> None:
            manifests.append(manifest)
            loads.append(pool.submit(load, manifest))

        pool = ThreadPoolExecutor(1)  # buckets in order
        try:
            request = ("shm", str(self.version), nonce, self._directory)
            self._actor.publish(*request, timeout=_left(deadline), on_event=on_event)
            for future in loads:
                future.result(timeout=_left(deadline))
        except TimeoutError:
            _left(0.0)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an engine that hangs does not hold up an ending
        return manifests

    def _send_disk(self, deadline: float) -> list[BucketManifest]:
        elsewhere = self._args.cluster == "ray" or self._args.rollout_external_engine_addrs
        shared = self._args.run_dir if elsewhere else None  # which all hosts see
        with tempfile.TemporaryDirectory(prefix="instep-golden-", dir=shared) as root:
            path = Path(root).absolute() / "hf"
            self._actor.workers.call("export_hf", path, timeout=_left(deadline))
            info = {"backend": "disk", "path": str(path)}
            self._each(lambda e: e.update(info, timeout=_left(deadline)))
        return []

    def _post(self, path: str, deadline: float, **query: Any) -> None:
        self._each(lambda e: e.post(path, timeout=_left(deadline), **query))

    def _each(self, call: Callable[[Engine], T]) -> dict[str, T]:
        """`call` on all engines of the session at once; the answers by URL. One that has died leaves the session."""
        for engine in [e for e in self._targets if self._gone(e, 0.0)]:
            self._leave(engine, None)
        targets = list(self._targets)
        with ThreadPoolExecutor(len(targets)) as pool:
            calls = {engine.url: pool.submit(call, engine) for engine in targets}
        answers: dict[str, T] = {}
        for engine in targets:
            try:
                answers[engine.url] = calls[engine.url].result()
            except EngineError as error:
                refused = isinstance(error, EngineRefusal) and (error.code < 500 or error.tensor is not None)
                dying = DYING_SECONDS if engine.capabilities.plugin else 1.0
                if not self._gone(engine, 0.0 if refused else dying):
                    raise
                self._leave(engine, error)
        return answers

    def _gone(self, engine: Engine, seconds: float) -> bool:
        """Whether the process that the session began with is no more, or will not be in `seconds`.

        Another one at the same address knows nothing of the session. Of an engine that somebody else runs its health
        tells, if `seconds` are given.
        """
        process = self._began[engine.url]
        if process is None:
            return seconds > 0 and not (engine.healthy(seconds) and engine.answers(seconds))
        return engine.process is not process or process.died_within(seconds)

    def _leave(self, engine: Engine, error: EngineError | None) -> None:
        self._targets.remove(engine)
        if not self._targets:
            what = error.what if error is not None else f"{engine.name} died"
            where = engine.process.describe() if engine.process is not None else engine.url
            raise EngineGone(f"{what}; no engine is left in this sync", where=where, remedy="see its log") from error

    # ---- proof ---------------------------------------------------------------------------------------------------

    def _prove(self, manifests: Sequence[BucketManifest], deadline: float) -> tuple[float, float]:
        """Returns the largest difference between the trainer's scores and an engine's, at first and at last.

        On a CPU, one first forward pass of a process in about eighty was off by 2e-5 of its log-probs, and exact from
        then on (torch 2.13, reason unknown). So what differs in fp32 is scored once more: wrong weights stay wrong.
        """
        expected = self._trainer_scores(deadline)
        digests = {t.name: t.digest for m in manifests for t in m.tensors} or self._trainer_digests(deadline)
        changed = [n for n, d in digests.items() if self._digests and self._digests.get(n) != d]
        scores = self._each(lambda engine: self._engine_scores(engine, deadline))
        if self._args.precision == "fp32" and self._args.sync_tolerance is None:
            self._tolerance = FP32_TOLERANCE * max(1.0, *map(abs, expected))
        gaps = {url: _largest_gap(expected, s) for url, s in scores.items()}
        first = max(gaps.values())
        if self._args.precision != "fp32" and not first <= self._tolerance:
            self._compare_with_golden(scores, expected, digests, deadline)
        elif not first <= self._tolerance:
            expected = self._trainer_scores(deadline)
            scores = self._each(lambda engine: self._engine_scores(engine, deadline))
            gaps = {url: _largest_gap(expected, s) for url, s in scores.items()}
        for engine in self._targets:
            gap = gaps[engine.url]
            if not gap <= self._tolerance:
                raise self._wrong(engine, f"differ from the trainer's by {gap:.3g}", self._tolerance, digests, deadline)
            if changed and _any_equal(scores[engine.url], self._scores.get(engine.url, []), len(expected)):
                raise SyncError(
                    f"{engine.name} still answers with old weights: {len(changed)} tensors changed "
                    f"({', '.join(changed[:3])}, ...), but not one of its probe scores did",
                    where=engine.url,
                    remedy="resume from the last checkpoint; try --sync-way disk if it happens again",
                )
        self._scores, self._digests = {**self._scores, **scores}, digests
        return first, max(gaps.values())

    def _compare_with_golden(
        self, scores: dict[str, list[float]], expected: list[float], digests: dict[str, str], deadline: float
    ) -> None:
        """In bf16 trainer and engine round differently, by how much depends on the weights. So when they differ by more
        than was seen so far, the same version goes to the engines once more through a checkpoint on disk: an engine
        must score just the same then, and what is left is arithmetic, which becomes the measure from here on.
        """
        self._transfer("disk", deadline)
        rescored = self._each(lambda engine: self._engine_scores(engine, deadline))
        for engine in self._targets:
            golden = rescored[engine.url]
            between = _largest_gap(golden, scores[engine.url])
            if not between <= GOLDEN_TOLERANCE:
                raise self._wrong(engine, f"changed by {between:.3g} over the golden path", 0.0, digests, deadline)
            gap = _largest_gap(expected, golden)
            if not gap <= ARITHMETIC_LIMIT:
                how = f"differ from the trainer's by {gap:.3g}, on the golden path as well"
                raise self._wrong(engine, how, ARITHMETIC_LIMIT, digests, deadline)
            self._tolerance = max(self._tolerance, GOLDEN_FACTOR * gap)

    def _wrong(self, engine: Engine, how: str, tolerance: float, digests: dict[str, str], deadline: float) -> SyncError:
        return SyncError(
            f"{engine.name} does not hold version {self.version}: its log-probs of the probe {how}, more than "
            f"{tolerance:.3g}. {self._name_culprits(engine, digests, deadline)}",
            where=engine.url,
            remedy="if both are right and the arithmetic differs, set --sync-tolerance; else resume from the last "
            "checkpoint",
        )

    def _trainer_digests(self, deadline: float) -> dict[str, str]:
        return self._actor.weight_digests(_left(deadline))

    def _trainer_scores(self, deadline: float) -> list[float]:
        lengths = torch.tensor([len(p) for p in self._probe])
        batch = TokenBatch(
            tokens=torch.tensor([t for p in self._probe for t in p]),
            total_lengths=lengths,
            response_lengths=lengths - 1,
            sample_columns={"temperature": torch.ones(len(self._probe))},
        )
        scores = self._actor.probe_log_probs(batch, _left(deadline))
        if not all(map(math.isfinite, scores)):
            self._actor.check_weights(_left(deadline))  # the better name for it
        return scores

    def _engine_scores(self, engine: Engine, deadline: float) -> list[float]:
        """Of each replica, one after the other."""
        out: list[float] = []
        replicas = range(engine.num_replicas) if engine.num_replicas > 1 else [None]
        for replica, tokens in itertools.product(replicas, self._probe):
            body = {
                "token_ids": tokens,
                "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
            }
            answer = engine.post("/inference/v1/generate", body, timeout=_left(deadline), replica=replica)
            entries = answer.get("prompt_logprobs")
            if not entries or len(entries) != len(tokens):
                raise EngineError(f"{engine.name} returned no prompt_logprobs for the probe", where=engine.url)
            out += [float(e[str(t)]["logprob"]) for e, t in zip(entries[1:], tokens[1:], strict=True)]
        return out

    def _name_culprits(self, engine: Engine, sent: dict[str, str], deadline: float) -> str:
        """Compare three views of every weight: the trainer's now, what was sent, what the engine holds."""
        ours = self._trainer_digests(deadline)
        if not engine.capabilities.digests:
            wrong = sorted(n for n, d in sent.items() if ours.get(n) != d)
            return f"Sent wrongly: {', '.join(wrong[:8]) or 'nothing'}; this engine cannot say what it holds."
        answer = engine.post("/weight_checker", {"action": "checksum"}, timeout=_left(deadline))
        theirs = answer.get("checksums", {})
        wrong_sent = sorted(n for n, d in sent.items() if ours.get(n) != d)
        wrong_held = sorted(n for n, d in ours.items() if n in theirs and theirs[n] != d)
        if wrong_held:
            return f"Tensors that differ from the trainer's: {', '.join(wrong_held[:8])}."
        if wrong_sent:
            return f"Tensors that were sent wrongly: {', '.join(wrong_sent[:8])}."
        return "Every tensor of the engine equals the trainer's byte for byte: the two compute differently."


def _scratch_directory() -> Path:
    """A folder in shared memory, named after this process; those of processes that were killed are removed."""
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for left in root.glob("instep-sync-*-*"):
        pid = left.name.split("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"instep-sync-{os.getpid()}-", dir=root))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise SyncError(
            "the weight sync did not end within its time",
            where="--sync-timeout",
            remedy="see the engines' logs for what they wait for; raise the bound if the model is large",
        )
    return left


def _largest_gap(expected: list[float], scores: list[float]) -> float:
    """max |a - b| over all replicas; infinite where one is not a number."""
    gaps = [abs(x - y) for x, y in zip(itertools.cycle(expected), scores, strict=False)]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def _any_equal(scores: list[float], before: list[float], num: int) -> bool:
    """Whether a replica answers as before; each has `num` scores."""
    return any(scores[i : i + num] == before[i : i + num] for i in range(0, len(scores), num))

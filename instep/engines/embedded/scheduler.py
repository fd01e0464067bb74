"""Continuous batching: one thread that owns model, cache and requests; everything else reaches it through `call`."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from instep.engines.embedded.model import Runner
from instep.engines.embedded.sampling import sample, uniforms
from instep.engines.embedded.weights import LiveWeights

PREFILL_TOKENS = 8192  # padded, per forward pass
GATHER_SECONDS = (0.002, 0.02)  # an idle engine waits for the rest of a burst: quiet time, at most


@dataclass(slots=True, frozen=True)
class Sampling:
    """Validated sampling parameters; `stop_ids` are the EOS ids (unless ignored) and the caller's."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True


@dataclass(slots=True, eq=False)
class Request:
    """One response in the making. `spans` are (version, start, end) over its tokens; `tops` (id, log-prob) lists."""

    id: str
    index: int
    prompt: list[int]
    params: Sampling
    seed: int
    end: int  # total length at which it stops
    future: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_scores: list[tuple[int, float, int, list[tuple[int, float]]]] | None = None  # id, log-prob, rank, top
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def close_span(self, version: str) -> None:
        start = self.spans[-1][2] if self.spans else 0
        if start < len(self.tokens):
            self.spans.append((version, start, len(self.tokens)))


LAST, POSITION, END, SEED, TOP_K = range(5)  # columns of `Engine.ints`
TEMPERATURE, TOP_P, MIN_P = range(3)  # of `Engine.floats`


class Engine:
    """Row i of the cache and of the columns belongs to `running[i]`. Methods but `call` run in the engine's thread."""

    def __init__(self, runner: Runner, weights: LiveWeights, tokenizer: Any, max_num_seqs: int):
        self.runner, self.weights, self.tokenizer, self.max_num_seqs = runner, weights, tokenizer, max_num_seqs
        self.vocab_size: int = runner.model.config.vocab_size
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.waiting: deque[Request] = deque()
        self.held: list[Request] = []  # arrived while paused
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.paused: str | None = None
        device = runner.device
        self.ints = torch.zeros(5, max_num_seqs, dtype=torch.int64, device=device)
        self.floats = torch.zeros(3, max_num_seqs, device=device)
        self.stops = torch.full((max_num_seqs, 1), -1, dtype=torch.int64, device=device)
        self.length = self.num_tops = 0
        self.truncated = self.held_open = False
        self.texts: list[Request] = []

    # -- the thread ---------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` in the engine's thread, between two steps."""
        future: Future[Any] = Future()
        self.inbox.put((function, future))
        return future

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while True:
                    self._receive()
                    if self._ready():
                        if self.waiting and len(self.running) < self.max_num_seqs:
                            self._prefill()
                        if self.running:
                            self._decode()
                    if self.finished:
                        self.loop.call_soon_threadsafe(_resolve, self.finished)
                        self.finished = []
        except BaseException:  # the process border: without its model thread the engine is dead, and says so by dying
            traceback.print_exc()
            os._exit(1)

    def _ready(self) -> bool:
        frozen = self.paused in ("abort", "keep") or self.weights.failure is not None
        return not frozen and bool(self.waiting or self.running)

    def _receive(self) -> None:
        idle = not self._ready() and not self.finished
        begin = time.monotonic()
        while True:
            try:
                function, future = self.inbox.get(idle, None if not self._ready() else GATHER_SECONDS[0])
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except Exception as error:  # a thread border: the caller gets it
                future.set_exception(error)
            # Answers of a call must not wait for the next one.
            idle = idle and self._ready() and time.monotonic() - begin < GATHER_SECONDS[1]

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        if self.weights.failure is not None:
            self._finish(requests, error=self.weights.failure)
        elif self.paused:
            self.held.extend(requests)
        else:
            self.waiting.extend(requests)

    def abort(self, ids: set[str] | None = None) -> int:
        """End the requests `ids` (None: all) with what they have; returns how many."""
        hit = [r for r in (*self.running, *self.waiting, *self.held) if ids is None or r.id in ids]
        self._withdraw(hit, reason="abort")
        return len(hit)

    def _withdraw(self, hit: Sequence[Request], reason: str | None = None, error: str | None = None) -> None:
        gone = set(hit)
        self._compact([i for i, r in enumerate(self.running) if r in gone])
        self.waiting = deque(r for r in self.waiting if r not in gone)
        self.held = [r for r in self.held if r not in gone]
        self._finish(hit, reason=reason, error=error)

    def pause(self, mode: str, clear_cache: bool) -> None:
        """abort: end all; keep: freeze, and forget keys and values unless `clear_cache` is False; wait: let them end."""
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "keep" and clear_cache:
            self._preempt()

    def drained(self) -> bool:
        return not self.running and not self.waiting

    def resume(self) -> None:
        self.weights.abandon()
        self.paused = None
        if self.weights.failure is not None:
            self._withdraw([*self.running, *self.waiting, *self.held], error=self.weights.failure)
        self.waiting.extend(self.held)
        self.held = []

    def reset_cache(self, reset_running: bool) -> bool:
        """Forget keys and values; no prefix outlives its request here, so only running requests stand in the way."""
        if self.running and not reset_running:
            return False
        self._preempt()
        return True

    def set_version(self, version: str) -> None:
        for request in (*self.running, *self.waiting, *self.held):
            request.close_span(self.weights.version)
        self.weights.version = version

    def finish_update(self, version: str | None) -> None:
        self.set_version(self.weights.finish(version))

    # -- steps --------------------------------------------------------------------------------------------------------

    def _preempt(self) -> None:
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._summarise()

    def _prefill(self) -> None:
        batch: list[Request] = []
        unique: dict[tuple[int, ...], int] = {}  # equal prompts of a group are computed once
        source, longest = [], 0
        while self.waiting and len(self.running) + len(batch) < self.max_num_seqs:
            sequence = (*self.waiting[0].prompt, *self.waiting[0].tokens)
            longest = max(longest, len(sequence))
            if batch and (len(unique) + (sequence not in unique)) * longest > PREFILL_TOKENS:
                break
            source.append(unique.setdefault(sequence, len(unique)))
            batch.append(self.waiting.popleft())
        wanting: dict[int, list[Request]] = {}
        for request, i in zip(batch, source, strict=True):
            if request.params.prompt_logprobs is not None and request.prompt_scores is None:
                wanting.setdefault(i, []).append(request)
        first = len(self.running)
        logits, prompts = self.runner.prefill(list(unique), source, first, list(wanting))
        for requests, prompt_logits in zip(wanting.values(), prompts, strict=True):
            for request in requests:
                request.prompt_scores = score(prompt_logits, request.prompt, request.params.prompt_logprobs or 0)
        self._join(batch)
        self._sample(logits, first)

    def _join(self, batch: list[Request]) -> None:
        rows = slice(len(self.running), len(self.running) + len(batch))
        ints = [
            [(r.tokens or r.prompt)[-1] for r in batch],
            [len(r.prompt) + len(r.tokens) - 1 for r in batch],
            [r.end for r in batch],
            [r.seed for r in batch],
            [r.params.top_k or self.vocab_size for r in batch],
        ]
        floats = [[r.params.temperature, r.params.top_p, r.params.min_p] for r in batch]
        self.ints[:, rows] = torch.tensor(ints, device=self.ints.device)
        self.floats[:, rows] = torch.tensor(floats, device=self.ints.device).T
        width = max(len(r.params.stop_ids) for r in batch) - self.stops.shape[1]
        if width > 0:
            self.stops = torch.nn.functional.pad(self.stops, (0, width), value=-1)
        stops = [[*r.params.stop_ids, *[-1] * (self.stops.shape[1] - len(r.params.stop_ids))] for r in batch]
        self.stops[rows] = torch.tensor(stops, device=self.ints.device)
        self.running.extend(batch)
        self._summarise()

    def _summarise(self) -> None:
        """What the steps need to know of all running requests; only when they change."""
        params = [r.params for r in self.running]
        self.length = max((len(r.prompt) + len(r.tokens) for r in self.running), default=0)
        self.truncated = any(p.top_k or p.top_p < 1 or p.min_p for p in params)
        self.num_tops = max((p.logprobs or 0 for p in params), default=0)
        self.texts = [r for r in self.running if r.params.stop]
        self.held_open = any(len(r.tokens) < r.params.min_tokens for r in self.running)

    def _decode(self) -> None:
        n = len(self.running)
        self._sample(self.runner.decode(self.ints[LAST, :n], self.ints[POSITION, :n], self.length), 0)

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """One token for each of `running[first:]` from `logits` `[batch, vocab]`; those that are done leave."""
        requests = self.running[first:] if first else self.running
        ints, floats = self.ints[:, first : len(self.running)], self.floats[:, first : len(self.running)]
        if self.held_open:
            for i, request in enumerate(requests):
                if len(request.tokens) < request.params.min_tokens and request.params.stop_ids:
                    logits[i, list(request.params.stop_ids)] = -torch.inf
        ints[POSITION] += 1
        truncation = (ints[TOP_K], floats[TOP_P], floats[MIN_P]) if self.truncated else None
        tokens, log_probs = sample(logits, floats[TEMPERATURE], uniforms(ints[SEED], ints[POSITION]), truncation)
        chosen = log_probs.gather(1, tokens[:, None])
        ranks = (log_probs > chosen).sum(1) + 1
        stopped = (self.stops[first : len(self.running)] == tokens[:, None]).any(1)
        ints[LAST] = tokens
        done = stopped | (ints[POSITION] + 1 >= ints[END])
        columns = torch.stack((tokens, ranks, done)).tolist()
        for request, token, rank, log_prob in zip(requests, *columns[:2], chosen[:, 0].tolist(), strict=True):
            request.tokens.append(token)
            request.ranks.append(rank)
            request.log_probs.append(log_prob)
        if self.num_tops:
            top = [x.tolist() for x in log_probs.topk(min(self.num_tops, self.vocab_size))]
            for request, values, ids in zip(requests, *top, strict=True):
                if request.params.logprobs:
                    request.tops.append(list(zip(ids, values, strict=True))[: request.params.logprobs])
        self.length += 1
        leaving = [first + i for i, flag in enumerate(columns[2]) if flag] if any(columns[2]) else []
        if self.texts:
            leaving = sorted({*leaving, *self._stopped_by_text(first)})
        if leaving:
            gone = [self.running[i] for i in leaving]
            self._compact(leaving)
            self._finish(gone)
        elif first or self.held_open:
            self._summarise()

    def _stopped_by_text(self, first: int) -> list[int]:
        hits = []
        for i, request in enumerate(self.running[first:], first):
            if request.params.stop and len(request.tokens) >= request.params.min_tokens:
                # The newest token completed the string, if anything did, and each token makes at least one byte.
                window = max(len(s.encode()) for s in request.params.stop) + 4
                text = self.tokenizer.decode(
                    request.tokens[-window:], skip_special_tokens=request.params.skip_special_tokens
                )
                request.stop_reason = next((s for s in request.params.stop if s in text), None)
                if request.stop_reason is not None:
                    hits.append(i)
        return hits

    def _compact(self, leaving: Sequence[int]) -> None:
        """Free the rows `leaving`; the last rows move into the gaps."""
        if not leaving:
            return
        gone, keep = set(leaving), len(self.running) - len(leaving)
        targets = [i for i in leaving if i < keep]
        sources = [i for i in range(keep, len(self.running)) if i not in gone]
        if sources:
            self.runner.cache.move(sources, targets)
            for columns in (self.ints, self.floats):
                columns[:, targets] = columns[:, sources]
            self.stops[targets] = self.stops[sources]
            for source, target in zip(sources, targets, strict=True):
                self.running[target] = self.running[source]
        del self.running[keep:]
        self._summarise()

    def _finish(self, requests: Sequence[Request], reason: str | None = None, error: str | None = None) -> None:
        for request in requests:
            request.close_span(self.weights.version)
            request.error, request.finish_reason = error, reason
            if error is None and reason is None:
                last = request.tokens[-1]
                if last in request.params.stop_ids:
                    request.finish_reason = "stop"
                    request.stop_reason = None if last in request.params.eos_ids else last
                else:
                    request.finish_reason = "length" if request.stop_reason is None else "stop"
            self.finished.append(request)


def score(logits: torch.Tensor, prompt: list[int], num_tops: int) -> list[tuple[int, float, int, list]]:
    """(id, log-prob, rank, top) of `prompt[1:]` from logits `[len(prompt) - 1, vocab]`, at temperature 1, float32."""
    out = []
    ids = torch.tensor(prompt[1:], device=logits.device)
    for part, tokens in zip(logits.split(1024), ids.split(1024), strict=True):  # bounds the float32 copy
        log_probs = part.float().log_softmax(-1)
        chosen = log_probs.gather(1, tokens[:, None])
        ranks = ((log_probs > chosen).sum(1) + 1).tolist()
        tops: list[list] = [[] for _ in ranks]
        if num_tops:
            values, indices = (x.tolist() for x in log_probs.topk(min(num_tops, log_probs.shape[1])))
            tops = [list(zip(i, v, strict=True)) for i, v in zip(indices, values, strict=True)]
        out.extend(zip(tokens.tolist(), chosen[:, 0].tolist(), ranks, tops, strict=True))
    return out


def _resolve(requests: list[Request]) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_result(None)

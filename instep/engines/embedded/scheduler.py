"""Continuous batching: one thread owns model, cache and requests; everything else reaches it through `call`."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from instep.engines.embedded.model import Runner
from instep.engines.embedded.protocol import BadRequestError, Request, Score, SessionError
from instep.engines.embedded.sampling import sample, uniforms
from instep.engines.embedded.weights import LiveWeights

PREFILL_TOKENS = 8192  # padded, per forward pass
QUIET_SECONDS, GATHER_SECONDS = 0.002, 0.02  # an idle engine waits for the rest of a burst: silence, at most
LAST, POSITION, END, SEED, TOP_K, STOPS = range(6)  # columns of `ints`; those from STOPS on are stop ids or -1


class Engine:
    """Row i of the cache, `ints` and `floats` belongs to `running[i]`. All but `call` runs in the engine's thread."""

    def __init__(self, runner: Runner, weights: LiveWeights, tokenizer: Any, max_num_seqs: int):
        self.runner, self.weights, self.tokenizer, self.max_num_seqs = runner, weights, tokenizer, max_num_seqs
        self.vocab_size: int = runner.model.config.vocab_size
        self.inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self.waiting: deque[Request] = deque()
        self.held: list[Request] = []  # arrived while paused
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.paused: str | None = None
        self.ints = torch.full((max_num_seqs, STOPS + 1), -1, device=runner.device)
        self.floats = torch.zeros(max_num_seqs, 3, device=runner.device)  # temperature, top_p, min_p
        self._summarise()

    def start(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:  # run in the engine's thread, between two steps
        future: Future[Any] = Future()
        self.inbox.put((function, future))
        return future

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                self._receive()
                if self._ready() and self.waiting and len(self.running) < self.max_num_seqs:
                    self._prefill()
                if self._ready() and self.running:
                    last, positions = self.ints[: len(self.running), [LAST, POSITION]].unbind(1)
                    self._sample(self.runner.decode(last, positions, self.length), 0)
                if self.finished:
                    self.loop.call_soon_threadsafe(_resolve, self.finished)
                    self.finished = []
        except BaseException:  # the process border: an engine without its model thread is dead, and must look dead
            traceback.print_exc()
            os._exit(1)

    def _ready(self) -> bool:
        frozen = self.paused in ("abort", "keep") or self.weights.failure
        return not frozen and bool(self.waiting or self.running)

    def _receive(self) -> None:
        idle, begin = not self._ready(), time.monotonic()
        while True:
            try:
                function, future = self.inbox.get(idle, QUIET_SECONDS if self._ready() else None)
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except Exception as error:  # a thread border: the caller gets it
                future.set_exception(error)
            idle = idle and self._ready() and time.monotonic() - begin < GATHER_SECONDS

    # -- calls

    def submit(self, requests: Sequence[Request]) -> None:
        if self.weights.failure:
            return self._finish(requests, error=self.weights.failure)
        (self.held if self.paused else self.waiting).extend(requests)

    def abort(self, ids: list[str] | None = None) -> int:
        """End the requests `ids` (None: all) with what they have; returns how many."""
        return self.withdraw([r for r in self._all() if ids is None or r.id in ids])

    def withdraw(self, requests: Sequence[Request], reason: str = "abort", error: str = "") -> int:
        gone = set(requests).intersection(self._all())
        self._compact([i for i, r in enumerate(self.running) if r in gone])
        self.waiting = deque(r for r in self.waiting if r not in gone)
        self.held = [r for r in self.held if r not in gone]
        self._finish(gone, reason, error)
        return len(gone)

    def pause(self, mode: str, clear_cache: bool) -> None:
        """abort: end all; keep: freeze, and forget keys and values if `clear_cache`; wait: let them end."""
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "keep" and clear_cache:
            self.reset_cache(True)

    def resume(self) -> None:
        self.weights.abandon()
        self.paused = None
        if self.weights.failure:
            self.withdraw(self._all(), error=self.weights.failure)
        self.waiting.extend(self.held)
        self.held = []

    def reset_cache(self, reset_running: bool) -> bool:
        """No prefix outlives its request here, so only running ones have keys and values; these are computed anew."""
        if self.running and not reset_running:
            return False
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        return True

    def set_version(self, version: Any) -> dict[str, str]:
        if not isinstance(version, str):
            raise BadRequestError(f"the version must be a string, got {version!r}")
        for request in self._all():
            self._close_span(request)
        self.weights.version = version
        return {"weight_version": version}

    def start_update(self, body: dict[str, Any]) -> None:
        if self.paused is None:
            raise SessionError("weights change under a pause only: POST /pause first")
        self.weights.start(body.get("version"), body.get("nonce"))

    def _all(self) -> list[Request]:
        return [*self.running, *self.waiting, *self.held]

    # -- steps

    def _prefill(self) -> None:
        batch: list[Request] = []
        unique: dict[tuple[int, ...], int] = {}  # equal prompts of a group are computed once
        source: list[int] = []
        wanting: dict[int, list[Request]] = {}
        longest, first = 0, len(self.running)
        while self.waiting and first + len(batch) < self.max_num_seqs:
            request = self.waiting[0]
            sequence = (*request.prompt, *request.tokens)
            longest = max(longest, len(sequence))
            if batch and (len(unique) + (sequence not in unique)) * longest > PREFILL_TOKENS:
                break
            source.append(unique.setdefault(sequence, len(unique)))
            batch.append(self.waiting.popleft())
            if request.params.prompt_logprobs is not None and request.prompt_scores is None:
                wanting.setdefault(source[-1], []).append(request)
        logits, prompts = self.runner.prefill(list(unique), source, first, list(wanting))
        for requests, prompt_logits in zip(wanting.values(), prompts, strict=True):
            ids = torch.tensor(requests[0].prompt[1:], dtype=torch.int64, device=prompt_logits.device)
            parts = list(zip(prompt_logits.split(1024), ids.split(1024), strict=True))  # bounds the float32 copy
            for request in requests:
                count = request.params.prompt_logprobs or 0
                scores = [_score(part.float().log_softmax(-1), tokens, count) for part, tokens in parts]
                request.prompt_scores = [score for part in scores for score in part]
        self._join(batch)
        self._sample(logits, first)

    def _join(self, batch: list[Request]) -> None:
        rows, device = slice(len(self.running), len(self.running) + len(batch)), self.runner.device
        width = max(self.ints.shape[1] - STOPS, *(len(r.params.stop_ids) for r in batch))
        self.ints = torch.nn.functional.pad(self.ints, (0, STOPS + width - self.ints.shape[1]), value=-1)
        ints = []
        for r in batch:
            stops = r.params.stop_ids + (-1,) * (width - len(r.params.stop_ids))
            ints.append(
                (0, len(r.prompt) + len(r.tokens) - 1, r.end, r.seed, r.params.top_k or self.vocab_size, *stops)
            )
        floats = [(r.params.temperature, r.params.top_p, r.params.min_p) for r in batch]
        self.ints[rows] = torch.tensor(ints, device=device)
        self.floats[rows] = torch.tensor(floats, device=device)
        self.running.extend(batch)
        self._summarise()

    def _summarise(self) -> None:
        """What a step must know of all running requests; renewed when they change."""
        params = [r.params for r in self.running]
        self.length = max((len(r.prompt) + len(r.tokens) for r in self.running), default=0)
        self.truncated = any(p.top_k or p.top_p < 1 or p.min_p for p in params)
        self.num_tops = max((p.logprobs or 0 for p in params), default=0)
        self.held_open = any(len(r.tokens) < r.params.min_tokens for r in self.running)

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """One token for each of `running[first:]` from `logits` `[batch, vocab]`; those that are done leave."""
        requests, rows = self.running[first:], slice(first, len(self.running))
        if self.held_open:
            for row, request in zip(logits, requests, strict=True):
                if len(request.tokens) < request.params.min_tokens and request.params.stop_ids:
                    row[list(request.params.stop_ids)] = -torch.inf
        ints = self.ints[rows].T
        temperature, top_p, min_p = self.floats[rows].unbind(1)
        ints[POSITION] += 1
        truncation = (ints[TOP_K], top_p, min_p) if self.truncated else None
        tokens, log_probs = sample(logits, temperature, uniforms(ints[SEED], ints[POSITION]), truncation)
        ints[LAST] = tokens
        done = (ints[STOPS:] == tokens).any(0) | (ints[POSITION] + 1 >= ints[END])
        for request, score in zip(requests, _score(log_probs, tokens, self.num_tops), strict=True):
            request.tokens.append(score[0])
            request.scores.append(score)
        self.length += 1
        ends = zip(requests, done.tolist(), strict=True)
        leaving = [i for i, (r, end) in enumerate(ends, first) if (r.params.stop and self._stopped_by_text(r)) or end]
        if leaving or first or self.held_open:
            gone = [self.running[i] for i in leaving]
            self._compact(leaving)
            self._finish(gone)

    def _stopped_by_text(self, request: Request) -> bool:
        if len(request.tokens) < request.params.min_tokens:
            return False
        # The newest token completes the string, if anything does, and each token makes at least one byte.
        tail = request.tokens[-max(len(s.encode()) for s in request.params.stop) - 4 :]
        text = self.tokenizer.decode(tail, skip_special_tokens=request.params.skip_special_tokens)
        request.stop_reason = next((s for s in request.params.stop if s in text), None)
        return request.stop_reason is not None

    def _compact(self, leaving: Sequence[int]) -> None:
        """Free the rows `leaving` (ascending); the last rows move into the gaps."""
        keep = len(self.running) - len(leaving)
        targets = [i for i in leaving if i < keep]
        sources = sorted(set(range(keep, len(self.running))).difference(leaving))
        for source, target in zip(sources, targets, strict=True):
            for rows in (self.ints, self.floats, self.runner.rows):
                rows[target] = rows[source]
            self.running[target] = self.running[source]
        del self.running[keep:]
        self._summarise()

    def _close_span(self, request: Request) -> None:
        start = request.spans[-1][2] if request.spans else 0
        if start < len(request.tokens):
            request.spans.append((self.weights.version, start, len(request.tokens)))

    def _finish(self, requests: Iterable[Request], reason: str | None = None, error: str = "") -> None:
        for request in requests:
            self._close_span(request)
            last, params = request.tokens[-1:], request.params
            stopped = request.stop_reason is not None or bool({*last} & {*params.stop_ids})
            if stopped and not reason and last[0] in params.stop_ids:
                request.stop_reason = None if last[0] in params.eos_ids else last[0]
            request.finish_reason, request.error = reason or ("stop" if stopped else "length"), error
            self.finished.append(request)


def _score(log_probs: torch.Tensor, tokens: torch.Tensor, count: int) -> list[Score]:
    """The scores of `tokens` `[batch]` under log-probs `[batch, vocab]`, with the `count` likeliest of each row."""
    chosen = log_probs.gather(1, tokens[:, None])
    ranks = (log_probs > chosen).sum(1) + 1
    # One transfer: float64 holds tokens, ranks and log-probs exactly.
    rows = torch.stack((tokens.double(), chosen[:, 0].double(), ranks.double())).tolist()
    tops: Any = [()] * len(tokens)
    if count:
        values, ids = log_probs.topk(min(count, log_probs.shape[1]))
        tops = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [(int(t), p, int(k), top) for t, p, k, top in zip(*rows, tops, strict=True)]


def _resolve(requests: list[Request]) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_result(None)

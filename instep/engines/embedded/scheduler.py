"""Continuous batching in one thread, which owns model, cache and requests. A pipe connects it with the HTTP process."""

import inspect
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from instep.data.template import apply_template
from instep.engines.embedded.model import Runner
from instep.engines.embedded.protocol import HttpError, Progress, Request
from instep.engines.embedded.sampling import distribution, sample, uniforms
from instep.engines.embedded.weights import FAILED, LiveWeights
from instep.engines.stops import find_stop
from instep.system import spans
from instep.system.calls import CallQueue, Part
from instep.weights.parking import Parking, give_back
from instep.weights.way import OF_ADAPTERS

TAGS = ("weights", "kv_cache")
ASLEEP = "the engine sleeps while the trainer works on its memory"


class Scheduler:
    """Schedules requests: `running[i]` uses row i of the cache. Calls come through `pipe` between two steps."""

    def __init__(self, runner: Runner, weights: LiveWeights, tokenizer: Any, pipe: Connection):
        self.runner, self.weights, self.tokenizer = runner, weights, tokenizer
        self.vocab_size: int = runner.model.config.vocab_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.paused: str | None = None
        self.num_generated = 0  # tokens since the start
        self.sleeper = Sleep(runner)
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.max_characters = runner.max_length * max(16, longest)  # a longer text has too many tokens
        named = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.not_of_template = named - {"tools", "documents", "add_generation_prompt", "kwargs"}
        self.queue = CallQueue(pipe, self.calls(), HttpError, partial(HttpError, "InternalServerError"))

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return the control routes, whose functions get the JSON body, and the other calls of the HTTP process."""
        weights = self.weights
        return {
            "GET /health": lambda body: {},
            "GET /is_paused": lambda body: {"is_paused": self.paused is not None},
            "GET /is_sleeping": lambda body: {"is_sleeping": bool(self.sleeper.asleep)},
            "GET /num_generated": lambda body: {"num_generated": self.num_generated},
            "GET /weight_info": lambda body: {"weight_version": weights.version},
            "POST /resume": lambda body: self.resume(),
            "POST /abort_requests": lambda body: {"aborted": self.abort(body.get("request_ids"))},
            "POST /reset_prefix_cache": lambda body: {"success": not self.running},  # no prefix outlives its request
            "POST /weight_checker": lambda body: {"checksums": weights.digests()},
            "POST /start_weight_update": self.start_update,
            "POST /update_weights": self.update_weights,
            "POST /update_weight_version": lambda body: self.set_version(body.get("new_version")),
            "POST /start_profile": lambda body: spans.start(""),
            "POST /stop_profile": lambda body: {"spans": spans.stop()},
            "POST /finish_weight_update": self.finish_update,
            "num_running": lambda: len(self.running),
            "submit": self.submit,
            "abort": self.abort,
            "pause": self.pause,
            "sleep": self.sleep,
            "wake": self.wake,
            "expire": self.expire,
            "encode": self.encode,
            "decode": lambda ids, skip: self.tokenizer.decode(ids, skip_special_tokens=skip),
            "chat": self.chat,
        }

    @torch.inference_mode()
    def run(self) -> None:  # for ever
        while True:
            self.queue.work(idle=lambda: not self._ready())
            if self.waiting and not self.paused and self._ready() and len(self.running) < self.runner.max_rows:
                self._attempt(len(self.running), self._prefill)
            if self.running and self._ready():
                self._attempt(0, self._decode)

    def _attempt(self, first: int, step: Callable[[], None]) -> None:
        """Do a step for `running[first:]`. If it fails (mostly for memory), only these requests fail."""
        try:
            with spans.span(step.__name__.strip("_"), facts=lambda: {"running": len(self.running)}):
                step()
        except torch.AcceleratorError:
            raise  # nothing can be computed any more: this process ends and is restarted
        except Exception as error:  # noqa: BLE001 - the clients get it
            traceback.print_exc()
            failure = HttpError("InternalServerError", f"the engine failed: {type(error).__name__}: {error}")
            self.queue.answer((r.number, failure) for r in self.running[first:])
            del self.running[first:]

    def _decode(self) -> None:
        rows = [(r.tokens[-1], len(r.prompt) + len(r.tokens)) for r in self.running]
        self._step(0, partial(self.runner.decode, *zip(*rows, strict=True)))

    def _ready(self) -> bool:
        work = (self.running and self.paused != "keep") or (self.waiting and not self.paused)
        return bool(work) and not self.weights.failure

    def submit(self, requests: Sequence[Request]) -> None:
        if self.weights.failure or self.sleeper.asleep:
            return self._finish(requests, "error")
        if (now := spans.now()) is not None:
            for request in requests:
                request.arrived = now
        self.waiting.extend(requests)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        if len(text) > self.max_characters:
            what = f"the prompt has {len(text)} characters, more than {self.runner.max_length} tokens can have"
            raise HttpError("BadRequestError", what)
        return self.tokenizer.encode(text, add_special_tokens=add_special)  # type: ignore[no-any-return]

    def chat(self, messages: list[Any], given: dict[str, Any], add_special: bool = False) -> list[int]:
        """Return the prompt of a conversation. The template is the model's: a client's could compute for ever."""
        if refused := sorted(given.keys() & self.not_of_template):
            raise HttpError("BadRequestError", f"chat_template_kwargs: requests cannot set {refused}")
        try:
            text = apply_template(self.tokenizer, messages, **{"add_generation_prompt": True, **given}, tokenize=False)
        except Exception as error:  # no template, or any error of a template
            raise HttpError("BadRequestError", f"the chat template failed: {getattr(error, 'what', error)}") from error
        return self.encode(text, add_special)

    def abort(self, which: Any = None, reason: str = "abort") -> int:
        """End the requests with these numbers or ids (None: all) with the tokens that they have. Return how many."""
        if not isinstance(which, (set, list, type(None))):
            raise HttpError("BadRequestError", f"request_ids must be a list of strings, got {which!r}")
        gone = {r for r in (*self.running, *self.waiting) if which is None or r.number in which or r.id in which}
        self._compact([i for i, r in enumerate(self.running) if r in gone])
        self.waiting = deque(r for r in self.waiting if r not in gone)
        self._finish(gone, reason)
        return len(gone)

    def pause(self, mode: str, clear_cache: bool) -> None:
        """Pause: abort ends all requests, keep freezes them, wait lets running requests end.

        With `clear_cache`, keep refills the cache later.
        """
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "keep" and clear_cache:
            self.waiting.extendleft(reversed(self.running))
            self.running.clear()

    def sleep(self, level: int) -> None:
        """Free the memory of weights and cache; all requests end."""
        self.pause("abort", True)
        self.sleeper.sleep(level)

    def wake(self, tags: list[str]) -> None:
        """Allocate the memory of `tags` again. After the last one the engine generates."""
        self.sleeper.wake(tags)
        if not self.sleeper.asleep:
            self.paused = None

    def resume(self) -> None:
        self.weights.abandon()
        self.paused = None
        if self.weights.failure:
            self.abort(None, "error")

    def expire(self, in_place: bool) -> None:
        """Resume without the trainer. Weights that it has written in place may be of two versions."""
        if in_place:
            self.weights.failure = f"{FAILED}: the trainer that wrote into these weights stood still, or died"
        self.resume()

    def set_version(self, version: Any) -> dict[str, str]:
        if not isinstance(version, str):
            raise HttpError("BadRequestError", f"the version must be a string, got {version!r}")
        for request in (*self.running, *self.waiting):
            self._close_span(request)
        self.weights.version = version
        return {"weight_version": version}

    def start_update(self, body: dict[str, Any]) -> None:
        self.sleeper.check_weights()
        self.weights.start(body.get("version"), body.get("nonce"))

    def update_weights(self, body: dict[str, Any]) -> dict[str, int]:
        info = body.get("update_info")
        # Adapters are loaded by `finish_update`, and "memory" is compared alone.
        if not (isinstance(info, dict) and info.get("backend") in (*OF_ADAPTERS, "memory")):
            self._check_paused()
        return {"num_tensors": self.weights.update(info)}

    def finish_update(self, body: dict[str, Any]) -> dict[str, str]:
        if self.weights.adapter.received:
            self._check_paused()
        return self.set_version(self.weights.finish(body.get("weight_version")))

    def _check_paused(self) -> None:
        if self.paused is None:
            raise HttpError("SessionError", "weights change only while the engine is paused: POST /pause first")

    def _prefill(self) -> None:
        unique: dict[tuple[int, ...], int] = {}  # equal prompts of a group are computed once
        source: list[int] = []
        longest, first = 0, len(self.running)
        while self.waiting and len(self.running) < self.runner.max_rows:
            request = self.waiting[0]
            sequence = (*request.prompt, *request.tokens)
            longest = max(longest, len(sequence))
            if source and sequence not in unique and (len(unique) + 1) * longest > self.runner.prefill_tokens:
                break
            source.append(unique.setdefault(sequence, len(unique)))
            self.running.append(self.waiting.popleft())
            if request.prompt_logprobs is not None and request.prompt_scores is None:
                request.prompt_scores = self.runner.score(request.prompt, request.prompt_logprobs)
        self._step(first, partial(self.runner.prefill, list(unique), source, first))

    def _step(self, first: int, forward: Callable[[], torch.Tensor]) -> None:
        """Sample a token for each of `running[first:]` from the logits of `forward`. Finished requests leave."""
        requests, device = self.running[first:], self.runner.device
        # It is on the device before the forward pass: a later copy would wait for that pass.
        positions = [len(r.prompt) + len(r.tokens) for r in requests]
        numbers = torch.tensor([[r.seed for r in requests], positions], device=device)
        limits = [[r.temperature for r in requests], [r.top_p for r in requests]]
        temperature, top_p = torch.tensor(limits, dtype=torch.float32, device=device)
        truncation = None
        if any(r.top_k or r.top_p < 1 for r in requests):
            truncation = torch.tensor([r.top_k or self.vocab_size for r in requests], device=device), top_p
        logits = forward()
        for request, rows in zip(requests, self.runner.routes, strict=False):  # empty unless they are recorded
            request.add_routes(rows)
        for i, request in enumerate(requests):
            if len(request.tokens) < request.min_tokens:
                logits[i, list(request.stop_ids | request.eos_ids)] = -torch.inf
        tokens, log_probs = sample(logits, temperature, uniforms(*numbers), truncation)
        rows = torch.stack((tokens.double(), log_probs.double()))  # one transfer; float64 holds both exactly
        for request, token, score in zip(requests, *rows.tolist(), strict=True):
            request.tokens.append(int(token))
            request.log_probs.append(score)
        self.num_generated += len(requests)
        if most := max(r.logprobs or 0 for r in requests):
            best, which = distribution(logits, temperature, truncation).topk(min(most, self.vocab_size))
            for request, ids, scores in zip(requests, which.tolist(), best.tolist(), strict=True):
                if request.logprobs:  # as in vLLM's route: the token itself, then the likeliest ones, up to this number
                    likely = {request.tokens[-1]: request.log_probs[-1]} | dict(zip(ids, scores, strict=True))
                    request.top.append(list(likely.items())[: request.logprobs])
        leaving = [i for i, request in enumerate(requests, first) if self._ends(request)]
        self._finish([self.running[i] for i in leaving])
        self._compact(leaving)
        self.queue.answer((r.number, Part(self._progress(r))) for r in self.running[first:] if r.stream)

    def _ends(self, request: Request) -> bool:
        token = request.tokens[-1]
        if token in request.stop_ids and token not in request.eos_ids:
            request.stop_reason = token
        elif request.stop and len(request.tokens) > request.min_tokens:
            # Each token makes at least one byte.
            tail = request.tokens[-max(len(s.encode()) for s in request.stop) - 4 :]
            text, before_last = self._texts(request, tail, tail[:-1])
            if (found := find_stop(text, before_last, request.stop)) is not None:
                request.stop_reason, request.num_cut = found[1], len(text) - found[0]
        stopped = request.stop_reason is not None or token in request.eos_ids
        request.finish_reason = "stop" if stopped else "length"
        return stopped or len(request.tokens) >= request.max_tokens

    def _texts(self, request: Request, *parts: list[int]) -> list[str]:
        return [self.tokenizer.decode(part, skip_special_tokens=request.skip_special_tokens) for part in parts]

    def _progress(self, request: Request) -> Progress:
        """Return what a stream has not sent yet. Text is decoded with the text before it, because of its spaces."""
        before, text = self._texts(request, *(request.tokens[request.context : end] for end in (request.shown, None)))
        new = ""
        if len(text) > len(before) and not text.endswith("\ufffd"):
            new, request.context, request.shown = text[len(before) :], request.shown, len(request.tokens)
        start, request.reported = request.reported, len(request.tokens)
        tokens = request.tokens[start:]
        texts = [self.tokenizer.decode([token]) for token in tokens] if request.logprobs is not None else []
        return Progress(new, tokens, request.log_probs[start:], texts)

    def _compact(self, leaving: Sequence[int]) -> None:
        """Free the rows `leaving` (ascending). The last rows move into the gaps."""
        keep = len(self.running) - len(leaving)
        sources = sorted(set(range(keep, len(self.running))).difference(leaving))
        for part in (*self.runner.data, *self.runner.states):
            part[:, leaving[: len(sources)]] = part[:, sources]
        for source, target in zip(sources, leaving, strict=False):
            self.running[target] = self.running[source]
        del self.running[keep:]

    def _close_span(self, request: Request) -> None:
        if (start := request.spans[-1][2] if request.spans else 0) < len(request.tokens):
            request.spans.append((self.weights.version, start, len(request.tokens)))

    def _finish(self, requests: Collection[Request], reason: str | None = None) -> None:
        """Answer `requests`. With the reason "error" they get the failure of the weights."""
        for request in requests:
            self._close_span(request)
            request.finish_reason = reason or request.finish_reason
            if request.arrived:
                facts = {"id": request.id, "prompt_tokens": len(request.prompt), "tokens": len(request.tokens)}
                spans.add("request", request.number, request.arrived, facts)
            if request.wants_text:
                request.text = self._texts(request, request.tokens)[0][: -request.num_cut or None]
                if request.logprobs is not None:
                    request.token_texts = [self.tokenizer.decode([token]) for token in request.tokens]
        error = HttpError("Unavailable", self.weights.failure or ASLEEP) if reason == "error" else None
        self.queue.answer((r.number, error or r) for r in requests)


class Sleep:
    """The sleep of a runner's model and cache. Level 1 keeps the weights on the host, level 2 drops them."""

    def __init__(self, runner: Runner):
        self._runner, model = runner, runner.model
        self._levels = {
            1: Parking(runner.device, lambda: [*model.parameters(), *model.buffers()]),
            2: Parking(runner.device, model.buffers, model.parameters),
        }
        self.asleep: frozenset[str] = frozenset()

    def sleep(self, level: int) -> None:
        """Free everything; no request may be running."""
        if self.asleep:
            return
        for tensor in (*self._runner.model.parameters(), *self._runner.model.buffers()):
            if not tensor.untyped_storage().resizable():  # it is in the file that it was read from
                tensor.data = tensor.data.clone()
        self._levels[level].free()
        self._runner.empty()
        give_back(self._runner.device)
        self.asleep = frozenset(TAGS)

    def wake(self, tags: list[str]) -> None:
        """Allocate the memory of `tags` again."""
        if unknown := set(tags) - set(TAGS):
            raise HttpError("BadRequestError", f"tags={sorted(unknown)}: {' and '.join(TAGS)}")
        if "weights" in self.asleep & set(tags):
            for parking in self._levels.values():
                parking.bring()
                parking.ready()
        self.asleep -= set(tags)

    def check_weights(self) -> None:
        if "weights" in self.asleep:
            raise HttpError("SessionError", f"{ASLEEP}: POST /wake_up?tags=weights first")

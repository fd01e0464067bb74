"""A frozen model on an engine (a teacher or the reference): it returns its log-probs of the policy's samples."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import torch
from torch import Tensor

from instep.arguments.settings import HookSettings, Settings
from instep.engines.wire import VLLM_WIRE, WireFormat
from instep.errors import EngineError, InstepError, RolloutError
from instep.rollout import runtime
from instep.rollout.client import get_model_url, wire_of
from instep.rollout.http import get, post
from instep.types import TokenBatch

CHECK_SECONDS = 60.0
CONCURRENCY = 32  # requests to the model at a time
NUM_PROBED = 64  # entries of the vocabulary that both tokenizers must agree on


class ServedScorer:
    """A client of a frozen model that an engine serves through vLLM's routes, alone or behind a router.

    Args:
        name: the model's name in errors, such as "the teacher".
        where: the flag that names it, for errors.
        url: `http://HOST:PORT`.
        timeout: seconds for the samples of a rollout.
        instead: the remedy for samples whose log-probs a served model cannot give.
        wire: the wire format of its log-probs.
    """

    def __init__(self, name: str, where: str, url: str, timeout: float, instead: str, wire: WireFormat = VLLM_WIRE):
        self.name, self.where, self.url, self.timeout, self.instead = name, where, url, timeout, instead
        self.wire = wire

    def check(self, tokenizer: Any, engine_url: str | None = None) -> int:
        """Check that the model answers and has the policy's vocabulary: a text of many tokens must have the same ids.

        Args:
            engine_url: one of the engines behind a router, because a router changes text requests.

        Returns:
            The largest number of prompt and response tokens that it can score.

        Raises:
            EngineError: it does not answer, or has another vocabulary.
        """
        base = engine_url or self.url
        url = f"{base}/v1/completions"
        text = _spread_text(tokenizer)
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        request = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
        answer = self._run(post(url, request, timeout=CHECK_SECONDS), CHECK_SECONDS)
        try:
            theirs = [int(i) for i in answer["choices"][0]["prompt_token_ids"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            remedy = "it needs vLLM's /v1/completions with return_token_ids, and /inference/v1/generate"
            raise self._error(f"{self.name} does not say how it tokenizes", remedy) from error
        if ours not in (theirs, theirs[1:]):  # the model may put a begin-of-text token first
            differs = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
            what = f"{self.name} has another vocabulary: {text!r:.60} is {theirs[: differs + 1][-3:]}..., not "
            remedy = "log-probs are compared token by token: use a model with the tokenizer of the trained model"
            raise self._error(f"{what}{ours[: differs + 1][-3:]}... at token {differs}", remedy)
        models = self._run(get(f"{base}/v1/models", timeout=CHECK_SECONDS), CHECK_SECONDS)
        try:
            return int(models["data"][0]["max_model_len"]) - 1  # one token has to follow
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"{self.name} does not say its length: {error!r}"
            raise self._error(what, "it needs vLLM's /v1/models") from error

    def log_probs(self, batch: TokenBatch) -> Tensor:
        """Return log-probs of the responses, float32 `[num_response_tokens]`, at temperature 1.

        Samples without a trained token have 0.

        Raises:
            EngineError: the model does not answer, or not with the log-probs of these tokens.
            RolloutError: a sample has another temperature, or the time is over.
        """
        if bool((batch.sample_columns["temperature"] != 1).any()):
            what = f"samples of another temperature than 1: {self.name} gives no log-probs for them if it is served"
            raise RolloutError(what, where=self.where, remedy=f"sample at temperature 1, or {self.instead}")
        lengths = batch.response_lengths.tolist()
        samples = zip(
            batch.tokens.split(batch.total_lengths.tolist()),
            lengths,
            batch.token_columns["loss_mask"].split(lengths),
            strict=True,
        )
        rows = self._run(self._score_all([(t.tolist(), n, bool(m.any())) for t, n, m in samples]), self.timeout)
        return torch.tensor([x for row in rows for x in row], dtype=torch.float32)

    async def _score_all(self, samples: list[tuple[list[int], int, bool]]) -> list[list[float]]:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def score(tokens: list[int], length: int, trained: bool) -> list[float]:
            async with slots:
                return await self._score(tokens, length) if trained else [0.0] * length

        return await runtime.gather([score(*sample) for sample in samples])

    async def _score(self, tokens: list[int], length: int) -> list[float]:
        """Return the log-probs of the last `length` tokens."""
        wire = self.wire
        answer = await post(self.url + wire.generate_route, wire.scoring_request(tokens), timeout=self.timeout)
        out = wire.prompt_log_probs(answer, tokens, self.url)[-length:]
        if not all(map(math.isfinite, out)):
            what = "a log-prob of a sample's tokens that is not finite"
            raise EngineError(what, remedy="see its log", where=self.where)
        return out

    def _run(self, coro: Any, timeout: float) -> Any:
        try:
            return runtime.run(coro, timeout)
        except InstepError as error:
            raise self._error(f"{self.name} gave no answer: {error.what}", error.remedy) from error

    def _error(self, what: str, remedy: str) -> EngineError:
        return EngineError(what, where=self.where, remedy=remedy)


def served_reference(args: Settings, hook_args: HookSettings) -> ServedScorer | None:
    """Return the client of `--ref-served-model`, whose engines must run; None without the flag."""
    if args.ref_served_model is None:
        return None
    url = get_model_url(hook_args, args.ref_served_model, "")
    where = f"--ref-served-model {args.ref_served_model}, at {url}"
    return ServedScorer("the reference", where, url, args.rollout_timeout, "leave the flag out", wire_of(hook_args))


def _spread_text(tokenizer: Any) -> str:
    """Return a text of whole characters, with tokens from the whole vocabulary."""
    step = max(1, len(tokenizer) // NUM_PROBED)
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(0, len(tokenizer), step)]
    return "".join(text for text in texts[:NUM_PROBED] if "\ufffd" not in text)

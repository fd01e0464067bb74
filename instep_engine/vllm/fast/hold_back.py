"""The tokens of a fast request leave the engine core in bunches (`scheduler.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from instep_engine.vllm.fast import BUNCH, is_fast
from instep_engine.vllm.fast.versions import UNKNOWN


class Held:
    """The unsent results of a fast request; the tokens themselves are in vLLM's request.

    Attributes:
        offset: spreads the sending steps of the requests; num_sent: the number of sent tokens.
        log_probs: of the unsent tokens; routes: the unsent routed experts, in pieces.
        stops: the tokens that may end it; max_tokens: the length from which on it may end by its length.
    """

    __slots__ = ("request", "offset", "num_sent", "log_probs", "routes", "stops", "max_tokens")

    def __init__(self, request: Request, offset: int):
        params = request.sampling_params
        assert params is not None
        self.request, self.offset, self.num_sent = request, offset, 0
        self.log_probs: list[float] = []
        self.routes: list[np.ndarray] = []
        self.stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        self.max_tokens = 0 if params.repetition_detection is not None else request.max_tokens

    def is_due(self, count: int) -> bool:
        """Return whether a request with `count` tokens sends them now."""
        return (count + self.offset) % BUNCH == 0

    def fill(self, output: EngineCoreOutput, mark: int) -> EngineCoreOutput:
        """Put all unsent results into `output`. No request needs the ranks, so they hold `mark` instead."""
        tokens = self.request.output_token_ids[self.num_sent :]
        self.num_sent += len(tokens)
        output.new_token_ids = tokens
        ids = np.array(tokens, np.int32).reshape(-1, 1)
        log_probs = np.array(self.log_probs, np.float32).reshape(-1, 1)
        output.new_logprobs = LogprobsLists(ids, log_probs, np.full(len(tokens), mark, np.int32))
        if self.routes:
            output.routed_experts = np.concatenate(self.routes)
        self.log_probs, self.routes = [], []
        return output


class HoldBack:
    """A mixin in front of a scheduler of vLLM. It only changes when results leave the engine core.

    Attributes:
        mark: the value of `versions.py` in place of ranks: which weights make tokens now.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._held: dict[str, Held] = {}
        self._offsets = itertools.count()
        self.mark = UNKNOWN

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        self._of(request)  # here, because a request that ends with its first token is unknown when that leaves

    def _of(self, request: Request | None) -> Held | None:
        """Return the held results of a request; None for one that is not fast."""
        if request is None:
            return None
        held = self._held.get(request.request_id)
        if held is None and is_fast(request.sampling_params) and not request.resumable:
            held = self._held[request.request_id] = Held(request, next(self._offsets))
        return held

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for message in result.values():
            if message.outputs:
                message.outputs = [output for output in message.outputs if self._leaves(output)]
        return result

    def _leaves(self, output: EngineCoreOutput) -> bool:
        """Return whether `output` leaves now, with all held results of its request; otherwise hold it back."""
        requests: dict[str, Request] = self.requests  # type: ignore[attr-defined]
        held = self._held.get(output.request_id) or self._of(requests.get(output.request_id))
        if held is None:
            return True
        if output.new_logprobs is not None:
            held.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.routed_experts is not None:  # of an engine that returns them
            held.routes.append(output.routed_experts)
        ended = output.finish_reason is not None
        due = held.is_due(len(held.request.output_token_ids))
        if not (ended or due or output.prefill_stats is not None or output.events):
            return False
        held.fill(output, self.mark)
        if ended:
            del self._held[output.request_id]
        return True

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        ended = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended

    def flush(self) -> Iterator[tuple[int, EngineCoreOutput]]:
        """Return all held results, with the index of their client."""
        for request_id, held in self._held.items():
            if len(held.request.output_token_ids) > held.num_sent:
                output = held.fill(EngineCoreOutput(request_id=request_id, new_token_ids=[]), self.mark)
                yield held.request.client_index, output

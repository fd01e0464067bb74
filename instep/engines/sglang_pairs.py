"""Control calls to SGLang's prefill and decode engines, which answer only in pairs. For rollouts the router pairs them.

A prefill engine generates the first token of a response. A decode engine gets its keys and values, and generates the
other tokens. Both get the same request, with a random number that identifies the pair.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from concurrent.futures import as_completed
from typing import Any
from urllib.parse import urlsplit

from instep.engines.http import get_json
from instep.engines.kind import RunningEngine
from instep.engines.sglang_wire import SGLANG_WIRE
from instep.errors import EngineError
from instep.system.run_context import RunThreads
from instep_engine.sglang_form import PATH

NOBODY = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}  # SGLang's fake address: no engine fetches the cache
FORCE = 1e4  # added to the logit of a token
EVERY = 6  # a decode engine scores one of so many tokens: each score costs a transfer
ASK_SECONDS = 10.0


def partner_of(decode: RunningEngine) -> RunningEngine:
    """Return a prefill engine with the weights of a decode engine. Raises EngineError if no such engine answers."""
    wanted = _version(decode)
    for prefill in decode.prefills:
        if wanted is not None and _version(prefill) == wanted:
            return prefill
    what = f"no prefill engine answers with the weights of {decode.name} ({wanted})"
    raise EngineError(what, where=decode.url, remedy="read the engines' logs, then start the run again")


def _version(engine: RunningEngine) -> str | None:
    """Return the version of its weights; None if it does not answer."""
    try:
        return str(get_json(engine.url + "/weight_info", ASK_SECONDS)["weight_version"])
    except OSError:
        return None


def ask_pair(
    prefill: RunningEngine,
    decode: RunningEngine,
    for_prefill: dict[str, Any],
    for_decode: dict[str, Any],
    seconds: float,
) -> Any:
    """Send a request to both engines; return the decode engine's answer. Raises the first error of the two."""
    at = {"bootstrap_host": urlsplit(prefill.url).hostname, "bootstrap_port": prefill.bootstrap_port}
    at["bootstrap_room"] = secrets.randbits(62)
    pool = RunThreads(2)
    try:
        begun = pool.submit(prefill.post, PATH, for_prefill | at, timeout=seconds)
        answer = pool.submit(decode.post, PATH, for_decode | at, timeout=seconds)
        for call in as_completed((begun, answer)):
            call.result()
    finally:
        pool.shutdown(wait=False)
    return answer.result()


def scores_by_prefill(engine: RunningEngine, tokens: Sequence[int], timeout: float) -> list[float]:
    """Return log-probs of `tokens` from the second on by a prefill engine alone."""
    answer = engine.post(PATH, SGLANG_WIRE.scoring_request(tokens) | NOBODY, timeout=timeout)
    return SGLANG_WIRE.prompt_log_probs(answer, tokens, f"{engine.name} at {engine.url}")


def scores_by_decode(engine: RunningEngine, tokens: Sequence[int], timeout: float) -> list[float]:
    """Return log-probs of `tokens` from the second on. A decode engine scores one token of EVERY.

    The request for a scored token ends two tokens before it. A logit bias makes the prefill engine choose the token
    between. The decode engine then returns the log-prob of the scored token. Its difference from the prefill engine's
    log-prob is added to all tokens up to the next scored one.
    """
    prefill = partner_of(engine)
    scores = scores_by_prefill(prefill, tokens, timeout)
    ends = range(1, len(tokens) - 1, EVERY)
    params: dict[str, Any] = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [list(tokens[:end]) for end in ends]}
    forced = [params | {"logit_bias": {str(tokens[end]): FORCE}} for end in ends]
    asked = {
        "return_logprob": True,
        "token_ids_logprob": [[tokens[end + 1]] for end in ends],
        "sampling_params": params,
    }
    answers = ask_pair(prefill, engine, body | {"sampling_params": forced}, body | asked, timeout)
    for end, answer in zip(ends, answers, strict=True):
        if (got := answer["output_ids"][0]) != tokens[end]:
            what = f"SGLang did not apply logit_bias: {prefill.name} chose token {got}, not {tokens[end]}"
            remedy = "use a version of SGLang that docs/engines_sglang.md names"
            raise EngineError(what, where=prefill.url, remedy=remedy)
        found = answer["meta_info"]["output_token_ids_logprobs"][0][0][0]
        difference = (math.nan if found is None else found) - scores[end]  # JSON has no NaN
        scores[end : end + EVERY] = [score + difference for score in scores[end : end + EVERY]]
    return scores

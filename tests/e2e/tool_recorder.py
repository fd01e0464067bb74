"""The generate function of examples/tool_use, with a record of what went to the engine and what it answered."""

from __future__ import annotations

import contextvars
import json
import os

from python_tool import generate as generate_with_tool

from instep.rollout import group_request

_asking = contextvars.ContextVar("_asking")
_complete = group_request.complete_n


async def _recorded(url, model, token_ids, params, n, **kwargs):
    answers = await _complete(url, model, token_ids, params, n, **kwargs)
    if (record := _asking.get(None)) is not None:
        (answer,) = answers
        record.append({"prompt": list(token_ids), "answer": answer.token_ids, "session": kwargs["session"]})
    return answers


group_request.complete_n = _recorded


async def generate(args, sample, sampling_params):
    record = []
    _asking.set(record)
    await generate_with_tool(args, sample, sampling_params)
    with open(os.environ["TOOL_RECORD"], "a") as file:
        file.write(json.dumps({"tokens": sample.tokens, "mask": sample.loss_mask, "requests": record}) + "\n")
    return sample

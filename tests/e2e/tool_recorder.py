"""The generate function of examples/tool_use, with a record of what went to the engine and what it answered."""

from __future__ import annotations

import contextvars
import json
import os

from python_tool import generate as generate_with_tool

from instep.rollout import vllm_rollout

_asking = contextvars.ContextVar("_asking")
_complete = vllm_rollout.complete


async def _recorded(url, model, token_ids, params, **kwargs):
    answer = await _complete(url, model, token_ids, params, **kwargs)
    if (record := _asking.get(None)) is not None:
        record.append({"prompt": list(token_ids), "answer": answer.token_ids, "session": kwargs["session"]})
    return answer


vllm_rollout.complete = _recorded


async def generate(args, sample, sampling_params):
    record = []
    _asking.set(record)
    await generate_with_tool(args, sample, sampling_params)
    with open(os.environ["TOOL_RECORD"], "a") as file:
        file.write(json.dumps({"tokens": sample.tokens, "mask": sample.loss_mask, "requests": record}) + "\n")
    return sample

"""A model that asks Python: its turns and the tool's answers follow each other in one sample.

    --custom-generate-function-path python_tool.generate     (with this folder on PYTHONPATH)

The model ends a turn with `<python>EXPRESSION</python>`; a sandbox of its own evaluates it, and what it says becomes
the next message, `tool`. The tokens of the tool are not trained on. Nothing is tokenized twice: what the engine has
sampled is what the next turn begins with, and what the trainer sees.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from instep.rollout.sandbox import Limits, run_python
from instep.rollout.tokens import next_turn, tokenizer_of
from instep.rollout.vllm_rollout import generate as generate_turn
from instep.system.processes import num_usable_cpus
from instep.types import Sample, Status

MAX_TURNS = 3
CALL = re.compile(r"<python>(.*?)</python>\s*$", re.DOTALL)
LIMITS = Limits(seconds=5.0, memory=256 << 20, processes=1)
TOOL = """
import sys
try:
    print(str(eval(sys.stdin.read(), {"__builtins__": {}}))[:100])
except Exception as error:
    print(f"{type(error).__name__}: {error}"[:100])
"""
_slots = asyncio.Semaphore(num_usable_cpus())


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate turns until one calls no tool; `max_new_tokens` bounds all of them and the tool's answers together."""
    tokenizer = tokenizer_of(args)
    while True:
        # instep's own: it goes on after the tokens that are there, on the engine that has them in its cache.
        await generate_turn(args, sample, sampling_params)
        if sample.status is not Status.COMPLETED:
            return sample  # out of tokens; or aborted, to be continued here in the next rollout
        turns = sample.metadata.get("turns", [0])  # where each begins in the response; read after an abort, too
        text = tokenizer.decode(sample.tokens[sample.prompt_length + turns[-1] :], skip_special_tokens=True)
        call = CALL.search(text)
        if call is None or len(turns) == MAX_TURNS:
            return sample
        answer = await evaluate(call[1], args.unsafe_local_exec)
        assert next_turn(args, sample, [{"role": "tool", "content": answer}]) is sample  # this template only appends
        sample.metadata = {**sample.metadata, "turns": [*turns, sample.response_length]}


async def evaluate(expression: str, unsafe: bool = False) -> str:
    """Return the expression's value in a sandbox (`instep.rollout.sandbox`), or its error; at most 100 characters."""
    async with _slots:
        outcome = await run_python(TOOL, expression.strip(), limits=LIMITS, unsafe=unsafe)
    if outcome.status is None:
        return "TimeoutError"
    return outcome.stdout.strip() or f"ended with status {outcome.status}"

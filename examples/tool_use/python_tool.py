"""A model that asks Python: its turns and the tool's answers follow each other in one sample.

    --custom-generate-function-path python_tool.generate     (with this folder on PYTHONPATH)

The model ends a turn with `<python>EXPRESSION</python>`; a process of its own evaluates it, and what it says becomes
the next message, `tool`. The tokens of the tool are not trained on. Nothing is tokenized twice: what the engine has
sampled is what the next turn begins with, and what the trainer sees.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from typing import Any

from instep.processes import num_usable_cpus
from instep.rollout.tokens import next_turn_ids, tokenizer_of
from instep.rollout.vllm_rollout import generate as generate_turn
from instep.types import Sample, Status

MAX_TURNS = 3
TOOL_SECONDS = 5.0  # of one call; starting Python takes a hundredth of that
CALL = re.compile(r"<python>(.*?)</python>\s*$", re.DOTALL)

# Isolated, without builtins, with bounds on time and memory, and killed with its parent. That keeps mistakes of a model
# from doing harm; it is no prison for code that wants out.
TOOL = """
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
for what, most in ((resource.RLIMIT_CPU, 2), (resource.RLIMIT_AS, 256 << 20), (resource.RLIMIT_FSIZE, 0)):
    resource.setrlimit(what, (most, most))
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
        answer = await evaluate(call[1])
        sample.append_response_tokens(next_turn_ids(args, [{"role": "tool", "content": answer}]), trainable=False)
        sample.metadata = {**sample.metadata, "turns": [*turns, sample.response_length]}


async def evaluate(expression: str) -> str:
    """The expression's value in a new Python process, or its error; at most 100 characters."""
    async with _slots:
        tool = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", TOOL, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
        )
        try:
            output, _ = await asyncio.wait_for(tool.communicate(expression.strip().encode()), TOOL_SECONDS)
        except TimeoutError:
            return "TimeoutError"
        finally:
            if tool.returncode is None:  # it was too slow, or the rollout was cancelled
                tool.kill()
                await tool.wait()
    return output.decode(errors="replace").strip() or f"ended by signal {-(tool.returncode or 0)}"

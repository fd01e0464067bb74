"""Code against tests: the last fenced block of a response, each test in its own sandbox (`instep.rollout.sandbox`).

A program that is wrong, too slow or too large has the reward 0. If the sandbox itself does not start, that is an error,
not a reward.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NamedTuple

from instep.errors import RewardError
from instep.rollout.sandbox import Limits, run_python

LIMITS = Limits(seconds=10.0, memory=512 << 20, processes=1)  # of each test
NUM_TRIES = 3  # of a sandbox that does not start
_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)  # every block, so that a closing fence opens none
_LANGUAGES = ("", "python", "python3", "py")
_PROGRAM = """\
import builtins, sys
builtins.exit = builtins.quit = sys.exit
print({begin!r}, flush=True)
space = {{"__name__": "__main__"}}
exec(compile({code!r}, "<response>", "exec"), space)
exec(compile({tests!r}, "<tests>", "exec"), space)
print({end!r})
"""


class Case(NamedTuple):
    """What runs after the program, what it reads, and what it must write (None: anything)."""

    tests: str
    stdin: str = ""
    stdout: str | None = None


def last_block(response: str) -> str | None:
    """Return the content of the last fenced block that is in Python or names no language; None without one."""
    blocks = [content for language, content in _BLOCK.findall(response) if language.strip().lower() in _LANGUAGES]
    return blocks[-1] if blocks else None


def read_tests(label: Any) -> list[Case]:
    """Read the tests of a label: `{"inputs": [...], "outputs": [...]}`, a list of statements, or a text of statements.

    A text that is JSON of the first two forms is read as such.

    Raises:
        ValueError: another form, or there are no tests.
    """
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        try:
            label = json.loads(label)
        except ValueError:
            pass  # Python that begins with a bracket
    if isinstance(label, dict):
        inputs, outputs = (label.get(name) or [] for name in ("inputs", "outputs"))
        texts = isinstance(inputs, list) and isinstance(outputs, list) and all(type(x) is str for x in inputs + outputs)
        if texts and 0 < len(inputs) == len(outputs):
            return [Case("", given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
        raise ValueError("needs as many texts in inputs as in outputs")
    statements = [label] if isinstance(label, str) else label
    if not isinstance(statements, list) or not all(isinstance(s, str) and s.strip() for s in statements):
        raise ValueError("is neither a text of tests, nor a list of them, nor inputs and outputs")
    if not statements:
        raise ValueError("holds no tests")
    return [Case("\n".join(statements))]


async def passes_all(
    response: str, label: Any, *, unsafe: bool, limits: Limits = LIMITS, where: str = "--rm-type code"
) -> float:
    """Return 1.0 if the last block of the response passes all tests of the label, else 0.0.

    Args:
        unsafe: where no sandbox is possible, run without one (`--unsafe-local-exec`).
        where: what is graded, for errors.

    Raises:
        ConfigError: this host has no sandbox.
        RewardError: the sandbox does not start.
    """
    code = last_block(response)
    if code is None:
        return 0.0
    for test in read_tests(label):
        if not await _passes(code, test, unsafe, limits, where):
            return 0.0
    return 1.0


async def _passes(code: str, test: Case, unsafe: bool, limits: Limits, where: str) -> bool:
    said = ""
    for _ in range(NUM_TRIES):
        begin, end = (secrets.token_hex(16) for _ in range(2))  # a program that ends early must not pass
        program = _PROGRAM.format(begin=begin, end=end, code=code, tests=test.tests)
        outcome = await run_python(program, test.stdin, limits=limits, unsafe=unsafe)
        if outcome.stdout.startswith(begin):
            printed = outcome.stdout.removeprefix(f"{begin}\n")
            if test.stdout is not None:  # a program may end itself
                return outcome.status == 0 and _lines(printed.removesuffix(f"{end}\n")) == _lines(test.stdout)
            return outcome.status == 0 and printed.endswith(f"{end}\n")
        said = outcome.stderr.strip()[-200:] or "it gave no answer in time"
    remedy = "see the host's memory and processes, or use fewer --reward-num-workers"
    raise RewardError(f"the sandbox of a test did not start, {NUM_TRIES} times: {said}", where=where, remedy=remedy)


def _lines(text: str) -> list[str]:
    """Return the lines of an output without blanks at their ends, and without empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]

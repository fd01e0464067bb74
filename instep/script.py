"""The functions for a script like `train.py`: parse the command line, and run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from instep.arguments.all_flags import find
from instep.arguments.args import Args
from instep.arguments.extra import Provider, add
from instep.cli import arguments, guarded, main, run

T = TypeVar("T")


def parse_args(extra_args_provider: Provider | None = None, argv: Sequence[str] | None = None) -> Args:
    """Return the checked arguments of `instep train`, from the command line of this process.

    Mistakes are printed, and end the process with exit code 2. `--help` ends it with 0.

    Args:
        extra_args_provider: adds flags to the given `argparse.ArgumentParser`, as in Megatron's scripts.
        argv: words to use instead of the command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        sys.exit(main(["train", *words]))

    def parsed() -> Args:
        if extra_args_provider is not None:
            add(extra_args_provider, find)
        return arguments("train", words)

    return _or_exit(parsed)


def train(args: Args) -> dict[str, Any]:
    """Run `instep train` with `args`, and return the summary. An error is printed, and ends the process."""
    return _or_exit(lambda: run(args))


def _or_exit(work: Callable[[], T]) -> T:
    done: list[T] = []

    def work_to_do() -> int:
        done.append(work())
        return 0

    if code := guarded(work_to_do):
        sys.exit(code)
    return done[0]

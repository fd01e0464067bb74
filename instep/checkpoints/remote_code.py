"""Python files that a Hugging Face checkpoint brings along run only with `--trust-remote-code`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from instep.errors import CheckpointError


@contextmanager
def own_code_named(folder: str, what: str) -> Iterator[None]:
    """Turn transformers' refusal of a checkpoint's own code into an error that names the flag.

    Args:
        what: what the code is for.

    Raises:
        CheckpointError: the checkpoint needs code of its own.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"the {what} is Python code that came with the checkpoint, which is not run",
            where=folder,
            remedy="read its .py files; if you trust where they come from, give --trust-remote-code",
        ) from error

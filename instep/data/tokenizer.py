"""The tokenizer of a checkpoint, one for the whole process."""

from __future__ import annotations

import functools
from typing import Any

from instep.checkpoints.remote_code import own_code_named
from instep.errors import CheckpointError


@functools.cache
def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a Hugging Face checkpoint, loaded once.

    Raises:
        CheckpointError: there is none, or it is Python code of the checkpoint's own that is not trusted.
    """
    from transformers import AutoTokenizer

    try:
        with own_code_named(path, "tokenizer"):
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"no tokenizer could be loaded: {error}", where=path, remedy="--hf-checkpoint names a checkpoint with one"
        ) from error

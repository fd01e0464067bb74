"""The tokenizer of a checkpoint, one for the whole process."""

from __future__ import annotations

import functools
from typing import Any

from instep.errors import CheckpointError


@functools.cache
def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face checkpoint, loaded once.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"no tokenizer could be loaded: {error}", where=path, remedy="--hf-checkpoint names a checkpoint with one"
        ) from error

"""The tokenizer of a checkpoint, one for the whole process."""

from __future__ import annotations

import functools
import threading
from typing import Any

from instep.checkpoints.remote_code import own_code_named
from instep.errors import CheckpointError
from instep.importing import first_import

_one = threading.Lock()  # transformers finds its names as they are asked for, which two threads must not do at once


@functools.cache
def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a Hugging Face checkpoint, loaded once.

    Raises:
        CheckpointError: there is none, or it is Python code of the checkpoint's own that is not trusted.
    """
    try:
        with _one, own_code_named(path, "tokenizer"), first_import("transformers.models.auto.tokenization_auto"):
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"no tokenizer could be loaded: {error}", where=path, remedy="--hf-checkpoint names a checkpoint with one"
        ) from error

"""The tokens that end a response: the tokenizer's own, and special ones of the generation config.

vLLM takes all listed tokens. A config that was never set says 0, which is an ordinary token of many tokenizers, such as
"!".
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.input_processor import InputProcessor

logger = init_logger("vllm.instep")


def install() -> None:
    """Let the API server of this process ignore listed tokens that are ordinary ones of its tokenizer."""
    vllms_own = InputProcessor.__init__
    if hasattr(vllms_own, "__wrapped__"):  # plugins may be loaded twice in a process
        return

    @functools.wraps(vllms_own)
    def init(self: InputProcessor, *args: Any, **kwargs: Any) -> None:
        vllms_own(self, *args, **kwargs)
        listed = self.generation_config_fields.get("eos_token_id")
        if listed is None or self.tokenizer is None:
            return
        ids = {listed} if isinstance(listed, int) else set(listed)
        special = {*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids}
        if others := sorted(ids - special):
            logger.warning("instep: token ids %s do not end a response: they are not special tokens", others)
            self.generation_config_fields["eos_token_id"] = sorted(ids & special)

    InputProcessor.__init__ = init  # type: ignore[method-assign]

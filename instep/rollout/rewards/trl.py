"""Reward functions in TRL's form: `f(prompts, completions, **columns) -> list of numbers`, sync or async."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from instep.rollout.tokens import without_end
from instep.system.hooks import load_function
from instep.system.run_context import cached_per_run
from instep.types import Group

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings


@cached_per_run
def is_trls(path: str) -> bool:
    """Return whether the function is in TRL's form: it has a parameter `completions`."""
    return "completions" in inspect.signature(load_function(path)).parameters


def arguments(args: HookSettings, samples: Group) -> dict[str, Any]:
    """Return the keywords of a call: lists with an entry per sample.

    `completions` are texts without the special tokens at their end; if prompts are conversations, lists of one message.
    `prompts` are as the engine got them, `completion_ids` the tokens. The labels are under the name of their column
    (`--label-key`) and under `label`. Every key of the metadata is a column.
    """
    texts = [without_end(args, s.response) for s in samples]
    chats = bool(args.apply_chat_template) or not all(isinstance(s.prompt, str) for s in samples)
    keys = sorted({key for s in samples for key in s.metadata or {}})
    columns: dict[str, Any] = {key: [(s.metadata or {}).get(key) for s in samples] for key in keys}
    labels = [s.label for s in samples]
    columns = {"label": labels} | columns | ({args.label_key: labels} if args.label_key else {})
    return {
        **columns,
        "prompts": [s.prompt for s in samples],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chats else texts,
        "completion_ids": [s.tokens[s.prompt_length :] for s in samples],
    }

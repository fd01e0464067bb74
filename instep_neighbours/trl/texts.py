"""Conversion of texts and conversations in requests to token ids of the served model, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from instep.data.template import apply_template
from instep.engines.stops import find_stop
from instep_neighbours.trl.clients import BadRequest
from instep_neighbours.trl.forms import RENDERING, TOKEN, Body

IMAGES = "images are not supported: this server is for text models"
_OURS = frozenset("tokenize return_tensors return_dict chat_template conversation padding truncation".split())


class Texts:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    async def ids(self, prompts: list[Any]) -> list[list[int]]:
        """Return the token ids of prompts, some of which may be texts. Raises BadRequest."""
        if all(isinstance(prompt, list) for prompt in prompts):
            return prompts
        return await asyncio.to_thread(lambda: [self._encode(p) if isinstance(p, str) else p for p in prompts])

    def _encode(self, text: str, **options: Any) -> list[int]:
        try:
            return self._tokenizer.encode(text, **options)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:  # mainly half a surrogate pair
            raise BadRequest(f"a text cannot be tokenized: {error}") from error

    def render(self, conversations: list[Any], options: Body) -> list[list[int]]:
        """Return the prompts of conversations by the model's own chat template. Raises BadRequest."""
        return [self._render(messages, options) for messages in conversations]

    def _render(self, messages: Any, options: Body) -> list[int]:
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a conversation: a list of objects with role and content")
        given = {"add_generation_prompt": True, **options}
        try:
            text = apply_template(self._tokenizer, messages, **given, tokenize=False)
        except Exception as error:  # no template, or any error of a template
            raise BadRequest(f"the chat template failed: {getattr(error, 'what', error)}") from error
        return self._encode(text, add_special_tokens=False)

    def namer(self, body: Body) -> Callable[[int], str]:
        """Return the function that names tokens in the form of the request."""
        if body.get("return_tokens_as_token_ids"):
            return lambda token: f"{TOKEN}{token}"
        return lambda token: str(self._tokenizer.decode([token]))

    def of(self, choice: Body, body: Body) -> str:
        """Return the text of a choice, up to the stop string that ended it."""
        skip, ids = body.get("skip_special_tokens") is not False, choice["token_ids"]
        text, before_last = (str(self._tokenizer.decode(i, skip_special_tokens=skip)) for i in (ids, ids[:-1]))
        stop = None if body.get("include_stop_str_in_output") else choice.get("stop_reason")
        found = find_stop(text, before_last, [stop]) if isinstance(stop, str) else None
        return text[: found and found[0]]


def template_options(body: Body) -> Body:
    """Return the options of a request for the chat template. Raises BadRequest."""
    extra, tools = body.get("chat_template_kwargs") or {}, body.get("tools") or None
    if not isinstance(extra, dict) or (tools is not None and not isinstance(tools, list)):
        raise BadRequest("chat_template_kwargs must be an object, tools a list")
    if refused := sorted(extra.keys() & _OURS):
        raise BadRequest(f"chat_template_kwargs: {', '.join(refused)} cannot be set by a request")
    given = {name: body[name] for name in RENDERING if body.get(name) is not None}
    if any(not isinstance(value, bool) for value in given.values()):
        raise BadRequest(f"{' and '.join(given)} must be true or false")
    return {**given, **extra, **({"tools": tools} if tools else {})}

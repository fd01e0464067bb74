"""Stop strings in the text of a response."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, before_last: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that the last token of `text` completes, and that string; None if there is none.

    As in vLLM, the string that ends first wins; of two that end together, the first in the list. A string that is whole
    in `before_last`, the text without the last token, does not count: it came before `min_tokens` or in another turn.
    """
    whole = len(before_last.rstrip("\ufffd"))  # half a character is no text yet
    places = [(text.find(stop, max(0, whole - len(stop) + 1)), stop) for stop in stops]
    return min((place for place in places if place[0] >= 0), key=lambda place: place[0] + len(place[1]), default=None)

"""Stop strings in the text of a response."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, before_last: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where in `text` the stop string begins that its last token has completed, and which it is; None: there is none.

    As in vLLM the one that ends first counts, of two that end together the first in the list. One in `before_last`, the
    text of all tokens but the last, is none: `min_tokens` has passed over it, or it is of a former turn.
    """
    whole = len(before_last.rstrip("\ufffd"))  # half a character is no text yet
    places = [(text.find(stop, max(0, whole - len(stop) + 1)), stop) for stop in stops]
    return min((place for place in places if place[0] >= 0), key=lambda place: place[0] + len(place[1]), default=None)

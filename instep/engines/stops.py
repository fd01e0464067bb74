"""Stop strings in the text of a response."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, before_last: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the stop string that the last token of `text` completes, after its start; None if there is none.

    As in vLLM, the string that ends first wins. If two end together, the first in the list wins. A string that is
    already whole in `before_last`, the text without the last token, does not count: it came before `min_tokens` or in
    another turn.
    """
    whole = len(before_last.rstrip("\ufffd"))  # half a character is not text yet
    places = [(text.find(stop, max(0, whole - len(stop) + 1)), stop) for stop in stops]
    return min((place for place in places if place[0] >= 0), key=lambda place: place[0] + len(place[1]), default=None)

"""How often the controller's Python looks for cycles among its objects."""

from __future__ import annotations

import gc


class Garbage:
    """Rare collections while a run is on.

    With Python's thresholds (700, 10, 10) a collection looks at all tokens of a rollout often: a quarter of the
    controller's time.
    """

    def __init__(self) -> None:
        self._before = gc.get_threshold()

    def start(self) -> None:
        """Collect, and then seldom; modules, data set and tokenizer, which stay, are not looked through again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(400_000, 20, 20)

    def end(self) -> None:
        """Collect as before."""
        gc.unfreeze()
        gc.set_threshold(*self._before)

"""The way `staged`: that of `shm`, for buckets that are in shared memory before the session and stay there after it.

No trainer of a run uses it. A server that has received whole weights from another trainer does
(`instep_neighbours/trl/updates.py`). It sends the same buckets again to a restarted engine.
"""

from instep.weights.shm import Shm


class Staged(Shm):
    keeps = True


WAY = Staged()

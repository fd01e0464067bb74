"""The way `staged`: that of `shm`, for buckets that lie in shared memory before the session and stay there after it.

No trainer of a run sends by it: a server that has received whole weights from another trainer does
(`instep_neighbours/trl/updates.py`), and sends the same buckets again to an engine that was restarted.
"""

from instep.weights.shm import Shm


class Staged(Shm):
    keeps = True


WAY = Staged()

"""The way `restart`: each engine is ended, and restarted on a Hugging Face checkpoint, with all of its flags.

It is for debugging, and for engines that cannot load weights while they run. An engine compares the tensors of the
checkpoint with their digests. The embedded engine compares its live weights with them, too.
"""

from __future__ import annotations

import atexit
from pathlib import Path

from instep.system.scratch import Scratch
from instep.weights.disk import Disk
from instep.weights.way import RESTART, Carriage, Sent
from instep_engine.place import GOLDEN


class Restart(Disk):
    name = RESTART

    def __init__(self) -> None:
        self._homes: dict[str, Scratch] = {}  # by the engine's URL: it may read files of its checkpoint at any time

    def drive(self, carriage: Carriage) -> Sent:
        """Let the engines start on the complete checkpoint, then remove checkpoints without a running engine."""
        root, before = Scratch(GOLDEN, carriage.disk_folder), set(self._homes.values())
        try:
            manifest = self.published(carriage, root.path / f"v{carriage.version}")
            self._homes |= dict.fromkeys(carriage.start_anew(Path(manifest.path)), root)
            carriage.deliver({"backend": self.name, "path": manifest.path, "manifest": manifest.to_json()})
        finally:
            for old in {*before, root} - set(self._homes.values()):
                old.remove()
        return Sent(manifest.tensors, self.digest_kind)

    def close(self) -> None:
        """Remove all checkpoints."""
        for root in set(self._homes.values()):
            root.remove()
        self._homes = {}


WAY = Restart()
atexit.register(WAY.close)

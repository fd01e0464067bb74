"""The processes of an engine on several nodes, as one process: it lives as long as all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from instep.system.processes import Ending, Process


class JointProcess(Ending):
    """A `processes.Process` of several `parts`; the first runs on the engine's first node, which answers for all."""

    def __init__(self, parts: Sequence[Process]):
        self.parts = list(parts)
        self.name, self.log_path = parts[0].name, parts[0].log_path

    @property
    def pid(self) -> int:
        return self.parts[0].pid

    def _faulty(self) -> Process:
        """Return the first dead part, else the first with a fault, else the part of the first node."""
        dead = next((part for part in self.parts if not part.alive()), None)
        return dead or next((part for part in self.parts if part.fault() is not None), self.parts[0])

    def alive(self) -> bool:
        return all(part.alive() for part in self.parts)

    def fault(self) -> str | None:
        part = self._faulty()
        fault = part.fault()
        where = f" on its node {self.parts.index(part)}" if part is not self.parts[0] else ""
        return None if fault is None else fault + where

    def describe(self) -> str:
        return self._faulty().describe()

    def remedy(self) -> str:
        return self._faulty().remedy()

    def log_tail(self, num_lines: int = 15) -> str:
        return "\n".join(f"{part.name}:\n{part.log_tail(num_lines)}" for part in self.parts)

    def dump_stacks(self) -> None:
        for part in self.parts:
            part.dump_stacks()

    def terminate(self) -> None:
        for part in self.parts:
            part.terminate()

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for part in self.parts:
            part.wait(max(0.05, deadline - time.monotonic()))

    def kill(self) -> None:
        for part in self.parts:
            part.kill()

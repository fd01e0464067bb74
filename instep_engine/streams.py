"""The stream of weights that a worker of an engine takes part in, over a group (`stream.py`) or by `handles.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from instep_engine import BROKEN
from instep_engine.handles import Receiver
from instep_engine.manifest import WeightMismatch
from instep_engine.stream import Group, Invitation, StreamBroken, StreamMismatch, open_store, receive


class Streams:
    """The line or group of the last stream, which stays open for those that follow.

    Args:
        alive: called again and again while it waits.
        left: called when it leaves the group of former streams.
    """

    def __init__(
        self, device: torch.device, alive: Callable[[], None] = lambda: None, left: Callable[[], None] = lambda: None
    ):
        self._device, self._alive, self._left = device, alive, left
        self._group: Group | Receiver | None = None

    def receive(
        self, info: dict[str, Any], session: dict[str, str], load: Callable[[dict[str, torch.Tensor]], None]
    ) -> None:
        """Receive a stream, and `load` one bucket after another; but for NCCL's the memory of tensors is used again.

        Args:
            info: the update: `backend`, `invitation` and `seconds`.
            session: the version and the nonce of the stream.

        Raises:
            WeightMismatch: the stream broke, or brought something else.
        """
        invitation, seconds = Invitation(**info["invitation"]), float(info["seconds"])
        deadline = time.monotonic() + seconds
        try:
            if self._group is None or self._group.name != invitation.group:
                self._leave()
                if info["backend"] != "nccl":
                    self._group = Receiver(invitation, self._device, deadline, alive=self._alive)
                else:
                    store = open_store(invitation.store, seconds)
                    self._group = Group(store, invitation, self._device, seconds, alive=self._alive)
            if isinstance(self._group, Receiver):
                self._group.receive(session, load, deadline)
            else:
                receive(self._group, session, load, deadline)
        except StreamMismatch as error:  # the stream has come to its end, and the group stays
            raise WeightMismatch(f"the stream of weights: {error}", error.tensor) from error
        except StreamBroken as error:
            self._leave()
            raise WeightMismatch(f"{BROKEN}: {error}") from error

    def _leave(self) -> None:
        self._left()
        if self._group is not None:
            self._group.close()
            self._group = None

"""What the Atropos API knows: its trainer, its environments, and the groups that wait; in memory, without a server."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from instep_neighbours.atropos.batches import Queued, cut, indices_with_sum

MIN_ENV_WEIGHT = 0.01
MAX_ENVS = 10_000


class BadRequest(Exception):
    """A request that is refused with 422."""


class Full(Exception):
    """The queue has no room."""


@dataclass
class Env:
    """A registered environment.

    Attributes:
        group_size: as it said; it grows to that of the largest of its groups seen in the queue. 0: not known yet.
        heard: when it asked or sent last, by `time.monotonic`.
    """

    max_context_len: int
    weight: float
    name: str
    group_size: int
    share: float | None = None
    connected: bool = True
    heard: float = field(default_factory=time.monotonic)


@dataclass
class State:
    """All that the API knows, in memory.

    Attributes:
        registration: that of the first trainer; None before.
        started: a trainer has asked for a batch.
        ready: batches that were cut and not asked for.
        buffers: by environment, groups of another size than it said, until some of them make that size.
        max_bytes: the most that the JSON of waiting groups may take.
    """

    max_bytes: int
    registration: dict[str, Any] | None = None
    started: bool = False
    step: int = 0
    envs: dict[int, Env] = field(default_factory=dict)
    queue: list[Queued] = field(default_factory=list)
    ready: deque[list[Queued]] = field(default_factory=deque)
    buffers: dict[int, list[Queued]] = field(default_factory=dict)
    latest: bytes | None = None
    num_bytes: int = 0

    # ---- groups come in ----------------------------------------------------------------------------------------------

    def check_room(self, num_bytes: int) -> None:
        """Raise Full if groups of so many bytes have no room."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Full(f"{self.num_bytes >> 20} MiB of groups wait: is a trainer asking for batches?")

    def add(self, group: Queued) -> dict[str, Any]:
        """Queue or buffer a group, and return the answer to the environment."""
        self.num_bytes += len(group.data)
        env = None if group.env_id is None else self.envs.get(group.env_id)
        if env is not None:
            env.group_size, env.heard = env.group_size or group.size, time.monotonic()
        if group.env_id is None or env is None or group.size == env.group_size:
            self._enqueue([group])
            return {"status": "received"}
        buffer = self.buffers.setdefault(group.env_id, [])
        buffer.append(group)
        if chosen := set(indices_with_sum([g.size for g in buffer], env.group_size)):
            self._enqueue([g for i, g in enumerate(buffer) if i in chosen])
            buffer[:] = [g for i, g in enumerate(buffer) if i not in chosen]
        return {"status": "buffered", "buffer_size": sum(g.size for g in buffer)}

    def _enqueue(self, groups: list[Queued]) -> None:
        self.queue += groups
        self.latest = groups[-1].data

    # ---- batches go out ----------------------------------------------------------------------------------------------

    def next_batch(self) -> list[Queued] | None:
        """The next batch, which leaves; all that the queue makes are cut when none is ready."""
        assert self.registration is not None
        self.started = True
        if not self.ready:
            envs = self.envs.items()
            shares = {i: e.share for i, e in envs if e.connected and e.share is not None}
            while (chosen := cut(self.queue, self.registration["batch_size"], shares)) is not None:
                self.ready.append([self.queue[i] for i in chosen])
                taken = set(chosen)
                self.queue = [g for i, g in enumerate(self.queue) if i not in taken]
                self.step += 1
        if not self.ready:
            return None
        batch = self.ready.popleft()
        self.num_bytes -= sum(len(g.data) for g in batch)
        return batch

    def put_back(self, batch: list[Queued]) -> None:
        """Undo `next_batch`."""
        self.num_bytes += sum(len(g.data) for g in batch)
        self.ready.appendleft(batch)

    # ---- trainer and environments ------------------------------------------------------------------------------------

    def register_env(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.registration is None or not self.started:
            return {"status": "wait for trainer to start"}
        self._check_number(len(self.envs))
        number, desired = max(self.envs, default=-1) + 1, str(body.get("desired_name"))
        name = f"{desired}_{sum(env.name == desired for env in self.envs.values())}"
        share = body.get("min_batch_allocation")
        weight = 1.0 if body.get("weight") is None else number_of(body, "weight")
        length, size = int(number_of(body, "max_token_length")), int(number_of(body, "group_size"))
        if size < 1:
            raise BadRequest("group_size must be at least 1")
        share = None if share is None else number_of(body, "min_batch_allocation")
        self.envs[number] = Env(length, weight, desired, size, share)
        print(f"environment {number} ({name}) has registered, in groups of {size}", flush=True)
        return {
            "status": "success",
            "env_id": number,
            "wandb_name": name,
            "checkpoint_dir": self.registration["checkpoint_dir"],
            "starting_step": self.step,
            "checkpoint_interval": self.registration["save_checkpoint_interval"],
            "num_steps": self.registration["num_steps"],
        }

    def status_of(self, number: int) -> dict[str, Any]:
        """What an environment plans its work by; one that an earlier server knew is taken for one of weight 1."""
        sizes = [g.size for g in self.queue if g.env_id == number]
        if number not in self.envs:
            self._check_number(number)
            length = (self.registration or {}).get("max_token_len", 1)
            self.envs[number] = Env(max(1, length), 1.0, "unknown", 0)
            print(f"environment {number} registered with an earlier server, and goes on", flush=True)
        env, connected = self.envs[number], [e for e in self.envs.values() if e.connected]
        total = sum(e.max_context_len * max(0.0, e.weight) for e in connected)
        env.group_size, env.heard = max([env.group_size, *sizes]), time.monotonic()
        largest = max([1, *(g.size for g in self.queue)])
        own, size = sum(sizes), env.group_size or 1
        return {
            "current_step": self.step,
            "queue_size": (own + self._beyond_shares(number, largest)) // size,
            "unallocated_fraction": 1.0 - min(sum(e.share or 0.0 for e in connected), 1.0),
            "self_queue_size": own // size,
            "max_group_size": largest,
            "env_weight": max(MIN_ENV_WEIGHT, env.max_context_len * env.weight / total if total else 0.0),
        }

    def environments(self) -> list[dict[str, Any]]:
        """Who feeds the queue, for people; Atropos' server has no such route."""
        now = time.monotonic()
        return [
            {
                "env_id": number,
                "name": env.name,
                "connected": env.connected,
                "seconds_since_heard": round(now - env.heard, 1),
                "sequences_waiting": sum(g.size for g in self.queue if g.env_id == number),
            }
            for number, env in self.envs.items()
        ]

    @staticmethod
    def _check_number(number: int) -> None:
        if not 0 <= number < MAX_ENVS:
            raise BadRequest(f"{number} is no number of an environment: 0 to {MAX_ENVS - 1}")

    def _beyond_shares(self, number: int, largest: int) -> int:
        """The sequences of other environments, in whole packs, that are more than these are sure of in a batch."""
        if largest == 1:
            return 0
        others: dict[int | None, int] = {}
        for group in self.queue:
            if group.env_id != number:
                others[group.env_id] = others.get(group.env_id, 0) + group.size
        size = (self.registration or {}).get("batch_size", 0)
        out = 0
        for env_id, count in others.items():
            env = None if env_id is None else self.envs.get(env_id)
            sure = int(size * env.share) if env is not None and env.connected and env.share is not None else 0
            out += max(0, math.ceil(count / largest) * largest - sure)
        return out


def number_of(body: dict[str, Any], name: str) -> float:
    """The number `name` of a request. Raises: BadRequest."""
    value = body.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise BadRequest(f"{name} is {value!r:.40}, no number")
    return value

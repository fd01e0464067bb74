"""The state of the Atropos API: its trainer, its environments, and the waiting groups; in memory, without a server."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

from instep_neighbours.atropos.batches import Queued, Registration, cut, indices_with_sum
from instep_neighbours.atropos.groups import fault_of_group

Body = dict[str, Any]
MIN_ENV_WEIGHT = 0.01
MAX_ENVS = 10_000
_LISTS = "tokens masks scores advantages ref_logprobs messages generation_params inference_logprobs images".split()
_FIELDS = [*_LISTS, "overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs"]
NO_EXAMPLE = json.dumps({name: [] for name in _LISTS}).encode()


class BadRequest(Exception):
    """A request that is refused with 422."""


class Full(Exception):
    """The queue has no room."""


@dataclass
class Env:
    """A registered environment.

    Attributes:
        group_size: from its registration; it grows to the largest of its groups in the queue. 0: not known yet.
        heard: the time of its last request, by `time.monotonic`.
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
    """The whole state of the API. Methods with a `body` answer a route; they raise BadRequest.

    Attributes:
        max_bytes: the most bytes for the JSON of waiting groups.
        registration: that of the first trainer; None before it.
        started: a trainer has requested a batch.
        ready: batches that wait for a request.
        buffers: by environment, groups of another size than it registered, until some of them together have that size.
    """

    max_bytes: int
    registration: Body | None = None
    started: bool = False
    step: int = 0
    envs: dict[int, Env] = field(default_factory=dict)
    queue: list[Queued] = field(default_factory=list)
    ready: deque[list[Queued]] = field(default_factory=deque)
    buffers: dict[int, list[Queued]] = field(default_factory=dict)
    latest: bytes = NO_EXAMPLE
    num_bytes: int = 0

    # ---- groups come in ----------------------------------------------------------------------------------------------

    def scored_data(self, body: Any) -> Body:
        return self._add_all([_queued(body, "the group")])[0]

    def scored_data_list(self, body: Any) -> Body:
        if not isinstance(body, list):
            raise BadRequest("the body is not a list of groups")
        answers = self._add_all([_queued(group, f"group {i}") for i, group in enumerate(body)])
        sizes = [a["buffer_size"] for a in answers if a["status"] == "buffered"]
        more = {"buffered": len(sizes), "last_buffer_size": sizes[-1]} if sizes else {}
        return {"status": "received", "groups_processed": len(answers), **more}

    def _add_all(self, groups: list[Queued]) -> list[Body]:
        """Queue or buffer groups, and return the answers for the environment. Raises Full."""
        num_bytes = sum(len(group.data) for group in groups)
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Full(f"{self.num_bytes >> 20} MiB of groups wait: does a trainer request batches?")
        self.num_bytes += num_bytes
        return [self._add(group) for group in groups]

    def _add(self, group: Queued) -> Body:
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
        """Return the next batch, and remove it; if no batch is ready, make all that the queue allows."""
        assert self.registration is not None
        self.started = True
        if not self.ready:
            shares = {i: e.share for i, e in self.envs.items() if e.connected and e.share is not None}
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

    # ---- the trainer -------------------------------------------------------------------------------------------------

    def register(self, body: Body) -> Body:
        for known in fields(Registration):
            if type(body.get(known.name)).__name__ != known.type:
                raise BadRequest(f"{known.name} is {body.get(known.name)!r:.40}, not a {known.type}")
        if self.registration is None:  # as in Atropos, another trainer changes nothing
            self.registration, self.step = body, body["starting_step"]
            print(f"a trainer has registered, for batches of {body['batch_size']} sequences", flush=True)
        return {"uuid": secrets.randbits(128)}

    def info(self, body: Body) -> Body:
        known = self.registration or {}
        return {name: known.get(name, -1) for name in ("batch_size", "max_token_len")}

    def wandb_info(self, body: Body) -> Body:
        known = self.registration or {}
        return {"group": known.get("wandb_group"), "project": known.get("wandb_project")}

    def status(self, body: Body) -> Body:
        return {"current_step": self.step, "queue_size": len(self.queue)}

    # ---- environments ------------------------------------------------------------------------------------------------

    def register_env(self, body: Body) -> Body:
        if self.registration is None or not self.started:
            return {"status": "wait for trainer to start"}
        self._check_number(len(self.envs))
        number, desired = max(self.envs, default=-1) + 1, str(body.get("desired_name"))
        name = f"{desired}_{sum(env.name == desired for env in self.envs.values())}"
        weight = 1.0 if body.get("weight") is None else _number(body, "weight")
        share = None if body.get("min_batch_allocation") is None else _number(body, "min_batch_allocation")
        length, size = int(_number(body, "max_token_length")), int(_number(body, "group_size"))
        if size < 1:
            raise BadRequest("group_size must be at least 1")
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

    def disconnect_env(self, body: Body) -> Body:
        if (number := int(_number(body, "env_id"))) not in self.envs:
            return {"status": "failure", "error": f"environment {number} does not exist"}
        self.envs[number].connected = False
        return {"status": "success"}

    def status_env(self, body: Body) -> Body:
        """Return the data for an environment's plan; an environment of an earlier server gets weight 1."""
        number = int(_number(body, "env_id"))
        sizes = [g.size for g in self.queue if g.env_id == number]
        if number not in self.envs:
            self._check_number(number)
            length = (self.registration or {}).get("max_token_len", 1)
            self.envs[number] = Env(max(1, length), 1.0, "unknown", 0)
            print(f"environment {number} registered with an earlier server, and continues", flush=True)
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

    def environments(self, body: Body) -> Body:
        """Return the environments that fill the queue, for users; Atropos' server has no such route."""
        about = [
            {
                "env_id": number,
                "name": env.name,
                "connected": env.connected,
                "seconds_since_heard": round(time.monotonic() - env.heard, 1),
                "sequences_waiting": sum(g.size for g in self.queue if g.env_id == number),
            }
            for number, env in self.envs.items()
        ]
        return {"environments": about}

    @staticmethod
    def _check_number(number: int) -> None:
        if not 0 <= number < MAX_ENVS:
            raise BadRequest(f"{number} is not a number of an environment: 0 to {MAX_ENVS - 1}")

    def _beyond_shares(self, number: int, largest: int) -> int:
        """Return the sequences of other environments, in whole packs, beyond their guaranteed parts of a batch."""
        if largest == 1:
            return 0
        others: dict[int | None, int] = {}
        for group in self.queue:
            if group.env_id != number:
                others[group.env_id] = others.get(group.env_id, 0) + group.size
        size, out = (self.registration or {}).get("batch_size", 0), 0
        for env_id, count in others.items():
            env = None if env_id is None else self.envs.get(env_id)
            sure = int(size * env.share) if env is not None and env.connected and env.share is not None else 0
            out += max(0, math.ceil(count / largest) * largest - sure)
        return out


def _queued(group: Any, where: str) -> Queued:
    if fault := fault_of_group(group):
        env = f" of environment {group['env_id']}" if isinstance(group, dict) and "env_id" in group else ""
        raise BadRequest(f"{where}{env}: {fault}")
    env_id = group.get("env_id")
    if env_id is not None and type(env_id) is not int:
        raise BadRequest(f"{where}: env_id is {env_id!r:.40}, not an integer")
    kept = {name: group.get(name) for name in _FIELDS}
    return Queued(len(group["tokens"]), env_id, json.dumps(kept, separators=(",", ":")).encode())


def _number(body: Body, name: str) -> float:
    value = body.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise BadRequest(f"{name} is {value!r:.40}, not a number")
    return value

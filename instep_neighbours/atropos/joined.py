"""Trainer ranks that a user starts separately, one command each: `--trainer-rank R --world-size W`, on one host.

Rank 0 is the run, and owns all workers. The command of every other rank gives it a GPU: it reports the GPU to rank 0,
and each ends when the other ends. They connect by an abstract Unix socket; its name follows from user and
`--save-path`. Both check that the other process belongs to this user.

    rank R                         rank 0
    {"rank", "flags", "gpus"}  ->  waits for all of them
                               <-  {"fault"}, or {} when the run starts its worker
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from instep.cluster.local import start_rank
from instep.errors import ConfigError, WorkerError
from instep.system.processes import SupervisedProcess
from instep_neighbours.atropos.trainer_flags import COMMAND

MEET_SECONDS = 120.0  # until all ranks must have been started
START_SECONDS = 600.0  # until rank 0 must have begun to start its workers
_OWN = ("trainer_rank", "device", "vllm_gpu")  # flags in which ranks may differ


def _place(flags: argparse.Namespace) -> str:
    name = hashlib.sha256(str(Path(flags.save_path).resolve()).encode()).hexdigest()[:24]
    return f"\0instep-trainers-{os.geteuid()}-{name}"


def _own_user(line: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def _hello(flags: argparse.Namespace) -> dict[str, Any]:
    shared = {name: value for name, value in vars(flags).items() if name not in _OWN}
    return {"rank": flags.trainer_rank, "flags": shared, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


def _say(line: Connection, about: dict[str, Any]) -> None:
    line.send_bytes(json.dumps(about).encode())


def _hear(line: Connection, seconds: float, what: str) -> dict[str, Any]:
    """Read the next message. Raises WorkerError if there is none in time, or the other process has ended."""
    try:
        if line.poll(seconds):
            heard: dict[str, Any] = json.loads(line.recv_bytes())
            return heard
        fault = f"did not answer within {seconds:.0f} s"
    except (EOFError, OSError):
        fault = "has ended"
    raise WorkerError(
        f"{what} {fault}", where=f"{COMMAND} --world-size", remedy="see its output; start all ranks again"
    )


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


class JoinedRank:
    """A rank whose command waits at the other end of `line` until the run ends."""

    def __init__(self, rank: int, line: Connection):
        self.rank, self._line = rank, line

    def start(
        self, log_dir: Path, env: Mapping[str, str], heartbeat: float | None
    ) -> tuple[SupervisedProcess, Connection]:
        """Start its worker, which ends with the command."""
        with contextlib.suppress(OSError):  # `_follow` sees its end
            _say(self._line, {})
        name, log = f"actor rank {self.rank} (started by hand)", log_dir / f"actor-rank{self.rank}.log"
        process, connection = start_rank(name, log, env, heartbeat)
        threading.Thread(target=self._follow, args=(process,), name=process.name, daemon=True).start()
        return process, connection

    def _follow(self, process: SupervisedProcess) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._line.recv_bytes()
        process.name += " has ended: its worker"  # the name in errors
        process.terminate()


def meet(flags: argparse.Namespace) -> dict[int, JoinedRank]:
    """Wait for the commands of all other ranks; their GPUs come after this one's in CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: a rank was not started in time, or with other flags; or two ranks have one GPU.
    """
    where, found = f"{COMMAND} --world-size {flags.world_size}", dict[int, JoinedRank]()
    own = json.loads(json.dumps(_hello(flags)))
    gpus = {0: own["gpus"]}
    deadline = time.monotonic() + MEET_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.bind(_place(flags))
        except OSError as error:
            what = f"another trainer of rank 0 is there ({error.strerror})"
            raise ConfigError(what, where=f"{where} --save-path", remedy="give each run another folder") from None
        door.listen(flags.world_size)
        print(f"[Setup] waiting for trainer ranks 1 to {flags.world_size - 1} ({MEET_SECONDS:.0f} s)", flush=True)
        while len(found) < flags.world_size - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line, _ = door.accept()
            except TimeoutError:
                missing = sorted(set(range(1, flags.world_size)) - found.keys())
                what = f"trainer ranks {missing} were not started within {MEET_SECONDS:.0f} s"
                remedy = "start each with the same flags except `--trainer-rank`, in the same folder"
                raise ConfigError(what, where=where, remedy=remedy) from None
            if not _own_user(line):
                line.close()
                continue
            line.settimeout(None)
            connection = Connection(line.detach())
            hello = _hear(connection, 10.0, "a trainer that joins")
            rank, fault = hello["rank"], ""
            if other := [name for name, value in own["flags"].items() if value != hello["flags"].get(name)]:
                names = ", ".join(f"--{name.replace('_', '-')}" for name in other)
                fault = f"trainer rank {rank} has another {names} than rank 0"
            elif rank in found:
                fault = f"trainer rank {rank} joins twice"
            if fault:
                _say(connection, {"fault": fault})
                remedy = "start all ranks with the same flags except `--trainer-rank`"
                raise ConfigError(fault, where=where, remedy=remedy)
            found[rank], gpus[rank] = JoinedRank(rank, connection), hello["gpus"]
    _see_all(gpus, where)
    return found


def _see_all(gpus: Mapping[int, str], where: str) -> None:
    """Make the GPUs of all ranks visible to the run, in their order, if each has its own."""
    if not any(gpus.values()) or len(set(gpus.values())) == 1 and "," in gpus[0]:
        return  # all see all
    ids = [gpu for rank in sorted(gpus) for gpu in gpus[rank].split(",")]
    if len(set(ids)) != len(gpus):
        what = f"each trainer needs its own GPU, and they have {dict(sorted(gpus.items()))}"
        raise ConfigError(what, where=f"{where}, CUDA_VISIBLE_DEVICES", remedy="give each command another GPU")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


# ---- the other ranks -------------------------------------------------------------------------------------------------


def join(flags: argparse.Namespace) -> None:
    """Run as a rank above 0, until rank 0 ends.

    Raises:
        ConfigError: rank 0 is missing, or refuses this rank.
        WorkerError: rank 0 has ended before it started.
    """
    line = _connected(flags)
    _say(line, _hello(flags))
    print(f"[Setup] trainer rank {flags.trainer_rank} has joined rank 0", flush=True)
    if fault := _hear(line, START_SECONDS, "rank 0").get("fault"):
        raise ConfigError(fault, where=f"{COMMAND} --trainer-rank {flags.trainer_rank}", remedy="use the same flags")
    with contextlib.suppress(EOFError, OSError):
        line.recv_bytes()
    print("rank 0 has ended, and this rank with it", flush=True)


def _connected(flags: argparse.Namespace) -> Connection:
    deadline = time.monotonic() + MEET_SECONDS
    while time.monotonic() < deadline:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            line.connect(_place(flags))
            if _own_user(line):
                return Connection(line.detach())
        line.close()
        time.sleep(0.2)
    raise ConfigError(
        f"no trainer of rank 0 was found within {MEET_SECONDS:.0f} s",
        where=f"{COMMAND} --trainer-rank {flags.trainer_rank} --save-path {flags.save_path}",
        remedy="start rank 0 on this host, with the same `--save-path`",
    )

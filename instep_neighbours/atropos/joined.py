"""Trainer ranks that a user starts by hand, one command each: `--trainer-rank R --world-size W`, on one host.

Rank 0 is the run. The command of every other rank owns one worker process, in its own environment and with its own
GPU, and hands the worker's connection to rank 0, which calls it like the workers that it starts itself. They meet at an
abstract Unix socket, whose name follows from user and `--save-path`; both ends check that the other is of this user.

    rank R                                        rank 0
    {"rank", "flags", "gpus"}                ->   waits for all of them
                                             <-   {"fault"} or {"log", "env", "heartbeat"} when the run starts
    {"pid"} of the worker, which has the line ->  requests, as to any worker
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from instep.errors import ConfigError, WorkerError
from instep.system.processes import LOOK_SECONDS, SupervisedProcess
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


def _shared(flags: argparse.Namespace) -> dict[str, Any]:
    shared: dict[str, Any] = json.loads(json.dumps({k: v for k, v in vars(flags).items() if k not in _OWN}))
    return shared


def _say(line: Connection, **about: Any) -> None:
    line.send_bytes(json.dumps(about).encode())


def _hear(line: Connection, seconds: float, what: str) -> dict[str, Any]:
    """The next message. Raises WorkerError if none comes in time, or the other end is gone."""
    try:
        if line.poll(seconds):
            heard: dict[str, Any] = json.loads(line.recv_bytes())
            return heard
        fault = f"did not answer within {seconds:.0f} s"
    except (EOFError, OSError):
        fault = "has ended"
    raise WorkerError(f"{what} {fault}", where=f"{COMMAND} --world-size", remedy="see its output; start all ranks anew")


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


class JoinedProcess:
    """The worker of another rank's command, as rank 0 sees it (`processes.Process`)."""

    def __init__(self, rank: int, pid: int, log_path: Path):
        self.name, self.pid, self.log_path = f"actor rank {rank} (started by hand)", pid, log_path
        self._fd = os.pidfd_open(pid)

    def alive(self) -> bool:
        return not select.select([self._fd], [], [], 0)[0]

    def fault(self) -> str | None:
        return None if self.alive() else "has ended"

    def died_within(self, seconds: float) -> bool:
        return bool(select.select([self._fd], [], [], seconds)[0])

    def log_tail(self, num_lines: int = 15) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        return "\n".join(lines[-num_lines:])

    def describe(self) -> str:
        how = "is running" if self.alive() else "has ended"
        return f"{self.name} (pid {self.pid}) {how}; the end of {self.log_path}:\n{self.log_tail()}"

    def remedy(self) -> str:
        return "see its log and the output of its command; start all ranks anew"

    def dump_stacks(self) -> None:
        self._signal(signal.SIGUSR1)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def wait(self, seconds: float) -> None:
        self.died_within(seconds)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)


class JoinedRank:
    """A rank whose command waits until the run starts its workers."""

    def __init__(self, rank: int, line: Connection):
        self.rank, self._line = rank, line

    def start(self, log_dir: Path, env: Mapping[str, str], heartbeat: float | None) -> tuple[JoinedProcess, Connection]:
        """Let it start its worker. Raises WorkerError if it has ended."""
        log = log_dir.absolute() / f"actor-rank{self.rank}.log"
        with contextlib.suppress(OSError):  # `_hear` tells
            _say(self._line, log=str(log), env=dict(env), heartbeat=heartbeat)
        pid = int(_hear(self._line, MEET_SECONDS, f"trainer rank {self.rank}")["pid"])
        return JoinedProcess(self.rank, pid, log), self._line


def meet(flags: argparse.Namespace) -> dict[int, JoinedRank]:
    """Wait for the commands of all other ranks; their GPUs come after this one's in CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: one was not started in time, or with other flags; or two have one GPU.
    """
    where, found = f"{COMMAND} --world-size {flags.world_size}", dict[int, JoinedRank]()
    gpus = {0: os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    deadline = time.monotonic() + MEET_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        try:
            door.bind(_place(flags))
        except OSError as error:
            what = f"another trainer of rank 0 is there ({error.strerror})"
            raise ConfigError(what, where=f"{where} --save-path", remedy="give each run a folder of its own") from None
        door.listen(flags.world_size)
        print(f"[Setup] waiting for trainer ranks 1 to {flags.world_size - 1} ({MEET_SECONDS:.0f} s)", flush=True)
        while len(found) < flags.world_size - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line, _ = door.accept()
            except TimeoutError:
                missing = sorted(set(range(1, flags.world_size)) - found.keys())
                what = f"trainer ranks {missing} were not started within {MEET_SECONDS:.0f} s"
                remedy = "start each with the same flags but `--trainer-rank`, in the same folder"
                raise ConfigError(what, where=where, remedy=remedy) from None
            if not _own_user(line):
                line.close()
                continue
            line.settimeout(None)
            connection = Connection(line.detach())
            hello = _hear(connection, 10.0, "a trainer that joins")
            if fault := _fault(flags, hello, found):
                _say(connection, fault=fault)
                raise ConfigError(fault, where=where, remedy="start all ranks with the same flags but `--trainer-rank`")
            found[hello["rank"]] = JoinedRank(hello["rank"], connection)
            gpus[hello["rank"]] = hello["gpus"]
    _see_all(gpus, where)
    return found


def _fault(flags: argparse.Namespace, hello: dict[str, Any], found: Mapping[int, object]) -> str:
    """Why a rank cannot join; "" if it can."""
    if hello["rank"] in found or not 0 < hello["rank"] < flags.world_size:
        return f"trainer rank {hello['rank']} joins twice, or is none of {flags.world_size}"
    own = _shared(flags)
    other = [name for name in own if own[name] != hello["flags"].get(name)]
    names = ", ".join(f"--{name.replace('_', '-')}" for name in other)
    return f"trainer rank {hello['rank']} has another {names} than rank 0" if other else ""


def _see_all(gpus: Mapping[int, str], where: str) -> None:
    """Let the run see the GPUs of all ranks, in their order, if each has its own."""
    if not any(gpus.values()) or len(set(gpus.values())) == 1 and "," in gpus[0]:
        return  # all see all
    ids = [gpu for rank in sorted(gpus) for gpu in gpus[rank].split(",")]
    if len(set(ids)) != len(gpus):
        what = f"each trainer needs one GPU of its own, and they have {dict(sorted(gpus.items()))}"
        raise ConfigError(what, where=f"{where}, CUDA_VISIBLE_DEVICES", remedy="give each command another GPU")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


# ---- the other ranks -------------------------------------------------------------------------------------------------


def join(flags: argparse.Namespace) -> None:
    """Be a rank above 0: own a worker until rank 0 has no more work for it.

    Raises:
        ConfigError: rank 0 is not there, or does not take this rank.
        WorkerError: the worker has died, or rank 0 has before it took the worker.
    """
    line = _connected(flags)
    _say(line, rank=flags.trainer_rank, flags=_shared(flags), gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    print(f"[Setup] trainer rank {flags.trainer_rank} has joined rank 0", flush=True)
    told = _hear(line, START_SECONDS, "rank 0")
    if "fault" in told:
        raise ConfigError(
            told["fault"],
            where=f"{COMMAND} --trainer-rank {flags.trainer_rank}",
            remedy="use the same flags",
        )
    from instep.cluster.local import CONNECTION_VARIABLE

    worker = SupervisedProcess(
        f"actor rank {flags.trainer_rank}",
        [sys.executable, "-m", "instep.cluster.worker_main"],
        Path(told["log"]),
        {**told["env"], CONNECTION_VARIABLE: str(line.fileno())},
        [line.fileno()],
        told["heartbeat"],
    )
    try:
        _say(line, pid=worker.pid)
        line.close()  # the worker has it
        while (fault := worker.fault()) is None:
            time.sleep(LOOK_SECONDS)
        if fault.startswith("died with exit code 0") or "SIGTERM" in fault:  # rank 0 has ended it
            print("rank 0 has ended, and this rank with it", flush=True)
            return
        raise WorkerError(f"{worker.name} {fault}", where=worker.describe(), remedy="see rank 0; start all ranks anew")
    finally:
        worker.stop()


def _connected(flags: argparse.Namespace) -> Connection:
    deadline = time.monotonic() + MEET_SECONDS
    while time.monotonic() < deadline:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(_place(flags))
        except OSError:
            line.close()
            time.sleep(0.2)
            continue
        if _own_user(line):
            return Connection(line.detach())
        line.close()
        break
    raise ConfigError(
        f"no trainer of rank 0 is there within {MEET_SECONDS:.0f} s",
        where=f"{COMMAND} --trainer-rank {flags.trainer_rank} --save-path {flags.save_path}",
        remedy="start rank 0 on this host, with the same `--save-path`",
    )

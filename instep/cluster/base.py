"""The common part of the clusters of a run, on one host or on several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from instep.arguments.args import Args
from instep.arguments.roles import args_of_role
from instep.arguments.rollout import context_of_model
from instep.cluster.engine_plan import elsewhere, plan_engines
from instep.cluster.local import WorkerGroup
from instep.engines.engine import Engine
from instep.engines.spec import EngineSpec
from instep.errors import EngineError
from instep.system.processes import Ending, Process, stop_all

END_SECONDS = 60.0  # for a killed engine to end, perhaps on another host


class JointProcess(Ending):
    """The processes of an engine on several nodes as one `processes.Process`, which lives as long as all of them.

    The first of `parts` runs on the engine's first node, which answers for all.
    """

    def __init__(self, parts: Sequence[Process]):
        self.parts = list(parts)
        self.name, self.log_path, self.pid = parts[0].name, parts[0].log_path, parts[0].pid

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


class Cluster:
    """The workers and engines of a run.

    Attributes:
        workers, critic: after `start` the ranks of the actor and of PPO's critic; an empty group for a missing role.
        engines: the engines; they are not ready yet when `start` returns.
        one_host: after `start` whether this process, rank 0 of the actor and all engines that get its weights share a
            host.
        room: after `start` the file for which engines wait before they touch a GPU; it is made when the trainer has
            left the GPUs. None: engines do not wait.
        setup_requests: after `start` the arguments of `Worker.setup` for each role, rank by rank.
    """

    def __init__(self, args: Args, *, log_dir: Path, with_engines: bool):
        self._args, self._log_dir, self._with_engines = args, log_dir, with_engines
        self._specs = plan_engines(args) if with_engines else []
        self.workers, self.critic = (WorkerGroup(role, 0, log_dir) for role in ("actor", "critic"))
        self.engines: list[Engine] = []
        self.one_host = not elsewhere(args)
        self.room: Path | None = None
        self.setup_requests: dict[str, list[tuple[Any, ...]]] = {}

    def start(self) -> None:
        """Start all processes."""
        raise NotImplementedError

    def _start_engine(self, spec: EngineSpec, port: int | None = None) -> Engine:
        """Start an engine; `port` is the port of a restarted engine."""
        raise NotImplementedError

    def _role_args(self, role: str) -> Args:
        return args_of_role(self._args, role).replace(vllm_max_model_len=context_of_model(self._args))

    def _start_engines(self) -> None:
        for spec in self._specs:
            self.engines.append(self._start_engine(spec))
        for engine in (engine for engine in self.engines if engine.role == "decode"):
            engine.prefills = [e for e in self.engines if (e.model, e.role) == (engine.model, "prefill")]

    def restart_engine(self, index: int, checkpoint: Path | None = None) -> None:
        """End the rest of an engine and start it again at its address, as another `process`.

        Args:
            checkpoint: the new checkpoint, under the same name; None: the checkpoint of the plan.
        """
        engine = self.engines[index]
        assert engine.process is not None
        engine.stop()
        parts: list[Process] = engine.process.parts if isinstance(engine.process, JointProcess) else [engine.process]
        if not all(part.died_within(END_SECONDS) for part in parts):
            raise EngineError(
                f"{engine.name} does not end",
                where=engine.process.describe(),
                remedy="end it on its host: its process is named above",
            )
        started = self._start_engine(self._specs[index].on(checkpoint), urlsplit(engine.url).port)
        engine.process, engine.bootstrap_port = started.process, started.bootstrap_port

    def close(self) -> None:
        """End all processes, also after a `start` that failed."""
        engines = [engine.process for engine in self.engines if engine.process is not None]
        stop_all([*self.workers.processes, *self.critic.processes, *engines], grace=2.0)

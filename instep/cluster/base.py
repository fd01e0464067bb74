"""What the clusters of a run do alike, on one host and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from instep.arguments.args import Args
from instep.arguments.roles import args_of_role
from instep.arguments.rollout import context_of_model
from instep.cluster.engine_plan import elsewhere, plan_engines
from instep.cluster.joint import JointProcess
from instep.cluster.local import WorkerGroup
from instep.engines.engine import Engine
from instep.engines.spec import EngineSpec
from instep.errors import EngineError
from instep.system.processes import Process, stop_all

END_SECONDS = 60.0  # until an engine that was killed has ended, perhaps on another host


class Cluster:
    """The workers and engines of a run.

    Attributes:
        workers, critic: after `start` the ranks of the actor and of PPO's critic; empty groups without such a role.
        engines: the engines, which are not ready yet when `start` returns.
        one_host: after `start` whether this process, rank 0 of the actor and all engines that get its weights share a
            host.
        room: after `start` the file without which no engine touches a GPU, made when the trainer has left them; None:
            engines do not wait.
        setup_requests: after `start` for each role the arguments of `Worker.setup`, rank by rank.
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
        """Start an engine; `port` is that of one that is restarted."""
        raise NotImplementedError

    def _role_args(self, role: str) -> Args:
        return args_of_role(self._args, role).replace(vllm_max_model_len=context_of_model(self._args))

    def _start_engines(self) -> None:
        for spec in self._specs:
            self.engines.append(self._start_engine(spec))

    def restart_engine(self, index: int, checkpoint: Path | None = None) -> None:
        """End what is left of an engine and start it again at its address; this replaces its `process`.

        Args:
            checkpoint: what it serves then, under the same name; None: what the plan says.
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
        engine.process = self._start_engine(self._specs[index].on(checkpoint), urlsplit(engine.url).port).process

    def close(self) -> None:
        """End all processes, even after a `start` that failed half-way."""
        engines = [engine.process for engine in self.engines if engine.process is not None]
        stop_all([*self.workers.processes, *self.critic.processes, *engines], grace=2.0)

"""An environment of a run: the run's own processes that serve it, or a server that runs already."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from instep.arguments.settings import HookSettings
from instep.errors import ConfigError, EngineError
from instep.rollout import runtime
from instep.system.processes import SupervisedProcess, stop_all
from instep.system.run_context import PerRun
from instep.system.scratch import Scratch
from instep_neighbours.verifiers.client import Client, ServerLostError, require_packages

logger = logging.getLogger(__name__)

HOST = Path(__file__).with_name("host.py")
ANSWER_SECONDS = 8.0  # for a server at --env-address to answer
BACK_SECONDS = 3.0  # for an answer after its connection has ended or (client.py) was silent
END_SECONDS = 10.0  # for a server to end the programs and sandboxes of its episodes
MAX_TRIES = 3  # of an episode whose server ends
LONGEST_PATH = 90  # characters; the name of a Unix socket has at most 107
_environments: PerRun[dict[str, Environment]] = PerRun(dict)  # by their settings


def environment_of(args: HookSettings, *, evaluation: bool = False) -> Environment:
    """Return the environment of the run, or of its evaluations, which may be the same one.

    Raises:
        ConfigError: the packages of the protocol are missing.
    """
    block, select, serve = settings_of(args, evaluation=evaluation)
    key = json.dumps([block, select, serve], sort_keys=True)
    environments = _environments()
    if key not in environments:
        require_packages()
        name = "env-eval" if evaluation and environments else "env"
        environments[key] = environment = Environment(args, name, block, select, serve)

        async def close() -> None:
            environments.pop(key, None)
            await environment.close()

        runtime.at_shutdown(close)
    return environments[key]


def settings_of(args: HookSettings, *, evaluation: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return verifiers' [env], [select] and [serve]; evaluations take `--env-eval-args` over `--env-args`."""
    given = _merged(args.env_args, (args.env_eval_args or {}) if evaluation else {})
    select, serve = given.pop("select", {}), given.pop("serve", {})
    return _merged(given, {"taskset": {"id": args.env}}), select, serve


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else copy.deepcopy(value)
    return out


class Environment:
    """One environment of a run. Its episodes go to the server with the fewest; if a server ends, they start again.

    Args:
        name: of its logs.
        block, select, serve: verifiers' [env], [select] and [serve]; of [serve] only `max_concurrent` has an effect.

    Attributes:
        folder: for files of this process.
    """

    def __init__(
        self, args: HookSettings, name: str, block: dict[str, Any], select: dict[str, Any], serve: dict[str, Any]
    ):
        self._args, self._name = args, name
        self._settings = {"env": block, "select": select, "serve": serve}
        root = tempfile.gettempdir()
        self._scratch = Scratch("instep-env-", Path(root if len(root) < LONGEST_PATH - 40 else "/tmp"))
        self.folder = self._scratch.path
        self._numbers = itertools.count()
        self._first: tuple[SupervisedProcess, str] | None = None  # writes the tasks, until used
        self._owned: list[SupervisedProcess] = []
        self._clients: list[Client] = []
        self._lock = asyncio.Lock()

    def tasks(self) -> Path:
        """Return the file of its tasks (jsonl), which a process of the environment writes. This call blocks.

        Raises:
            ConfigError: the process ends without them, or does not write them in time.
        """
        path = self.folder / "tasks.jsonl"
        if not path.exists():
            process, address = self._launch(tasks=path)
            deadline = time.monotonic() + self._args.engine_start_timeout
            while not path.exists():
                if (fault := process.fault()) is not None and not path.exists():
                    raise self._no_start(f"its process {fault}", process)
                if time.monotonic() > deadline:
                    raise self._no_start(f"there are no tasks after {self._args.engine_start_timeout:.0f} s", process)
                time.sleep(0.05)
            self._first = (process, address) if address else None
        return path

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one episode; see `Client.run`.

        Raises:
            EngineError: there is no server, or this episode has lost `MAX_TRIES` servers.
            RolloutError: as `Client.run`.
        """
        for _ in range(MAX_TRIES):
            client = await self._least_busy()
            try:
                return await client.run(request)
            except ServerLostError:
                await self._replace(client)
        what = f"an episode has lost {MAX_TRIES} servers of the environment"
        raise EngineError(what, where=str(self._log()), remedy="check what the episode does to its process")

    async def close(self) -> None:
        """End its connections and processes; these get time to end programs and sandboxes, without a wait here."""
        for client in self._clients:
            await client.close()
        self._clients = []

        def end() -> None:
            stop_all(self._owned, grace=END_SECONDS)
            self._scratch.remove()

        threading.Thread(target=end, name="environment's end").start()

    # ---- servers -------------------------------------------------------------------------------------------------

    async def _least_busy(self) -> Client:
        async with self._lock:
            missing = self._args.env_num_servers - len(self._clients)
            if missing:
                self._clients += await runtime.gather([self._connect() for _ in range(missing)])
        return min(self._clients, key=lambda client: client.num_running)

    async def _replace(self, lost: Client) -> None:
        """Replace the server `lost`, unless an earlier call has done so."""
        async with self._lock:
            if lost not in self._clients:
                return
            self._clients.remove(lost)
            await lost.close()
            if (process := lost.process) is not None:
                await runtime.in_daemon_thread(process.died_within, 1.0)
                report = process.describe()
                await runtime.in_daemon_thread(process.stop, 1.0)
                self._owned.remove(process)
                logger.warning("the environment's server has ended and is started again; %s", report)
            self._clients.append(await self._connect(BACK_SECONDS))

    async def _connect(self, seconds: float = ANSWER_SECONDS) -> Client:
        """Return the client of a server that answers; at --env-address within `seconds`. Raises: EngineError,
        ConfigError."""
        if self._uses_theirs is None:
            (process, address), self._first = self._first or self._launch(), None
            client, seconds = Client(address, process), self._args.engine_start_timeout
        else:
            client = Client(self._uses_theirs)
        deadline = time.monotonic() + seconds
        try:
            while not await client.health(seconds if client.process is None else 0.5):
                fault = client.process and client.process.fault()
                if not fault and time.monotonic() < deadline:
                    continue
                if client.process is not None:
                    raise self._no_start(f"its process {fault or 'does not answer'}", client.process)
                what = f"no env server of verifiers answers at {client.address} within {seconds:.0f} s"
                remedy = "start it (docs/neighbours/verifiers.md), or remove --env-address"
                raise EngineError(what, where="--env-address", remedy=remedy)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def _uses_theirs(self) -> str | None:
        """Return the address of a server outside of the run, which serves the trained environment."""
        return self._args.env_address if self._name == "env" else None

    def _launch(self, tasks: Path | None = None) -> tuple[SupervisedProcess, str]:
        """Start a process; with --env-address it only writes tasks, and its own address is empty."""
        number = next(self._numbers)
        address = "" if self._uses_theirs else f"ipc://{self.folder}/{number}"
        config = {**self._settings, "tasks": tasks and str(tasks), "address": address}
        path = self.folder / f"{number}.json"
        path.write_text(json.dumps(config))
        python = self._args.env_python or sys.executable
        if shutil.which(python) is None:
            raise ConfigError(f"{python} cannot be run", where="--env-python", remedy="give the path of a Python")
        argv = [python, "-P", str(HOST), str(path)]
        env = {"PYTHONUNBUFFERED": "1"}
        process = SupervisedProcess(f"the environment's server {number}", argv, self._log(number), env)
        self._owned.append(process)
        return process, address

    def _log(self, number: int | str = "*") -> Path:
        return Path(self._args.run_dir) / "logs" / f"{self._name}-{number}.log"

    def _no_start(self, why: str, process: SupervisedProcess) -> ConfigError:
        remedy = "correct --env, --env-args or --env-python (the environment's module must be installed there, or be "
        remedy += "on PYTHONPATH); or raise --engine-start-timeout, if it only takes longer"
        return ConfigError(
            f"the environment {self._args.env} does not start: {why}", where=process.describe(), remedy=remedy
        )

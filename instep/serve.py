"""`instep serve`: the engines of a run and their router, without a trainer."""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from instep.cluster.imports import preload
from instep.cluster.launch import make_cluster
from instep.controller.device import resolve_on_machine
from instep.controller.fleet import Fleet
from instep.engines import keys
from instep.engines.topology import model_path, policy_model, served_models
from instep.errors import ConfigError
from instep.models.hub import name_of
from instep.system.ports import check_loopback, port_is_free
from instep.system.processes import LOOK_SECONDS, lock_folders

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.arguments.settings import Settings

_console = Console(highlight=False)


def serve(args: Args, before: Callable[[Args, Fleet, Path, Callable[[str], None]], Any] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then end every process that was started.

    Args:
        before: makes the server before the engines, from the resolved arguments, the fleet, the folder of the logs and
            a function that prints a text; None: a request gate is used. Its `start` begins to serve, and returns what
            to print. Its `check` raises InstepError if it does not serve any more, and admits restarted engines. Its
            `close` ends it, also after a failed `start`.

    Raises:
        ConfigError: the port or the folder is taken, or an engine is not installed.
        EngineError: an engine did not start, no engine is left, or the router has died.
    """
    check_loopback()
    logs = Path(args.run_dir) / "logs"
    args = resolve_on_machine(args, with_engines=True)
    preload(args, trainer=False)
    num_routers = len(served_models(args)) if args.vllm_router_ip is None else 0
    for port in range(args.port, args.port + num_routers):
        if not port_is_free(port):
            raise ConfigError(f"port {port} is taken", where="--port", remedy="give a free port")
    with ExitStack() as ends:
        for lock in lock_folders({"--run-dir": args.run_dir}):
            ends.callback(lock.release)
        cluster = make_cluster(args, log_dir=logs, scratch=Path(args.run_dir), with_engines=True, status=_say)
        ends.callback(cluster.close)
        cluster.start()
        for engine in cluster.engines:
            engine.watch = lambda: None  # `wait_ready` detects an early end of the engine, `_watch` a later one
        fleet = Fleet(
            args,
            cluster.engines,
            restart=cluster.restart_engine,
            log_dir=logs,
            status=_say,
            last_comes_back=True,
            with_gates=before is None,
        )
        ends.callback(fleet.close)
        count = len(fleet.engines)
        _say(f"starting {count} {args.rollout_backend} engine{'s' if count > 1 else ''}, logs in {logs}")
        front = before(args, fleet, logs, _say) if before is not None else None
        if front is not None:
            ends.callback(front.close)
        for number in (signal.SIGINT, signal.SIGTERM):  # the end takes two seconds; a second Ctrl-C would not help
            ends.callback(signal.signal, number, signal.SIG_IGN)
        fleet.wait_ready(args.engine_start_timeout)
        fleet.admit(fleet.engines)
        addresses = fleet.hook_attributes()["vllm_model_routers"]
        told = describe(args, fleet, logs, addresses) if front is None else front.start()
        _console.print(*told, sep="\n", markup=False, soft_wrap=True)
        _watch(fleet, front)


def _watch(fleet: Fleet, front: Any) -> None:
    try:
        while True:
            fleet.check()
            if front is not None:
                front.check()
            for engine in fleet.waiting() if front is None else ():
                fleet.admit([engine])
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        _say("ending")


def describe(
    args: Settings,
    fleet: Fleet,
    logs: Path,
    addresses: Mapping[str, tuple[str, int]],
    more: Sequence[tuple[str, str]] = (),
) -> tuple[Table, str]:
    """Return a table of the served models with their addresses (by name) and engines, and examples of requests.

    Args:
        more: additional rows.
    """
    models = served_models(args)
    default = policy_model(models)
    table = Table(title="instep serve", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for model in models:
        if model.name in addresses:  # not a placeholder
            table.add_row("model", model_path(args, model))
            table.add_row("  address", "http://{}:{}/v1".format(*addresses[model.name]))
            for engine in fleet.of_model(model.name):
                what = f"{engine.kind.name} {engine.capabilities.version}".rstrip()
                role = "" if engine.role == "regular" else f"{engine.role}, "
                table.add_row(f"  {engine.name}", f"{role}{what} on {args.device}, {engine.url}")
    open_to_all = "none: anyone on this host may generate (--no-api-key)"
    key = open_to_all if args.no_api_key else args.api_key_file or str(logs.parent / keys.KEY_FILE)
    table.add_row("key", key)
    for row in more:
        table.add_row(*row)
    table.add_row("logs", str(logs))
    url, path = "http://{}:{}".format(*addresses[default.name]), model_path(args, default)
    path = (name_of(path) or [path])[0]  # engines also serve a model of the hub by its name
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": path, "messages": messages, "max_tokens": 32})
    header = "" if args.no_api_key else f'-H "Authorization: Bearer $(cat {shlex.quote(key)})" '
    python = '"-"' if args.no_api_key else f'open("{key}").read().strip()'
    return table, (
        f"curl {url}/v1/chat/completions {header}-H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
        f'python: openai.OpenAI(base_url="{url}/v1", api_key={python}).chat.completions.create('
        f'model="{path}", messages={json.dumps(messages)}, max_tokens=32)\n'
        "Ctrl-C ends it."
    )


def _say(text: str) -> None:
    _console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, soft_wrap=True)

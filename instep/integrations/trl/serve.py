"""`instep vllm-serve`: the engines of `instep serve` behind the routes of TRL's own clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from instep.arguments import parse
from instep.checkpoints.hf_export import check_files, check_hf_checkpoint
from instep.controller.device import resolve_on_machine
from instep.engines import keys
from instep.engines.kind import engine_dtype
from instep.engines.topology import model_path, policy_model, served_models
from instep.errors import ConfigError, EngineError
from instep.integrations.trl.command_line import COMMAND, LEVELS, Serving, read
from instep.scratch import Scratch, memory_root
from instep.serve import serve
from instep.weights.place import SYNC

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.controller.fleet import Fleet

NOT_PROVEN = (
    "each update brings every weight once, finite, with its shape, and engines hold these bytes and compute with them; "
    "that they are what the trainer computes with is not shown: it has no log-probs to compare with"
)


def vllm_serve(argv: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM. Raises InstepError, as `instep.serve.serve` does."""
    serving = read(argv)
    args = parse(serving.words, "serve")
    if args.vllm_router_ip is not None or args.rollout_external_engine_addrs or len(served_models(args)) > 1:
        what = "a server for a trainer has one model, and engines and a router of its own"
        raise ConfigError(what, where=COMMAND, remedy="leave out --vllm-router-ip and further models of --vllm-config")
    check_hf_checkpoint(args.hf_checkpoint)
    check_files(args.hf_checkpoint, needs_chat_template=False)
    vllm = resolve_on_machine(args, with_engines=True).rollout_backend == "vllm"
    if vllm:
        words = [] if "max_logprobs" in args.vllm_overrides else ["--vllm-max-logprobs", "-1"]
        if "uvicorn_log_level" not in args.vllm_overrides and serving.log_level != "info":
            words += ["--vllm-uvicorn-log-level", serving.log_level]
        args = parse([*serving.words, *words], "serve")
    serve(
        args.replace(sync_timeout=serving.sync_timeout),
        lambda args, fleet, logs, say: Port(serving, args, fleet, logs, say),
    )


class Port:
    """The port of the server, in this process, and the weight updates that come by it (`instep.serve.Before`)."""

    def __init__(self, serving: Serving, args: Args, fleet: Fleet, logs: Path, say: Callable[[str], None]):
        from instep.integrations.trl.front import Front
        from instep.integrations.trl.staging import Layout, dtype_of
        from instep.integrations.trl.updates import Updates

        self._serving, self._args, self._logs = serving, args, logs
        self._memory = Scratch(f"{SYNC}{os.getpid()}-", memory_root())
        layout = Layout(
            Path(args.hf_checkpoint),
            dtype_of(engine_dtype(args)),
            int(args.update_weight_buffer_size),
            args.trust_remote_code,
        )
        self._updates = Updates(args, fleet, layout, self._memory.path, logs, serving.host, say)
        # On loopback TRL's clients need no key, unless one is given.
        self._key = "" if args.no_api_key else keys.given_key(args)
        host, port = (fleet.hook_attributes()[name] for name in ("vllm_router_ip", "vllm_router_port"))
        model = model_path(args, policy_model(served_models(args)))
        url = f"http://{host}:{port}"
        self._front = Front(args, url, model, self._key, serving.host, self._updates, fleet.serves)
        self._num_engines = len(fleet.engines)
        _log_requests(logs / "front.log", serving.log_level)

    def start(self) -> Table:
        try:
            self._front.start()
        except OSError as error:
            what = f"cannot listen at {self._serving.host}:{self._args.port}: {error}"
            remedy = "name an address of this host, and a free port"
            raise ConfigError(what, where="--host and --port", remedy=remedy) from error
        table = Table(title=COMMAND, show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        args, host = self._args, self._serving.host
        engines = f"{self._num_engines} {args.rollout_backend} on {args.device}, {args.precision}"
        table.add_row("model", str(args.hf_checkpoint))
        table.add_row("engines", engines)
        table.add_row("address", f"http://{host}:{args.port}")
        who = "anybody on this host" if self._serving.on_loopback else "ANYBODY who reaches this address"
        open_to = f"none: {who} may ask for texts and send weights"
        given = args.api_key_file or f"that of {keys.KEY_VARIABLE}"
        table.add_row("key", f"{given}; clients name http://user:KEY@{host}:{args.port}" if self._key else open_to)
        table.add_row("weights", f"by {'NCCL' if args.device == 'cuda' else 'gloo'}; {NOT_PROVEN}")
        table.add_row("logs", str(self._logs))
        return table

    def check(self) -> None:
        try:
            self._front.check()
        except RuntimeError as error:
            raise EngineError(str(error), where=str(self._logs), remedy=f"start {COMMAND} again") from error

    def close(self) -> None:
        self._front.close()
        self._updates.close()
        self._memory.remove()


def _log_requests(path: Path, level: str) -> None:
    """Write a line for each request, as uvicorn does at this level."""
    logger = logging.getLogger("aiohttp.access")
    logger.propagate = False
    logger.setLevel(logging.INFO if LEVELS.index(level) >= LEVELS.index("info") else logging.CRITICAL)
    logger.handlers = [logging.FileHandler(path, delay=True)]
    logger.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s"))

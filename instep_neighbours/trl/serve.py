"""`instep vllm-serve`, and the port of `instep serve`: engines behind the routes of TRL's own clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from instep.arguments.lora import quantization
from instep.arguments.parse import parse
from instep.checkpoints.hf_export import check_files, check_hf_checkpoint
from instep.controller.device import resolve_on_machine
from instep.engines import keys
from instep.engines.kind import served_dtype
from instep.engines.topology import model_path, policy_model, served_models
from instep.errors import ConfigError, EngineError
from instep.models.config_file import read_config
from instep.serve import describe, serve
from instep.system.scratch import memory_scratch
from instep_engine.guard import EVERYONE
from instep_engine.place import SYNC
from instep_neighbours.trl.command_line import COMMAND, LEVELS, Serving, help_text, read

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.controller.fleet import Fleet
    from instep_neighbours.trl.staging import Layout

NOT_PROVEN = (
    "each update brings every weight once, finite, with its shape, and engines hold these bytes and compute with them; "
    "it is not proven that the trainer computes with them: it has no log-probs to compare with"
)


def vllm_serve(argv: Sequence[str]) -> None:
    """Run the command: serve until SIGINT or SIGTERM. Raises InstepError, as `instep.serve.serve` does."""
    if "-h" in argv or "--help" in argv:
        print(help_text())
        return
    serving = read(argv)
    args = _parsed(serving.words)
    if port_of_serve(args) is None:
        what = "a server for a trainer has one model, and its own engines and router"
        raise ConfigError(what, where=COMMAND, remedy="remove --vllm-router-ip and further models of --vllm-config")
    check_hf_checkpoint(args.hf_checkpoint)
    check_files(args.hf_checkpoint, needs_chat_template=False)
    vllm = resolve_on_machine(args, with_engines=True).rollout_backend == "vllm"
    if vllm:
        words = [] if "max_logprobs" in args.vllm_overrides else ["--vllm-max-logprobs", "-1"]
        if "uvicorn_log_level" not in args.vllm_overrides and serving.log_level != "info":
            words += ["--vllm-uvicorn-log-level", serving.log_level]
        args = _parsed([*serving.words, *words])
    serve(args, partial(Port, serving=serving))


def _parsed(words: Sequence[str]) -> Args:
    """Return the arguments of `instep serve`. Raises ConfigError, which names this command."""
    try:
        return parse(words, "serve")
    except ConfigError as error:
        what, where, remedy = (t.replace("instep serve", COMMAND) for t in (error.what, error.where, error.remedy))
        raise ConfigError(what, where=where, remedy=remedy) from None


def port_of_serve(args: Args) -> Callable[[Args, Fleet, Path, Callable[[str], None]], Port] | None:
    """Return what `instep serve` puts before its engines; None if a request gate without weights is there."""
    models = served_models(args)
    others = args.vllm_router_ip is not None or bool(args.rollout_external_engine_addrs)
    if others or len(models) > 1 or not policy_model(models).update_weights:
        return None
    return Port


class Port:
    """The server's port, in this process, and its weight updates (`instep.serve.Before`).

    Args:
        serving: of `instep vllm-serve`, which is open without a key; None: of `instep serve`, which never is.
    """

    def __init__(
        self, args: Args, fleet: Fleet, logs: Path, say: Callable[[str], None], serving: Serving | None = None
    ):
        from instep_neighbours.trl.clients import Access
        from instep_neighbours.trl.front import Front
        from instep_neighbours.trl.updates import Updates

        self._command = "instep serve" if serving is None else COMMAND
        self._serving = serving = serving or Serving(log_level="warning")
        args = args.replace(sync_timeout=serving.sync_timeout)
        self._args, self._logs, self._fleet = args, logs, fleet
        self._files: list[Path] = []
        folder, generate = Path(args.run_dir), EVERYONE if args.no_api_key else keys.client_key(args)
        if self._command == COMMAND:  # on loopback TRL's clients need a key only if one is set
            access = Access("" if args.no_api_key else keys.given_key(args))
        else:
            access = Access(keys.run_key(), generate, str(folder / keys.CONTROL_FILE))
        self._access, self._layout = access, _layout(args)
        if self._layout.refusal and self._command == COMMAND:
            remedy = "serve a model of transformers in full precision; `instep serve` serves its texts only"
            raise ConfigError(self._layout.refusal, where=f"{COMMAND} --model", remedy=remedy)
        self._memory = memory_scratch(f"{SYNC}{os.getpid()}-")
        self._updates = Updates(args, fleet, self._layout, self._memory.path, logs, serving.host, say)
        host, port = (fleet.hook_attributes()[name] for name in ("vllm_router_ip", "vllm_router_port"))
        model = model_path(args, policy_model(served_models(args)))
        url = f"http://{host}:{port}"
        self._front = Front(args, url, model, access, serving.host, self._updates, fleet.serves)
        _log_requests(logs / "front.log", serving.log_level)
        if self._command != COMMAND:
            self._files = [keys.write(folder, keys.run_key(), keys.CONTROL_FILE)]
            self._files += [] if args.no_api_key else [keys.write(folder, generate)]

    def start(self) -> tuple[Table, str]:
        try:
            self._front.start()
        except OSError as error:
            what = f"cannot listen at {self._serving.host}:{self._args.port}: {error}"
            remedy = "use an address of this host, and a free port"
            raise ConfigError(what, where="--host and --port", remedy=remedy) from error
        if self._command != COMMAND:
            address = f"http://user:$(cat {self._access.key_file})@{self._serving.host}:{self._args.port}"
            none, why = f"refused: {self._layout.refusal}", self._layout.refusal
            rows = [("trainers", none if why else f"{address} (docs/neighbours/trl.md has the proofs)")]
            model = policy_model(served_models(self._args)).name
            at = {model: (self._serving.host, int(self._args.port or 0))}
            return describe(self._args, self._fleet, self._logs, at, rows)
        args, address = self._args, f"{self._serving.host}:{self._args.port}"
        who = "any process on this host" if self._serving.on_loopback else "ANY process that reaches this address"
        key = f"none: {who} may request texts and send weights"
        if self._access.key:
            key = f"{args.api_key_file or f'that of {keys.KEY_VARIABLE}'}; clients name http://user:KEY@{address}"
        table = Table(title=COMMAND, show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        engines = f"{len(self._fleet.engines)} {args.rollout_backend} on {args.device}, {served_dtype(args)}"
        table.add_row("model", str(args.hf_checkpoint))
        table.add_row("engines", engines)
        table.add_row("address", f"http://{address}")
        table.add_row("key", key)
        table.add_row("weights", f"by {'NCCL' if args.device == 'cuda' else 'gloo'}; {NOT_PROVEN}")
        table.add_row("logs", str(self._logs))
        return table, "Ctrl-C ends it."

    def check(self) -> None:
        try:
            self._front.check()
        except RuntimeError as error:
            raise EngineError(str(error), where=str(self._logs), remedy=f"start {self._command} again") from error

    def close(self) -> None:
        self._front.close()
        self._updates.close()
        self._memory.remove()
        for file in self._files:
            file.unlink(missing_ok=True)


def _layout(args: Args) -> Layout:
    """Return the layout of the weights that a trainer may send, or the reason why it may send no weights."""
    from instep_neighbours.trl.staging import Layout, dtype_of

    folder = Path(args.hf_checkpoint)
    if quantization(args) or read_config(folder).get("quantization_config"):
        return Layout("the engines' weights are quantized, so they would differ from a trainer's")
    try:
        dtype = dtype_of(served_dtype(args))
        return Layout.of(folder, dtype, int(args.update_weight_buffer_size), args.trust_remote_code)
    except Exception as error:  # noqa: BLE001 - of transformers, for a model that it does not have; the user hears of it
        return Layout(f"transformers cannot build this model: {error}")


def _log_requests(path: Path, level: str) -> None:
    """Write a line for each request, as uvicorn does at this level."""
    logger = logging.getLogger("aiohttp.access")
    logger.propagate = False
    logger.setLevel(logging.INFO if LEVELS.index(level) >= LEVELS.index("info") else logging.CRITICAL)
    logger.handlers = [logging.FileHandler(path, delay=True)]
    logger.handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s"))

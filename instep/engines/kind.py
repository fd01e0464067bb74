"""A kind of engine is one object, which says how its engines are chosen, started, controlled, updated and watched.

No other code depends on which kind it has. A further kind is a module with a `KIND`, and a line in `_BUILT_IN`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from instep.engines.spec import Addresses, EngineSpec
from instep.engines.topology import ServerGroup
from instep.errors import ConfigError
from instep.system.spans import Span

if TYPE_CHECKING:
    from instep.arguments.settings import Settings
    from instep.engines.wire import WireFormat  # a command line does not need it

SHARED_MEMORY_REMEDY = "enlarge /dev/shm (docker: --shm-size), or use --weight-sync shm, which needs two buckets there"
NO_SHARED_MEMORY = "of weights do not fit into"  # what an engine says that finds no room there
AUTO = "auto"  # the value of --rollout-backend that stands for a kind


@dataclass(frozen=True)
class Capabilities:
    """What one engine offers. What it lacks is done in another, stated way, or refused.

    Attributes:
        engine: its name in errors; version: empty for an engine that is part of instep.
        version_spans: its answers say which weight version made each token. Without that (vLLM 0.26) the client notes
            the version, which is exact because no request is under way when it changes (`rollout/admission.py`).
        spans_in_arrays: its answers in arrays say it, at least. The pause mode `keep`, which mixes versions in a
            response, wants one of the two; under it tokens of other answers are of unknown versions.
        stop_reasons: its answers say which stop token or string ended a response. Without that (vLLM 0.26) the client
            looks for the stop string that the last token completed (`rollout/tokens.py`).
        digests: `/weight_checker` gives a digest of every weight under its Hugging Face name. vLLM's own covers neither
            those names nor packed weights; there a failed proof names no tensors.
        strict_requests: an unknown parameter is an error. vLLM ignores it, so the client checks the names.
        serves_nothing_unproven: the engine itself answers 503 after a failed session. vLLM is kept paused by instep.
    """

    engine: str
    version: str = ""
    version_spans: bool = True
    spans_in_arrays: bool = False
    stop_reasons: bool = True
    digests: bool = False
    strict_requests: bool = False
    serves_nothing_unproven: bool = False

    def tells_versions(self, *, arrays: bool) -> bool:
        """Whether its answers, in arrays or in JSON, say which weights made each token."""
        return self.version_spans or (self.spans_in_arrays and arrays)

    def check_pause(self, mode: str, *, arrays: bool) -> None:
        """Raise ConfigError if the weight versions of tokens would be unknown under this `--pause-mode`.

        Args:
            arrays: whether the engine answers in arrays (`kind.answers_in_arrays`).
        """
        if mode == "keep" and not self.tells_versions(arrays=arrays):
            raise ConfigError(
                f"{self.engine} {self.version} does not say in JSON which weights made a token, so a response that "
                "goes on after a sync would have unknown versions",
                where="--pause-mode keep",
                remedy="use abort or wait, or engines that this run starts, without --no-fast-log-probs, --vllm-config "
                f"and --vllm-scheduler-cls, or a newer {self.engine}",
            )


class RunningEngine(Protocol):
    """What a kind needs of a running engine; `engine.Engine` is one."""

    name: str
    url: str
    update_weights: bool
    num_replicas: int

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float, **query: Any
    ) -> dict[str, Any]: ...


class EngineKind(Protocol):
    """What differs between kinds of engines. A method with a body speaks vLLM's routes.

    Attributes:
        name: the value of `--rollout-backend`; title: what messages call it.
        auto_device: the device on which `auto` chooses it, cuda or cpu; "" if never.
        max_num_gpus: most GPUs of one engine; None: any number.
        own_gpus: whether an engine must see exactly the GPUs that the plan gives it.
        waits_for_room: whether its engines touch no GPU before the file of ROOM_VARIABLE is there.
        needs_router: whether even a single engine stands behind a router.
        sends_heartbeats: whether silence of its process for `--heartbeat-timeout` means that it no longer computes.
        dequantizes: whether its engines dequantize a quantized checkpoint when they load it.
        dying_seconds: how long its server may live on after the process that computes has died.
        core_route: a GET that only what computes can answer, not the HTTP server by itself.
        state_routes: GETs that say what an engine is doing, for a dump.
        capabilities: what its engines offer; for the kind of a running engine, what that engine offers.
        wire: the wire format of its requests and answers.
    """

    name: str
    title: str
    auto_device: str = ""
    max_num_gpus: int | None = None
    own_gpus: bool = False
    waits_for_room: bool = False
    needs_router: bool = False
    sends_heartbeats: bool = True
    dequantizes: bool = False
    dying_seconds: float = 0.0
    core_route: str = "/is_paused"
    state_routes: tuple[str, ...] = ("/is_paused", "/weight_info")

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def wire(self) -> WireFormat: ...

    # ---- the choice, and a command line ------------------------------------------------------------------------------

    def meant_by(self, args: Settings) -> str:
        """The flags that are given and only this kind has, for which `auto` chooses it; "" if there are none."""
        return ""

    def refusals(self, args: Settings) -> Iterator[ConfigError]:
        """Errors about everything that the arguments ask for and this kind does not have."""
        yield from ()

    def sampling_defaults(self, args: Settings) -> dict[str, Any]:
        """The sampling parameters that the policy's engines take on OpenAI's routes where a request gives none."""
        return {}

    def check_installed(self, where: str) -> None:
        """Raise ConfigError if it is not installed on this host; `where` says what has chosen the kind."""
        return

    # ---- plan and start ----------------------------------------------------------------------------------------------

    def own_words(
        self, args: Settings, group: ServerGroup, words: Mapping[str, list[str]], update_weights: bool
    ) -> dict[str, list[str]]:
        """What instep adds to the command line of the engines of `group`, by field.

        Args:
            words: what flags and overrides say already.
            update_weights: whether the engines get the trainer's weights.
        """
        if args.chat_template is None or not update_weights:
            return {}
        return {"chat_template": ["--chat-template", args.chat_template]}

    def plan_line(self, spec: EngineSpec, at: Addresses, node_rank: int, node_host: str) -> str:
        """The command line that `instep plan` shows for the engine's process on `node_host`; "" if it shows none."""
        return ""

    def check_start(self, args: Settings, spec: EngineSpec) -> None:
        """Raise ConfigError for an engine that would start but fail at its first request."""
        return

    def command(self, args: Settings, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
        """The arguments of the Python interpreter for the process on the engine's `node_rank`-th node."""
        ...

    def environment(
        self, args: Settings, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int
    ) -> dict[str, str]:
        """The variables added to the environment of the process on `node_host`; the caller adds its GPUs."""
        ...

    # ---- an engine that runs -----------------------------------------------------------------------------------------

    def identify(self, engine: RunningEngine) -> EngineKind | None:
        """The kind of an external engine, if it is this one; None if not. Sets its `num_replicas`.

        Raises:
            ConfigError: the engine is of this kind, but instep cannot use it as it was started.
            OSError, ValueError, KeyError: it gives no answer, or one of another form.
        """
        ...

    def read_refusal(self, error: Mapping[str, Any]) -> tuple[str, str | None]:
        """The message of the `error` that answers a refused control call, and the tensor (see `EngineRefusal`)."""
        return str(error["message"]), error.get("tensor")

    def start_remedy(self, log: str) -> str:
        """What to do about an engine that has ended before it was ready, by the end of its log; "" if unknown."""
        return SHARED_MEMORY_REMEDY if NO_SHARED_MEMORY in log else ""

    def core_patience(self, heartbeat_timeout: float) -> float | None:
        """Seconds after which an unanswered `core_route` means that the engine hangs; None: it need not be asked."""
        return None

    def pause(self, engine: RunningEngine, mode: str, *, timeout: float) -> None:
        """Stop generating; `mode` is that of `--pause-mode`."""
        engine.post("/pause", timeout=timeout, mode=mode)

    def lease(self, about: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Route and body of the call that begins or renews the lease of a pause; None: the kind has none.

        When it has not been renewed in time, the engine goes on by itself, or ends. It is for external engines: others
        end with this process.

        Args:
            about: what `instep_engine/lease.py` reads.
        """
        return None

    def reset_cache(self, engine: RunningEngine, *, timeout: float) -> bool | None:
        """Drop the cached keys and values, which were computed with former weights; False if some are still in use."""
        return engine.post("/reset_prefix_cache", timeout=timeout).get("success") is not False

    def resume(self, engine: RunningEngine, *, timeout: float) -> None:
        engine.post("/resume", timeout=timeout)

    def sleep(self, engine: RunningEngine, level: int, *, timeout: float) -> None:
        """Free the memory of weights and KV cache; level 1 keeps the weights on the host, level 2 drops them."""
        engine.post("/sleep", timeout=timeout, level=level, mode="abort")

    def wake(self, engine: RunningEngine, tag: str, *, timeout: float) -> None:
        """Take the memory of `tag` again, weights or kv_cache; weights that were dropped are undefined."""
        engine.post("/wake_up", timeout=timeout, tags=tag)

    def weight_digests(self, engine: RunningEngine, *, timeout: float) -> dict[str, str]:
        """The digest of each weight by its Hugging Face name; needs the capability `digests`."""
        checksums: dict[str, str] = engine.post("/weight_checker", {"action": "checksum"}, timeout=timeout)["checksums"]
        return checksums

    def start_profile(self, engine: RunningEngine, *, timeout: float) -> None:
        """Record from now on what the engine does."""
        engine.post("/start_profile", timeout=timeout)

    def stop_profile(self, engine: RunningEngine, folder: Path, *, timeout: float) -> list[Span]:
        """End that; returns what the engine did. An engine of this run may have written it into `folder`."""
        engine.post("/stop_profile", timeout=timeout)
        return []

    # ---- a weight session (docs/architecture.md): start, any number of updates, finish -------------------------------

    def num_workers(self, engine: RunningEngine, timeout: float) -> int:
        """How many of its processes take weights."""
        return 1

    def num_cached_tokens(self, engine: RunningEngine, timeout: float) -> float:
        """How many tokens its KV caches hold; infinity where it is not known, or where nothing is thrown out."""
        return math.inf

    def start_update(self, engine: RunningEngine, version: str, nonce: str, *, timeout: float) -> None:
        """Begin a weight session; an earlier one that never ended is abandoned."""
        engine.post("/start_weight_update", {"version": version, "nonce": nonce}, timeout=timeout)

    def update(self, engine: RunningEngine, info: dict[str, Any], *, timeout: float) -> None:
        """Let the engine check and load one bucket, or a checkpoint on disk."""
        engine.post("/update_weights", {"update_info": info}, timeout=timeout)

    def finish_update(self, engine: RunningEngine, version: str, names: Sequence[str], *, timeout: float) -> None:
        """End the session; the engine refuses if one of `names`, or another weight of the model, was not delivered."""
        engine.post("/finish_weight_update", {"weight_version": version}, timeout=timeout)


_BUILT_IN = {"embedded": "instep.engines.embedded.kind", "vllm": "instep.engines.vllm"}
_registered: dict[str, EngineKind] = {}


def register(kind: EngineKind) -> None:
    """Add a kind that is not part of instep. Call it before `instep.arguments` is imported, which reads the names."""
    _registered[kind.name] = kind


def kind_names() -> tuple[str, ...]:
    return (*_BUILT_IN, *_registered)


def kind_of(name: str) -> EngineKind:
    """The kind that `--rollout-backend NAME` means."""
    if name in _registered:
        return _registered[name]
    return _built_in(name)


@functools.cache  # it is asked for with every request
def _built_in(name: str) -> EngineKind:
    kind: EngineKind = importlib.import_module(_BUILT_IN[name]).KIND
    return kind


def all_kinds() -> list[EngineKind]:
    return [kind_of(name) for name in kind_names()]


def named_kind(args: Settings) -> EngineKind | None:
    """The kind of `--rollout-backend`; None for an `auto` that is not resolved yet."""
    return None if args.rollout_backend == AUTO else kind_of(args.rollout_backend)


def planned_kind(args: Settings) -> EngineKind:
    """The kind of `--rollout-backend`; for an `auto` that is not resolved yet the one that it means beside a GPU."""
    return named_kind(args) or _auto_kind("cuda")


def _auto_kind(device: str) -> EngineKind:
    return next(kind for kind in all_kinds() if kind.auto_device == device)


def resolve_backend(args: Settings) -> str:
    """The name of the kind that `--rollout-backend` means on this host, where `args.device` is resolved.

    `auto` means vLLM beside a GPU and the embedded engine on a CPU, where vLLM takes half a minute to start. The
    embedded engine is never chosen silently where there is a GPU.

    Raises:
        ConfigError: the kind is not installed, or cannot do what `--pause-mode` asks for.
    """
    kind = named_kind(args)
    flags = kind.meant_by(args) if kind is not None else ""
    how = f", which {flags} means" if flags else ""
    if kind is None:
        kind, how = _auto_kind(args.device), f" ({AUTO}, on {args.device})"
    if not args.rollout_external_engine_addrs:  # those say themselves what they are
        kind.check_installed(f"--rollout-backend {kind.name}{how}")
        kind.capabilities.check_pause(args.pause_mode, arrays=answers_in_arrays(args))
    return kind.name


def tells_versions(args: Settings) -> bool:
    """Whether the engines that this run starts surely say which weights made each token, as `--pause-mode keep` wants.

    For `auto`: those of all kinds that are installed here and that it may mean. An engine that says it in arrays alone
    is asked for JSON with stop strings, and maybe by a generate function of the user's own.
    """
    named = named_kind(args)
    arrays = answers_in_arrays(args) and not args.rollout_stop and args.custom_generate_function_path is None
    found = []
    for kind in [named] if named else [kind for kind in all_kinds() if kind.auto_device]:
        with contextlib.suppress(ConfigError):  # of a kind that is not installed; whoever starts it sees it
            kind.check_installed("--rollout-backend")
            found.append(kind.capabilities.tells_versions(arrays=arrays))
    return all(found)


def answers_in_arrays(args: Settings) -> bool:
    """Whether all engines of a run surely answer in arrays, from instep's own scheduler."""
    others = args.rollout_external_engine_addrs or args.vllm_config or "scheduler_cls" in args.vllm_overrides
    return not (args.no_fast_log_probs or others)


def profile_folder(name: str) -> str:
    """The folder in RUN_DIR/profile into which the engine `name` may write."""
    return name.replace(" ", "-")


def engine_dtype(args: Settings) -> str:
    """The dtype of an engine's weights unless `--vllm-dtype` says it: the trainer's. An `auto` of a plan is a GPU's."""
    full = args.precision == "fp32" or (args.precision == "auto" and args.device == "cpu")
    return "float32" if full else "bfloat16"


def served_dtype(args: Settings) -> str:
    """The dtype of an engine's weights, as `--vllm-dtype` says it, too."""
    return engine_dtype(args) if args.vllm_dtype == "auto" else str(args.vllm_dtype)

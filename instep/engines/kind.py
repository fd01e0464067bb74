"""A kind of engine is one object. It says how its engines are chosen, started, controlled, updated and watched.

No other code depends on the kind. A new kind is a module with a `KIND`, and a line in `_BUILT_IN`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from instep.arguments.settings import Settings
from instep.engines.spec import Addresses, EngineSpec
from instep.engines.topology import ServerGroup, ServerRole
from instep.errors import ConfigError
from instep.models.images import with_text
from instep.system.spans import Span
from instep_engine import MISMATCH

if TYPE_CHECKING:
    from instep.engines.router import Router
    from instep.engines.wire import WireFormat

SHARED_MEMORY_REMEDY = "enlarge /dev/shm (docker: --shm-size), or use --weight-sync shm, which needs two buckets there"
NO_SHARED_MEMORY = "of weights do not fit into"  # an engine's message if it finds no room there
AUTO = "auto"  # the value of --rollout-backend that chooses a kind


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of one engine. A missing one is replaced in a documented manner, or refused.

    Attributes:
        engine: its name in errors; version: empty for an engine that is part of instep.
        version_spans: its answers say which weight version made each token. Without that (vLLM 0.26) the client notes
            the version. It is exact because no request is under way when it changes (`rollout/request_gate.py`).
        spans_in_arrays: at least its answers in arrays say it. The pause mode `keep`, which mixes versions in a
            response, needs one of the two. In this mode tokens of other answers have unknown versions.
        stop_reasons: its answers say which stop token or string ended a response. Without that (vLLM 0.26) the client
            looks for the stop string that the last token completed (`rollout/tokens.py`).
        digests: `/weight_checker` gives a digest of every weight under its Hugging Face name. vLLM's own covers neither
            those names nor packed weights; there a failed proof names no tensors.
        strict_requests: an unknown parameter is an error. vLLM ignores it, so the client checks the names.
        serves_nothing_unproven: the engine itself answers 503 after a failed session. instep keeps vLLM paused instead.
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
        """Return whether its answers, in arrays or in JSON, say which weights made each token."""
        return self.version_spans or (self.spans_in_arrays and arrays)

    def check_pause(self, mode: str, *, arrays: bool) -> None:
        """Raise ConfigError if the weight versions of tokens would be unknown under this `--pause-mode`.

        Args:
            arrays: whether the engine answers in arrays (`backend_choice.answers_in_arrays`).
        """
        if mode == "keep" and not self.tells_versions(arrays=arrays):
            raise ConfigError(
                f"{self.engine} {self.version} does not say in JSON which weights made a token, so a response that "
                "continues after a sync would have unknown versions",
                where="--pause-mode keep",
                remedy="use abort or wait, or engines that this run starts, without --no-fast-log-probs, --vllm-config "
                f"and --vllm-scheduler-cls, or a newer {self.engine}",
            )


class RunningEngine(Protocol):
    """The parts of a running engine that a kind uses; `engine.Engine` is one."""

    name: str
    url: str
    update_weights: bool
    num_replicas: int
    role: ServerRole
    bootstrap_port: int | None

    @property
    def prefills(self) -> Sequence[RunningEngine]: ...

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float, **query: Any
    ) -> dict[str, Any]: ...


class EngineKind(Protocol):
    """The differences between kinds of engines. A method with a body uses vLLM's routes.

    Attributes:
        name: the value of `--rollout-backend`; title: its name in messages.
        auto_device: the device on which `auto` chooses it, cuda or cpu; "" if never.
        max_num_gpus: most GPUs of one engine; None: any number.
        own_gpus: whether an engine must see exactly the GPUs that the plan gives it.
        waits_for_room: whether its engines do not use a GPU before the file of ROOM_VARIABLE exists.
        needs_router: whether even a single engine needs a router.
        sends_heartbeats: whether silence of its process for `--heartbeat-timeout` means that it no longer computes.
        dequantizes: whether its engines dequantize a quantized checkpoint when they load it.
        memory_flags: those that bound what its engines take of a GPU, for errors.
        renormalizes: whether its log-probs under a top-p or top-k are of the kept tokens only; else of all tokens.
        dying_seconds: how long its server may live after the computing process has died.
        core_route: a GET that only the computing process can answer, not the HTTP server alone.
        lease_route: a POST that begins or renews a lease; "" without one.
        compares_names: whether it must hear the names of all tensors before the end of a session.
        state_routes: GETs that report the engine's activity, for a dump.
        capabilities: those of its engines; for the kind of a running engine, those of that engine.
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
    memory_flags: str = "--vllm-gpu-memory-utilization or --vllm-kv-cache-memory-bytes"
    renormalizes: bool = True
    dying_seconds: float = 0.0
    core_route: str = "/is_paused"
    lease_route: str = ""
    compares_names: bool = False
    state_routes: tuple[str, ...] = ("/is_paused", "/weight_info")

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def wire(self) -> WireFormat:
        from instep.engines.wire import VLLM_WIRE  # numpy, which a command line does not need

        return VLLM_WIRE

    @property
    def router(self) -> type[Router]:
        """The router that runs start in front of its engines."""
        from instep.engines.router import Router

        return Router

    # ---- the choice, and a command line ------------------------------------------------------------------------------

    def meant_by(self, args: Settings) -> str:
        """Return the given flags that only this kind has, so that `auto` chooses it; "" without such flags."""
        return ""

    def refusals(self, args: Settings) -> Iterator[ConfigError]:
        """Yield errors about everything that the arguments request and this kind does not have."""
        yield from ()

    def sampling_defaults(self, args: Settings) -> dict[str, Any]:
        """Return the sampling defaults of the policy's engines on OpenAI's routes."""
        return {}

    def check_installed(self, where: str) -> None:
        """Raise ConfigError if it is not installed on this host; `where` says what has chosen the kind."""
        return

    def _check_plugin(self, group: str, where: str, remedy: str) -> None:
        """Raise ConfigError unless instep has an entry point in `group`."""
        plugins = importlib.metadata.entry_points(group=group)
        if not any(plugin.value.startswith(f"instep_engine.{self.name}:") for plugin in plugins):
            finds = f"{self.title} finds its plugin only by the entry point"
            raise ConfigError(f"instep can be imported here, but is not installed: {finds}", where=where, remedy=remedy)

    # ---- plan and start ----------------------------------------------------------------------------------------------

    def own_words(
        self, args: Settings, group: ServerGroup, words: Mapping[str, list[str]], update_weights: bool
    ) -> dict[str, list[str]]:
        """Return what instep adds to the command line of the engines of `group`, by field.

        Args:
            words: the words of flags and overrides.
            update_weights: whether the engines get the trainer's weights.
        """
        if args.chat_template is None or not update_weights:
            return {}
        return {"chat_template": ["--chat-template", args.chat_template]}

    def plan_line(self, spec: EngineSpec, at: Addresses, node_rank: int, node_host: str) -> str:
        """Return the command line that `instep plan` shows for the engine's process on `node_host`; "" for none."""
        return ""

    def check_start(self, args: Settings, spec: EngineSpec) -> None:
        """Raise ConfigError for an engine that would start but fail at its first request."""
        return

    def command(self, args: Settings, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
        """Return the arguments of the Python interpreter for the process on the engine's `node_rank`-th node."""
        ...

    def environment(
        self, args: Settings, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int
    ) -> dict[str, str]:
        """Return the variables added to the environment of the process on `node_host`; the caller adds its GPUs."""
        ...

    # ---- a running engine --------------------------------------------------------------------------------------------

    def identify(self, engine: RunningEngine) -> EngineKind | None:
        """Return the kind of an external engine, if it is this one; else None. Set its `num_replicas`.

        Raises:
            ConfigError: the engine is of this kind, but instep cannot use it as it was started.
            OSError, ValueError, KeyError: it gives no answer, or one of another form.
        """
        ...

    def read_refusal(self, error: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the message of the `error` for a refused control call, and the tensor (see `EngineRefusal`)."""
        message = str(error["message"])
        found = MISMATCH.search(message)  # of a plugin
        return (found[2], found[1]) if found else (message, error.get("tensor"))

    def start_remedy(self, log: str) -> str:
        """Return the remedy for an engine that ended before it was ready, by the end of its log; "" if unknown."""
        return SHARED_MEMORY_REMEDY if NO_SHARED_MEMORY in log else ""

    def core_patience(self, heartbeat_timeout: float) -> float | None:
        """Return how long an engine may leave `core_route` unanswered before it counts as hung; None: do not ask it."""
        return None

    def pause(self, engine: RunningEngine, mode: str, *, timeout: float) -> None:
        """Stop generating; `mode` is that of `--pause-mode`."""
        engine.post("/pause", timeout=timeout, mode=mode)

    def lease(self, about: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return route and body of the call that begins or renews the lease of a pause; None: the kind has no leases.

        If it is not renewed in time, the engine resumes by itself, or ends. Leases are for external engines: others end
        with this process.

        Args:
            about: the request, as `instep_engine/lease.py` reads it.
        """
        return (self.lease_route, about) if self.lease_route else None

    def reset_cache(self, engine: RunningEngine, *, timeout: float) -> bool | None:
        """Drop the cached keys and values of old weights. Return False if some are still in use."""
        return engine.post("/reset_prefix_cache", timeout=timeout).get("success") is not False

    def resume(self, engine: RunningEngine, *, timeout: float) -> None:
        engine.post("/resume", timeout=timeout)

    def sleep(self, engine: RunningEngine, level: int, *, timeout: float) -> None:
        """Free the memory of weights and KV cache. Level 1 keeps the weights on the host, level 2 drops them."""
        engine.post("/sleep", timeout=timeout, level=level, mode="abort")

    def wake(self, engine: RunningEngine, tag: str, *, timeout: float) -> None:
        """Allocate the memory of `tag` again, weights or kv_cache. Dropped weights are undefined."""
        engine.post("/wake_up", timeout=timeout, tags=tag)

    def generate(self, engine: RunningEngine, payload: dict[str, Any], *, timeout: float) -> Any:
        """Return this engine's own answer to a request of its wire format."""
        return engine.post(self.wire.generate_route, payload, timeout=timeout)

    def prompt_log_probs(
        self, engine: RunningEngine, tokens: Sequence[int], *, timeout: float, replica: int | None = None
    ) -> list[float]:
        """Return log-probs of `tokens` from the second on, at temperature 1, under the engine's present weights."""
        wire = self.wire
        answer = engine.post(wire.generate_route, wire.scoring_request(tokens), timeout=timeout, replica=replica)
        return wire.prompt_log_probs(answer, tokens, f"{engine.name} at {engine.url}")

    def weight_digests(self, engine: RunningEngine, *, timeout: float) -> dict[str, str]:
        """Return the digest of each weight by its Hugging Face name; needs the capability `digests`."""
        checksums: dict[str, str] = engine.post("/weight_checker", {"action": "checksum"}, timeout=timeout)["checksums"]
        return checksums

    def start_profile(self, engine: RunningEngine, *, timeout: float) -> None:
        """Start to record the engine's activity."""
        engine.post("/start_profile", timeout=timeout)

    def stop_profile(self, engine: RunningEngine, folder: Path, *, timeout: float) -> list[Span]:
        """End the recording and return it. An engine of this run may have written it into `folder`."""
        engine.post("/stop_profile", timeout=timeout)
        return []

    # ---- a weight session (docs/architecture.md): start, any number of updates, finish -------------------------------

    def num_workers(self, engine: RunningEngine, timeout: float) -> int:
        """Return how many of its processes receive weights."""
        return 1

    def num_cached_tokens(self, engine: RunningEngine, timeout: float) -> float:
        """Return how many tokens its KV caches hold; infinity if unknown, or if nothing is evicted."""
        return math.inf

    def drafts(self, engine: RunningEngine, timeout: float) -> tuple[float, float]:
        """Return how many tokens it has drafted and how many of them it has taken, with speculative decoding."""
        return 0.0, 0.0

    def num_generated(self, engine: RunningEngine, timeout: float) -> float | None:
        """Return how many tokens it has generated since it started; None if it does not tell."""
        return None

    def start_update(self, engine: RunningEngine, version: str, nonce: str, *, timeout: float) -> None:
        """Begin a weight session. An earlier unfinished one is abandoned."""
        engine.post("/start_weight_update", {"version": version, "nonce": nonce}, timeout=timeout)

    def update(self, engine: RunningEngine, info: dict[str, Any], *, timeout: float) -> None:
        """Let the engine check and load one bucket, or a checkpoint on disk."""
        engine.post("/update_weights", {"update_info": info}, timeout=timeout)

    def finish_update(self, engine: RunningEngine, version: str, names: Sequence[str], *, timeout: float) -> None:
        """End the session. The engine refuses if one of `names`, or another weight of the model, was not delivered."""
        if self.compares_names:
            self.update(engine, {"backend": "complete", "names": list(names)}, timeout=timeout)
        engine.post("/finish_weight_update", {"weight_version": version}, timeout=timeout)


_BUILT_IN = {
    "embedded": "instep.engines.embedded.kind",
    "vllm": "instep.engines.vllm",
    "sglang": "instep.engines.sglang",
}
_registered: dict[str, EngineKind] = {}


def register(kind: EngineKind) -> None:
    """Add a kind that is not part of instep. Call it before importing `instep.arguments`, which reads the names."""
    _registered[kind.name] = kind


def kind_names() -> tuple[str, ...]:
    return (*_BUILT_IN, *_registered)


def kind_of(name: str) -> EngineKind:
    """Return the kind of `--rollout-backend NAME`."""
    if name in _registered:
        return _registered[name]
    return _built_in(name)


@functools.cache  # every request needs it
def _built_in(name: str) -> EngineKind:
    kind: EngineKind = importlib.import_module(_BUILT_IN[name]).KIND
    return kind


def all_kinds() -> list[EngineKind]:
    return [kind_of(name) for name in kind_names()]


def profile_folder(name: str) -> str:
    """Return the folder in RUN_DIR/profile into which the engine `name` may write."""
    return name.replace(" ", "-")


def engine_dtype(args: Settings) -> str:
    """Return the dtype of an engine's weights without `--vllm-dtype`: the trainer's. An `auto` of a plan is a GPU's."""
    return "float32" if args.precision == "fp32" else "bfloat16"


def shared_fraction(args: Settings, update_weights: bool) -> str:
    """Return the share of a GPU's memory that an engine takes beside the trainer, or in turns with it."""
    takes_turns = update_weights and args.offload_train and args.offload_rollout
    return "0.8" if takes_turns else "0.4"  # CUDA contexts, NCCL and the allocators of the other side keep a few GB


def rollout_samples(args: Settings) -> int:
    """Return the samples that an engine generates at once if all samples of a rollout start together."""
    return -(-(args.rollout_batch_size or 1) * args.n_samples_per_prompt // max(1, args.rollout_num_engines))


def served_dtype(args: Settings) -> str:
    """Return the dtype of an engine's weights, with `--vllm-dtype`."""
    return engine_dtype(args) if args.vllm_dtype == "auto" else str(args.vllm_dtype)


def config_json(folder: str) -> dict[str, Any]:
    """Return the config.json of a model, with the entries of its `text_config`; empty if it cannot be read, which
    other code reports."""
    with contextlib.suppress(OSError, ValueError):
        return with_text(json.loads((Path(folder) / "config.json").read_text()))
    return {}

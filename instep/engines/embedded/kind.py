"""The kind `embedded`: the engine of this folder. It uses vLLM's routes, and one GPU or the CPU."""

from __future__ import annotations

import functools
import urllib.error
from collections.abc import Iterator
from pathlib import Path

from instep.arguments.settings import Settings
from instep.data.messages import STARTED, clock
from instep.engines.flags import given_names
from instep.engines.http import get_json
from instep.engines.kind import Capabilities, EngineKind, RunningEngine, engine_dtype
from instep.engines.spec import Addresses, EngineSpec
from instep.engines.topology import served_models
from instep.errors import ConfigError
from instep.system.processes import DETERMINISTIC_ENV, OPENMP_ENV
from instep.system.spans import Span

_FIELDS = ("max_model_len", "max_num_seqs", "dtype")  # names that it shares with vLLM's command line
_DTYPES = ("float32", "bfloat16")
_INSTEAD = "remove it, or use --rollout-backend vllm"


class EmbeddedKind(EngineKind):
    """Engines of two processes: one computes and sends heartbeats, the other answers HTTP. They end together."""

    name, title, auto_device = "embedded", "the embedded engine", "cpu"
    max_num_gpus, dequantizes, lease_route = 1, True, "/lease"

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.title, digests=True, strict_requests=True, serves_nothing_unproven=True)

    def refusals(self, args: Settings) -> Iterator[ConfigError]:
        """Yield errors about vLLM's own flags, and about parts of `--vllm-config` that this engine cannot serve."""
        for given in (", ".join(given_names(args)), "--prefill-num-servers" if args.prefill_num_servers else ""):
            if given:
                yield ConfigError("the embedded engine does not have this", where=given, remedy=_INSTEAD)
        for model in served_models(args) if args.vllm_topology is not None else ():
            for i, group in enumerate(model.groups):
                where = f"{model.where}.server_groups[{i}]"
                if group.role in ("prefill", "decode"):
                    what = "the embedded engine prefills and decodes"
                    yield ConfigError(what, where=f"{where}.worker_type", remedy=_INSTEAD)
                elif group.role == "regular" and group.num_gpus_per_engine > 1:
                    what = f"{group.num_gpus_per_engine} GPUs, but the embedded engine uses one"
                    remedy = "use 1, or --rollout-backend vllm"
                    yield ConfigError(what, where=f"{where}.num_gpus_per_engine", remedy=remedy)
                for name, words in group.overrides.items():
                    if what := _override_problem(name, words[-1]):
                        yield ConfigError(what, where=f"{where}.overrides.{name}", remedy=_INSTEAD)

    def command(self, args: Settings, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
        command = ["-m", "instep.engines.embedded", "--model", spec.path, "--host", at.host, "--port", str(at.port)]
        dtype = [] if "--dtype" in spec.flags else ["--dtype", engine_dtype(args)]
        command += ["--device", args.device, *dtype, *spec.flags]
        command += ["--served-model-name", *spec.names] if spec.names != [spec.path] else []
        command += ["--trust-remote-code"] if args.trust_remote_code else []
        command += ["--enable-return-routed-experts"] if args.use_rollout_routing_replay and spec.update_weights else []
        return [*command, "--batch-invariant"] if args.deterministic_mode else command

    def environment(
        self, args: Settings, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int
    ) -> dict[str, str]:
        env = {"OMP_NUM_THREADS": str(num_threads), **OPENMP_ENV}
        env |= {STARTED: started} if (started := clock().started) else {}
        return env | (DETERMINISTIC_ENV if args.deterministic_mode else {})

    def num_generated(self, engine: RunningEngine, timeout: float) -> float | None:
        return float(get_json(engine.url + "/num_generated", timeout)["num_generated"])

    def stop_profile(self, engine: RunningEngine, folder: Path, *, timeout: float) -> list[Span]:
        return [Span(*s)._replace(track=engine.name) for s in engine.post("/stop_profile", timeout=timeout)["spans"]]

    def identify(self, engine: RunningEngine) -> EngineKind | None:
        try:
            models = get_json(engine.url + "/v1/models", 10.0).get("data", ())
        except urllib.error.HTTPError:
            return None
        return self if "instep" in [model.get("owned_by") for model in models] else None


KIND = EmbeddedKind()


def _override_problem(name: str, value: str) -> str:
    """Return what is wrong with an override of `--vllm-config`; "" if it is right."""
    if name not in _FIELDS:
        return f"the embedded engine does not have this, only {', '.join(_FIELDS)}"
    if value in _DTYPES if name == "dtype" else value.isdigit():
        return ""
    return f"the embedded engine takes {' or '.join(_DTYPES) if name == 'dtype' else 'a whole number'}"

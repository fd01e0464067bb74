"""The kind `vllm`: stock `vllm serve`. This module neither imports nor patches vLLM.

instep uses vLLM's own interfaces: flags, environment variables, the HTTP routes of its development mode, and plugins.
One of the plugins is instep's (`instep_engine/vllm`).
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.arguments.settings import Settings
from instep.engines.engine import EngineRefusal
from instep.engines.flags import TABLES, engine_words, given_names, installed_version, merge, release
from instep.engines.http import get_json, open_directly
from instep.engines.kind import (
    Capabilities,
    EngineKind,
    RunningEngine,
    config_json,
    engine_dtype,
    rollout_samples,
    shared_fraction,
)
from instep.engines.spec import Addresses, EngineSpec
from instep.engines.topology import ServerGroup, group_words, model_path, num_tokens, policy_model, served_models
from instep.engines.vllm_process import node_environment, profiler_config, serve_arguments, vllm_env
from instep.errors import ConfigError, EngineError
from instep.models.images import has_language_model
from instep.rollout.kv_budget import SAMPLES_PER_ENGINE
from instep.system.spans import Span, of_torch
from instep.weights.way import OF_ADAPTERS, SINGLE_COPY
from instep_engine import DRAFTER_VARIABLE, LORA_VARIABLE, PROTOCOL, vllm

OTHER_PROTOCOL = re.compile(r"instep speaks protocol \d+, this (?:plugin|instep-vllm) \d+")
PLUGIN_REMEDY = "install this instep where the engine runs (pip install --no-deps), and restart the engine"
NO_ROOM = re.compile(r"less than desired GPU memory utilization|No available memory for the cache|out of memory")
INFO_SECONDS = 60.0  # for /server_info, which examines the host first
# A core hangs if it answers nothing for so many --heartbeat-timeout: by default 5 minutes, as long as vLLM waits for
# its own workers. It gives no sign of life within a step, and its first steps may compile kernels.
SILENT_HEARTBEATS = 5
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_KV_CACHE_BYTES = 256 << 20  # vLLM's default is 4 GiB per engine
# The same for all runs: they are part of vLLM's compilation key.
GRAPH_ROWS = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, SAMPLES_PER_ENGINE + 1, 64))
OF_GRAPHS = {  # flags that set them, or make steps of more tokens than requests
    *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "enforce_eager"),
    "speculative_config",
}
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank accepts
ONE_PRODUCT = {"instep_adapter": 1}  # for `vllm/fast/adapter.py`; part of vLLM's compilation key
SEVERAL = ("middleware",)  # flags that may be on a command line more than once


class VllmKind(EngineKind):
    """Engines of the installed vLLM, or of `version` ("0.32.0", "0.32.0+cpu")."""

    name, title, auto_device = "vllm", "vLLM", "cuda"
    own_gpus = waits_for_room = needs_router = compares_names = True
    sends_heartbeats = False  # its server sends them, but does not notice a core that hangs
    dying_seconds = 6.0  # the server checks every 5 s whether its core has died, and answers 500 until then

    def __init__(self, version: str = ""):
        self._version = version

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The capabilities of this version. Raises ConfigError: the version is too old for instep."""
        version = self._version or importlib.metadata.version("vllm")
        if release(version) < (0, 26):
            raise ConfigError(
                f"vLLM {version} has no weight-transfer sessions in the form that instep uses",
                where="--rollout-backend vllm",
                remedy="instep install vllm",
            )
        recent = release(version) >= (0, 32)
        return Capabilities(self.title, version, version_spans=recent, spans_in_arrays=True, stop_reasons=recent)

    def meant_by(self, args: Settings) -> str:
        more = {"--prefill-num-servers": args.prefill_num_servers, "--vllm-config": args.vllm_config}
        more["--rollout-num-gpus-per-engine"] = args.rollout_num_gpus_per_engine > 1
        return ", ".join(given_names(args) + [flag for flag, value in more.items() if value])

    def sampling_defaults(self, args: Settings) -> dict[str, Any]:
        model = policy_model(served_models(args))
        words = merge(engine_words(args), *(group_words(args, group) for group in model.groups if group.num_engines))
        source = words.get("generation_config", ["auto"])[-1]
        source = model_path(args, model) if source == "auto" else source
        given = {} if source == "vllm" else dict(_generation_config(source))
        for field, texts in words.items():
            name, _, key = field.partition(".")
            if name == "override_generation_config":
                value = json.loads(texts[-1])
                given |= {key: value} if key else value
        return given

    def check_installed(self, where: str) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "vLLM is not installed here",
                where=where,
                remedy="instep install vllm; or remove vLLM's flags, and name --rollout-backend embedded",
            )
        self._check_plugin("vllm.general_plugins", where, PLUGIN_REMEDY)

    # ---- plan and start ----------------------------------------------------------------------------------------------

    def own_words(
        self, args: Settings, group: ServerGroup, words: Mapping[str, list[str]], update_weights: bool
    ) -> dict[str, list[str]]:
        """Return instep's words for fields that flags and overrides leave open, and for those in `SEVERAL`.

        If vLLM is not installed (`instep plan`), they are for the newest version with a committed table of flags.
        """
        version = installed_version("vllm") or TABLES["vllm"][0]
        own = super().own_words(args, group, words, update_weights) | {
            "dtype": ["--dtype", engine_dtype(args)],
            "seed": ["--seed", str(args.seed)],
            "logprobs_mode": ["--logprobs-mode", "processed_logprobs"],  # at the sampling temperature, as the trainer's
            "uvicorn_log_level": ["--uvicorn-log-level", "warning"],  # otherwise it logs a line per request
        }
        if args.trust_remote_code:
            own["trust_remote_code"] = ["--trust-remote-code"]
        if update_weights and args.use_rollout_routing_replay:
            own["enable_return_routed_experts"] = ["--enable-return-routed-experts"]
        if update_weights:
            backend = vllm.SINGLE_COPY if args.weight_sync == SINGLE_COPY else vllm.ENGINE
            own["weight_transfer_config"] = ["--weight-transfer-config", json.dumps({"backend": backend})]
            if has_language_model(config_json(str(args.hf_checkpoint))):
                own["language_model_only"] = ["--language-model-only"]  # it alone is trained
            if args.weight_sync in OF_ADAPTERS:
                own["enable_lora"] = ["--enable-lora"]
                least = args.lora_rank
                if args.device != "cpu":  # base and adapter in one product; its kernel has no smaller ranks
                    least = max(16, least)
                    own["additional_config"] = ["--additional-config", json.dumps(ONE_PRODUCT)]
                own["max_lora_rank"] = ["--max-lora-rank", str(min(r for r in LORA_RANKS if r >= least))]
        if release(version) >= (0, 32):
            own["enable_scale_out"] = ["--enable-scale-out"]  # /inference/v1/generate; older versions always have it
        own["middleware"] = ["--middleware", "instep_engine.vllm.auth.Middleware"]  # the last one is asked first
        sleeps = update_weights and args.offload_rollout and args.device != "cpu"
        if sleeps:
            own["middleware"] = ["--middleware", "instep_engine.vllm.sleep.Middleware", *own["middleware"]]
        if not args.no_fast_log_probs and group.role == "regular":
            own["scheduler_cls"] = ["--scheduler-cls", "instep_engine.vllm.fast.scheduler.make"]
            own["middleware"] = ["--middleware", "instep_engine.vllm.fast.api.Middleware", *own["middleware"]]
        if release(version) >= (0, 32):  # see its module; it is asked last
            own["middleware"] = ["--middleware", "instep_engine.vllm.token_names.Middleware", *own["middleware"]]
        if release(version) < (0, 32) and group.role != "regular":  # see above
            own["middleware"] = ["--middleware", "instep_engine.vllm.kv_params.Middleware", *own["middleware"]]
        if args.device != "cpu" and args.colocate:  # vLLM's default is 0.9, as if it were alone there
            own["gpu_memory_utilization"] = ["--gpu-memory-utilization", shared_fraction(args, update_weights)]
        given = {field.partition(".")[0] for field in words}
        if update_weights and args.device != "cpu" and given.isdisjoint(OF_GRAPHS):
            most = num_tokens(words.get("max_num_seqs", [""])[-1]) or SAMPLES_PER_ENGINE
            if min(rollout_samples(args), most) > 512:  # vLLM's own graphs end there
                own["cudagraph_capture_sizes"] = ["--cudagraph-capture-sizes", *map(str, GRAPH_ROWS)]
        if sleeps:
            own["enable_sleep_mode"] = ["--enable-sleep-mode"]
        if args.device == "cpu":
            own["enforce_eager"] = ["--enforce-eager"]
            own["kv_cache_memory_bytes"] = ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
            # 0.32 crashes on a prompt in two pieces if its request has a seed ("CPU Generator does not use offset").
            own["enable_chunked_prefill"] = ["--no-enable-chunked-prefill"]
            if "linear_num_key_heads" in config_json(str(args.hf_checkpoint)):  # otherwise vLLM needs those pieces
                own["enable_prefix_caching"] = ["--no-enable-prefix-caching"]
            if group.num_gpus_per_engine == 1:  # saves a process and half a gigabyte
                own["distributed_executor_backend"] = ["--distributed-executor-backend", "uni"]
        return {field: given for field, given in own.items() if field not in words or field in SEVERAL}

    def plan_line(self, spec: EngineSpec, at: Addresses, node_rank: int, node_host: str) -> str:
        env = "".join(f"{name}={value} " for name, value in node_environment(spec, at, node_host).items())
        return f"{env}vllm serve {shlex.join(serve_arguments(spec, at, node_rank))}"

    def check_start(self, args: Settings, spec: EngineSpec) -> None:
        if args.device == "cpu":
            _check_attention(spec.path, engine_dtype(args))
        elif args.weight_sync in OF_ADAPTERS and engine_dtype(args) == "float32":
            raise ConfigError(
                "vLLM's kernels for adapters on a GPU support only bfloat16, not float32",
                where="--weight-sync lora",
                remedy="--precision bf16, or --weight-sync shm",
            )
        if spec.kv_connector == "nixl" and importlib.util.find_spec("nixl") is None:
            raise ConfigError(
                "prefill engines pass the KV cache to decode engines by NIXL, which is not installed here",
                where=f"{spec.name} ({spec.role})",
                remedy="pip install nixl, or choose another connector with --vllm-kv-transfer-config",
            )

    def command(self, args: Settings, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
        profiles = args.profile and "profiler_config" not in spec.words
        profiler = ["--profiler-config", json.dumps(profiler_config(args, spec))] if profiles else []
        return ["-m", "instep.engines.vllm_main", "serve", *serve_arguments(spec, at, node_rank), *profiler]

    def environment(
        self, args: Settings, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int
    ) -> dict[str, str]:
        here = {}
        if node_host == "127.0.0.1":  # gloo, and UCX below NIXL, would listen on the addresses of all interfaces
            here = {"VLLM_HOST_IP": node_host, "GLOO_SOCKET_IFNAME": "lo"}
            here["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")
        if len(spec.slots) == 1 or args.device == "cpu":
            # The core inherits the imports of its server (8 to 15 s). vLLM still spawns it where it must.
            here["VLLM_WORKER_MULTIPROC_METHOD"] = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        if args.weight_sync in OF_ADAPTERS:
            here[LORA_VARIABLE] = "1"
        if args.mtp_num_layers and spec.update_weights:
            here[DRAFTER_VARIABLE] = "1"
        if args.use_rollout_routing_replay and release(installed_version("vllm") or TABLES["vllm"][0]) >= (0, 32):
            here["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that notes the experts
        return vllm_env(args, num_threads) | here | node_environment(spec, at, node_host)

    # ---- a running engine --------------------------------------------------------------------------------------------

    def identify(self, engine: RunningEngine) -> EngineKind | None:
        try:
            version = get_json(engine.url + "/version", 10.0)["version"]
        except urllib.error.HTTPError:
            return None
        kind = VllmKind(version)
        _ = kind.capabilities  # refuses versions that are too old
        try:
            config = get_json(engine.url + "/server_info?config_format=json", INFO_SECONDS)["vllm_config"]
        except urllib.error.HTTPError:
            what = f"{engine.name} has no control routes"
            raise ConfigError(what, where=engine.url, remedy="start it with VLLM_SERVER_DEV_MODE=1") from None
        engine.num_replicas = int(config["parallel_config"]["data_parallel_size"])
        log_probs = config["model_config"]["logprobs_mode"]
        transfer = (config["weight_transfer_config"] or {}).get("backend", "none")
        if log_probs != "processed_logprobs":
            what = f"{engine.name} answers with {log_probs}, not with those of the distribution that it samples from"
            raise ConfigError(what, where=engine.url, remedy="start it with --logprobs-mode processed_logprobs")
        if (servers := config["parallel_config"].get("_api_process_count", 1)) > 1:
            what = f"{engine.name} has {servers} API servers: each control call reaches only one of them"
            raise ConfigError(what, where=engine.url, remedy="start it with --api-server-count 1")
        if engine.update_weights and transfer not in (vllm.ENGINE, vllm.SINGLE_COPY):
            what = f"{engine.name} takes weights by {transfer}, not by {vllm.ENGINE}"
            remedy = f"""start it with instep's plugin and --weight-transfer-config '{{"backend": "{vllm.ENGINE}"}}'"""
            raise ConfigError(what, where=engine.url, remedy=remedy)
        return kind

    def start_remedy(self, log: str) -> str:
        if not NO_ROOM.search(log):
            return super().start_remedy(log)
        return "lower --vllm-gpu-memory-utilization, or let trainer and engines take turns (--colocate --offload)"

    def core_patience(self, heartbeat_timeout: float) -> float | None:
        """Return `SILENT_HEARTBEATS` heartbeats, but at least vLLM's own bound for its workers."""
        theirs = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 0.0))
        return max(SILENT_HEARTBEATS * heartbeat_timeout, theirs)

    def pause(self, engine: RunningEngine, mode: str, *, timeout: float) -> None:
        """Pause by the plugin's route. It answers as soon as the engine stands still; vLLM's takes 20 ms more."""
        try:
            engine.post("/instep/pause", timeout=timeout, mode=mode)
        except EngineRefusal as refusal:
            if refusal.code != 404:  # an older plugin, or an external engine that asks for no key
                raise
            super().pause(engine, mode, timeout=timeout)

    def lease(self, about: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "/init_weight_transfer_engine", {"init_info": {"lease": about}}

    def stop_profile(self, engine: RunningEngine, folder: Path, *, timeout: float) -> list[Span]:
        """End the recording by vLLM's own profiler, with a file for each of its workers."""
        engine.post("/stop_profile", timeout=timeout)
        if not (files := sorted(folder.glob("*.pt.trace.json.gz"))):
            what = f"{engine.name} has recorded, but wrote nothing into {folder}"
            raise EngineError(what, where=engine.url, remedy="remove --vllm-profiler-config: the run sets it")
        tracks = [engine.name if len(files) == 1 else f"{engine.name}, worker {i}" for i in range(len(files))]
        found = [s for file, track in zip(files, tracks, strict=True) for s in of_torch(file, track)]
        shutil.rmtree(folder, ignore_errors=True)  # the profile's own file has it now
        return found

    def num_workers(self, engine: RunningEngine, timeout: float) -> int:
        return int(get_json(engine.url + "/get_world_size", timeout)["world_size"])

    def num_cached_tokens(self, engine: RunningEngine, timeout: float) -> float:
        return tokens_of_caches(_metrics(engine, timeout))

    def drafts(self, engine: RunningEngine, timeout: float) -> tuple[float, float]:
        text, names = _metrics(engine, timeout), ("draft", "accepted")
        found = [re.findall(rf"^vllm:spec_decode_num_{n}_tokens_total(?:{{.*}})? (\S+)$", text, re.M) for n in names]
        drafted, taken = (sum(map(float, values)) for values in found)
        return drafted, taken

    def num_generated(self, engine: RunningEngine, timeout: float) -> float | None:
        found = re.findall(r"^vllm:generation_tokens_total(?:{.*})? (\S+)$", _metrics(engine, timeout), re.M)
        return sum(map(float, found)) if found else None

    def start_update(self, engine: RunningEngine, version: str, nonce: str, *, timeout: float) -> None:
        announced = {"init_info": {"protocol": PROTOCOL, "version": version, "nonce": nonce}}
        try:
            engine.post("/init_weight_transfer_engine", announced, timeout=timeout)
        except EngineRefusal as refusal:
            if other := OTHER_PROTOCOL.search(refusal.what):
                raise ConfigError(f"{engine.name}: {other[0]}", where=engine.url, remedy=PLUGIN_REMEDY) from refusal
            if "a session is active" not in refusal.what:
                raise
            with contextlib.suppress(EngineRefusal):  # this worker has already ended the session
                engine.post("/finish_weight_update", timeout=timeout)
            engine.post("/init_weight_transfer_engine", announced, timeout=timeout)
        engine.post("/start_weight_update", timeout=timeout)


KIND = VllmKind()


def _metrics(engine: RunningEngine, timeout: float) -> str:
    """Return vLLM's own metrics, as Prometheus reads them; an empty text if it does not answer."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        with open_directly(engine.url + "/metrics", timeout=timeout) as answer:
            return str(answer.read().decode())
    return ""


def tokens_of_caches(metrics: str) -> float:
    """Return how many tokens the caches of all replicas hold, by vLLM's metrics; infinity if these do not say it."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")]
    caches = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    own = [cache.get("kv_cache_size_tokens", "") for cache in caches]  # of one replica, for any kinds of layers
    if own and all(tokens.isdigit() for tokens in own):
        return float(sum(map(int, own))) or math.inf
    sizes = [(cache.get("num_gpu_blocks", ""), cache.get("block_size", "")) for cache in caches]
    if not sizes or not all(blocks.isdigit() and size.isdigit() for blocks, size in sizes):
        return math.inf  # with --disable-log-stats, or in another version
    return float(max(int(blocks) * int(size) for blocks, size in sizes))  # each line counts the blocks of all


@functools.lru_cache
def _generation_config(folder: str) -> Mapping[str, Any]:
    """Return a model's generation_config.json, read as vLLM reads it; empty without one."""
    from transformers import GenerationConfig

    try:
        config: dict[str, Any] = GenerationConfig.from_pretrained(folder).to_diff_dict()
    except OSError:
        return {}
    return config


def _check_attention(model: str, dtype: str) -> None:
    """Raise ConfigError for a model with which vLLM on a CPU would not start, or would crash at the first request."""
    config = config_json(model)
    if dtype == "float32" and ("linear_num_key_heads" in config or config.get("kv_lora_rank")):
        raise ConfigError(
            "vLLM's linear and latent attention on a CPU support only bfloat16, not float32",
            where=f"the model {model}",
            remedy="--precision bf16",
        )
    size = config.get("head_dim") or config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"vLLM's attention on a CPU has no heads of {size}, only of {', '.join(map(str, CPU_HEAD_SIZES))}",
            where=f"the model {model}",
            remedy="use another model, or --rollout-backend embedded",
        )

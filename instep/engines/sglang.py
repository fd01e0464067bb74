"""The kind `sglang`: stock SGLang. This module neither imports nor patches it.

instep uses SGLang's own interfaces: flags, environment variables, HTTP routes and plugins. One of the plugins is
instep's (`instep_engine/sglang`), which adds the control routes of instep's other engines.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import urllib.error
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instep.arguments.settings import Settings
from instep.engines.flags import given_names
from instep.engines.http import get_json
from instep.engines.kind import Capabilities, EngineKind, RunningEngine, config_json, engine_dtype, shared_fraction
from instep.engines.spec import Addresses, EngineSpec
from instep.engines.topology import ServerGroup
from instep.errors import ConfigError
from instep.models.files import has_own_head
from instep.system.processes import DETERMINISTIC_ENV, OPENMP_ENV
from instep.weights.way import OF_ADAPTERS, SINGLE_COPY
from instep_engine import PROTOCOL

if TYPE_CHECKING:
    from instep.engines.router import Router
    from instep.engines.wire import WireFormat

INSTALL = "instep install sglang"
READS_VLLM = "--rollout-backend vllm, which reads the flags that have an equivalent there"
OLDEST, WITH_SPANS = (0, 5, 17), (0, 5, 19)
CPU_TOKENS = 16_384  # of the KV cache on a CPU, where SGLang's default is a share of the host's memory
MOONCAKE = "mooncake", "mooncake-transfer-engine"
TRANSFERS = {"mooncake": MOONCAKE, "mooncake_tcp": MOONCAKE, "nixl": ("nixl", "nixl")}  # -> module, distribution
LORA_LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
# Their drafts pass `eagle_sample`, the test whose samples follow the policy. NGRAM has no drafter.
ALGORITHMS = ("EAGLE", "NEXTN", "EAGLE3", "STANDALONE", "NGRAM")
THRESHOLDS = tuple(f"--sglang-speculative-accept-threshold-{which}" for which in ("single", "acc"))
SILENT_HEARTBEATS = 5  # a scheduler hangs if it answers nothing for so many --heartbeat-timeout


def check_speculation(algorithm: str, device: str, thresholds: Iterable[float], where: str) -> None:
    """Raise ConfigError where samples would not follow the policy (`eagle_sample` of SGLang 0.5.17).

    On a CPU it compares drafts with the likeliest token at any temperature. On a GPU it accepts a draft with the
    policy's probability of it, divided by a threshold.
    """
    remedy = "leave out --sglang-speculative-*; or use --rollout-backend vllm with --vllm-speculative-config"
    if device == "cpu":
        what = "on a CPU SGLang takes the likeliest tokens then, at any temperature"
    elif algorithm.upper() not in ALGORITHMS:
        what, remedy = f"instep does not know that samples of {algorithm} follow the policy", f"use {ALGORITHMS[0]}"
    elif min(thresholds, default=1.0) < 1.0:
        what, remedy = "SGLang would accept more drafts than the policy", f"leave out {' and '.join(THRESHOLDS)}"
    else:
        return
    raise ConfigError(what, where=where, remedy=remedy)


class SglangKind(EngineKind):
    """Engines of the installed SGLang, or of `version` ("0.5.17")."""

    name, title = "sglang", "SGLang"
    own_gpus = needs_router = compares_names = True
    renormalizes = False
    memory_flags = "--sglang-mem-fraction-static"
    sends_heartbeats = False  # its server sends them, but does not notice a scheduler that hangs
    core_route, lease_route = "/instep/alive", "/lease"
    dying_seconds = 10.0

    def __init__(self, version: str = ""):
        self._version = version

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The capabilities of this version. Raises ConfigError: the version is too old for instep."""
        version = self._version or importlib.metadata.version("sglang")
        if _numbers(version) < OLDEST:
            what = f"SGLang {version} lacks the hooks that instep's plugin needs"
            raise ConfigError(what, where="--rollout-backend sglang", remedy=f"install 0.5.17 or newer: {INSTALL}")
        return Capabilities(self.title, version, version_spans=_numbers(version) >= WITH_SPANS)

    @functools.cached_property
    def wire(self) -> WireFormat:
        from instep.engines.sglang_wire import SGLANG_WIRE

        return SGLANG_WIRE

    @property
    def router(self) -> type[Router]:
        from instep.engines.sglang_router import SglangRouter

        return SglangRouter

    def meant_by(self, args: Settings) -> str:
        return ", ".join(args.sglang_flags)

    def refusals(self, args: Settings) -> Iterator[ConfigError]:
        """Yield errors about flags that only vLLM has, and about what instep cannot do with SGLang yet."""
        if names := given_names(args):
            yield ConfigError(
                "a run has engines of one kind, SGLang's or vLLM's",
                where=f"{', '.join(names)} beside {self.meant_by(args) or '--rollout-backend sglang'}",
                remedy=f"use SGLang's flags of the same meaning, or {READS_VLLM}",
            )
        if args.weight_sync == SINGLE_COPY and args.rollout_external_engine_addrs:
            what = "an SGLang that already runs does not share its weights"
            where = "--weight-sync single-copy with --rollout-external-engine-addrs"
            yield ConfigError(what, where=where, remedy="use ipc or shm, or let the run start it")
        if args.pause_mode == "keep" and args.weight_sync in OF_ADAPTERS:
            what = "a response that continues after a sync would need the last adapter, which is gone"
            yield ConfigError(what, where="--pause-mode keep with --weight-sync lora", remedy="use abort or wait")

    def check_installed(self, where: str) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("SGLang is not installed here", where=where, remedy=f"{INSTALL}; or {READS_VLLM}")
        remedy = "install this instep where the engine runs (pip install --no-deps)"
        self._check_plugin("sglang.srt.plugins", where, remedy)

    # ---- plan and start ----------------------------------------------------------------------------------------------

    def own_words(
        self, args: Settings, group: ServerGroup, words: Mapping[str, list[str]], update_weights: bool
    ) -> dict[str, list[str]]:
        """Return instep's words for fields that flags and overrides leave open.

        Raises:
            ConfigError: they ask for speculative decoding that would change the distribution, or for a drafter that no
                sync would reach.
        """
        algorithm = words.get("speculative_algorithm") if update_weights else None
        if algorithm:
            where = f"--sglang-speculative-algorithm {algorithm[-1]}"
            given = (words[field][-1] for field in map(_field, THRESHOLDS) if field in words)
            check_speculation(algorithm[-1], args.device, map(float, given), where)
            if "speculative_use_rejection_sampling" in words:
                what, remedy = "instep has not compared the samples of this test of drafts", "leave it out"
                raise ConfigError(what, where="--sglang-speculative-use-rejection-sampling", remedy=remedy)
            if args.mtp_num_layers and args.weight_sync == SINGLE_COPY:
                what, remedy = "--weight-sync single-copy would not reach SGLang's drafter", "use ipc or shm"
                raise ConfigError(what, where=where, remedy=remedy)
            if args.use_rollout_routing_replay:
                what, remedy = "instep has not compared the experts of accepted drafts", "leave one of the two out"
                raise ConfigError(what, where=f"{where} with --use-rollout-routing-replay", remedy=remedy)
        own = super().own_words(args, group, words, update_weights) | {
            "dtype": ["--dtype", engine_dtype(args)],
            "random_seed": ["--random-seed", str(args.seed)],
            "sampling_backend": ["--sampling-backend", "pytorch"],  # the only one whose seeds act
            "log_level": ["--log-level", "info"],
            "log_level_http": ["--log-level-http", "warning"],
            "skip_server_warmup": ["--skip-server-warmup"],
        }
        if args.trust_remote_code:
            own["trust_remote_code"] = ["--trust-remote-code"]
        if group.role in ("prefill", "decode") and args.device == "cpu":
            own["disaggregation_transfer_backend"] = ["--disaggregation-transfer-backend", "mooncake_tcp"]
        if update_weights and args.use_rollout_routing_replay:
            own["enable_return_routed_experts"] = ["--enable-return-routed-experts"]
        if update_weights and args.weight_sync in OF_ADAPTERS:
            own["enable_lora"] = ["--enable-lora"]
            own["max_lora_rank"] = ["--max-lora-rank", str(args.lora_rank)]
            own["lora_target_modules"] = ["--lora-target-modules", *LORA_LAYERS]
            own["max_loras_per_batch"] = ["--max-loras-per-batch", "2"]  # the base counts as one
        if args.device == "cpu":
            own["device"] = ["--device", "cpu"]
            own["attention_backend"] = ["--attention-backend", "torch_native"]  # the others need kernels
            own["grammar_backend"] = ["--grammar-backend", "none"]
            own["sleep_on_idle"] = ["--sleep-on-idle"]  # otherwise an idle engine keeps a core busy
            own["disable_overlap_schedule"] = ["--disable-overlap-schedule"]
            own["max_total_tokens"] = ["--max-total-tokens", str(CPU_TOKENS)]
            if update_weights and args.weight_sync in OF_ADAPTERS:
                own["lora_backend"] = ["--lora-backend", "torch_native"]
        else:
            if update_weights and args.offload_rollout:
                if "nixl" in words.get("disaggregation_transfer_backend", ()):
                    raise ConfigError(
                        "an engine that gives its memory back would get KV caches where NIXL still has the old memory",
                        where="--sglang-disaggregation-transfer-backend nixl",
                        remedy="add --no-offload-rollout, or use mooncake, which knows each new memory",
                    )
                own["enable_memory_saver"] = ["--enable-memory-saver"]
                if algorithm:  # a sync need not bring the drafter back, and never its buffers
                    own["enable_draft_weights_cpu_backup"] = ["--enable-draft-weights-cpu-backup"]
                if args.weight_sync in OF_ADAPTERS:  # a sync does not bring the base back
                    own["enable_weights_cpu_backup"] = ["--enable-weights-cpu-backup"]
            if args.colocate:
                own["mem_fraction_static"] = ["--mem-fraction-static", shared_fraction(args, update_weights)]
            if importlib.util.find_spec("flashinfer") is None:
                own["attention_backend"] = ["--attention-backend", "fa3"]
                own["grammar_backend"] = ["--grammar-backend", "none"]
                field = "enforce_disable_flashinfer_allreduce_fusion"
                own[field] = ["--" + field.replace("_", "-")]
        return {field: given for field, given in own.items() if field not in words}

    def plan_line(self, spec: EngineSpec, at: Addresses, node_rank: int, node_host: str) -> str:
        return f"sglang serve {shlex.join(serve_arguments(spec, at, node_rank))}"

    def check_start(self, args: Settings, spec: EngineSpec) -> None:
        chosen = {**spec.words, **spec.own}.get("disaggregation_transfer_backend", ["mooncake"])[-1]
        if spec.role != "regular" and chosen in TRANSFERS and importlib.util.find_spec(TRANSFERS[chosen][0]) is None:
            raise ConfigError(
                f"prefill engines pass the KV cache to decode engines by {chosen}, which is not installed here",
                where=f"{spec.name} ({spec.role})",
                remedy=f"pip install {TRANSFERS[chosen][1]}, or another --sglang-disaggregation-transfer-backend",
            )

    def command(self, args: Settings, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
        return ["-m", "instep.engines.sglang_main", *serve_arguments(spec, at, node_rank)]

    def environment(
        self, args: Settings, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int
    ) -> dict[str, str]:
        env = {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs at the sampling temperature, as the trainer's
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # otherwise /health generates, and waits while paused
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",  # a server that dies would wait a minute first
            # NCCL's own default. SGLang would set 0, and a trainer with another kind of memory cannot join it.
            "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "-2"),
        }
        if node_host == "127.0.0.1":  # prefill and decode engines would listen on the addresses of all interfaces
            env |= {"SGLANG_HOST_IP": node_host, "MC_TCP_BIND_ADDRESS": node_host}
            env["UCX_NET_DEVICES"] = os.environ.get("UCX_NET_DEVICES", "lo")  # below NIXL
        if plugins := os.environ.get("SGLANG_PLUGINS"):  # SGLang loads only these
            env["SGLANG_PLUGINS"] = f"{plugins},instep_engine"
        if args.device == "cpu":
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": str(num_threads)}
            if spec.parallel.tensor > 1:  # the cores of each rank; otherwise SGLang wants a NUMA node for each
                cores = sorted(os.sched_getaffinity(0))
                bound = [str(cores[rank % len(cores)]) for rank in range(spec.parallel.tensor)]
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
            env |= OPENMP_ENV
        elif importlib.util.find_spec("flashinfer") is None:
            env |= {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
        return env | (DETERMINISTIC_ENV if args.deterministic_mode else {})

    # ---- a running engine --------------------------------------------------------------------------------------------

    def identify(self, engine: RunningEngine) -> EngineKind | None:
        try:
            about = get_json(engine.url + "/server_info", 10.0)
        except urllib.error.HTTPError:
            return None
        if "internal_states" not in about:
            return None
        kind = SglangKind(str(about["version"]))
        _ = kind.capabilities  # refuses versions that are too old
        try:
            get_json(engine.url + "/weight_info", 10.0)
        except urllib.error.HTTPError:
            what = f"{engine.name} runs without instep's plugin"
            remedy = "install instep beside it (pip install --no-deps), and start it with INSTEP_API_KEY set"
            raise ConfigError(what, where=engine.url, remedy=remedy) from None
        if about["speculative_algorithm"] and engine.update_weights:
            thresholds = [float(about[_field(name)]) for name in THRESHOLDS]
            check_speculation(about["speculative_algorithm"], about["device"], thresholds, engine.url)
        replicas = int(about["dp_size"]) > 1 and not about["enable_dp_attention"]
        if about["sampling_backend"] != "pytorch" or int(about["pp_size"]) > 1 or replicas:
            what = f"{engine.name} has another sampler than pytorch, pipeline stages, or replicas"
            remedy = "start it with --sampling-backend pytorch, without --pp-size and --dp-size"
            raise ConfigError(what, where=engine.url, remedy=remedy)
        return kind

    def core_patience(self, heartbeat_timeout: float) -> float | None:
        return SILENT_HEARTBEATS * heartbeat_timeout

    def num_workers(self, engine: RunningEngine, timeout: float) -> int:
        return int(get_json(engine.url + "/server_info", timeout)["tp_size"])

    def drafts(self, engine: RunningEngine, timeout: float) -> tuple[float, float]:
        found = get_json(engine.url + "/instep/drafts", timeout)
        return found["drafted"], found["taken"]

    def generate(self, engine: RunningEngine, payload: dict[str, Any], *, timeout: float) -> Any:
        from instep.engines.sglang_pairs import ask_pair, partner_of  # numpy

        if engine.role == "decode":
            return ask_pair(partner_of(engine), engine, payload, payload, timeout)
        return super().generate(engine, payload, timeout=timeout)

    def prompt_log_probs(
        self, engine: RunningEngine, tokens: Sequence[int], *, timeout: float, replica: int | None = None
    ) -> list[float]:
        from instep.engines.sglang_pairs import scores_by_decode, scores_by_prefill  # numpy

        if engine.role == "decode":
            return scores_by_decode(engine, tokens, timeout)
        if engine.role == "prefill":
            return scores_by_prefill(engine, tokens, timeout)
        return super().prompt_log_probs(engine, tokens, timeout=timeout, replica=replica)

    def start_update(self, engine: RunningEngine, version: str, nonce: str, *, timeout: float) -> None:
        body = {"protocol": PROTOCOL, "version": version, "nonce": nonce}
        engine.post("/start_weight_update", body, timeout=timeout)


KIND = SglangKind()


def serve_arguments(spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
    """Return the arguments of SGLang's server for the process on the engine's `node_rank`-th node."""
    words = ["--model-path", spec.path, *spec.flags, "--host", at.host, "--port", str(at.port)]
    layout = {"--tp-size": spec.parallel.tensor, "--ep-size": spec.parallel.expert}
    words += [
        word for flag, size in layout.items() if size > 1 and flag not in spec.flags for word in (flag, str(size))
    ]
    if "json_model_override_args" not in spec.words and config_json(spec.path).get("tie_word_embeddings"):
        if has_own_head(spec.path):  # config.json is wrong, and SGLang would compute with the embedding
            words += ["--json-model-override-args", json.dumps({"tie_word_embeddings": False})]
    if spec.role == "prefill":
        words += ["--disaggregation-bootstrap-port", str(at.side_channel_port)]
    words += ["--served-model-name", spec.names[-1]] if spec.names != [spec.path] else []
    if (num_nodes := len(spec.nodes)) > 1:
        words += ["--nnodes", str(num_nodes), "--node-rank", str(node_rank)]
        words += ["--dist-init-addr", f"{at.master_host}:{at.master_port}"]
    return words


def _field(name: str) -> str:
    """Return the field of one of instep's flags for SGLang."""
    return name.removeprefix("--sglang-").replace("-", "_")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 5, 17) of "0.5.17.post1"."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)

"""What instep tells stock `vllm serve`. Nothing of vLLM is imported or patched here.

What instep adds goes through vLLM's own doors: flags, environment, HTTP routes of its development mode, and the plugin
instep-vllm (`plugins/instep-vllm`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from instep.engines.capabilities import release
from instep.engines.flags import TABLES, installed_version
from instep.engines.launch import PLUGIN_ENGINE, engine_dtype
from instep.engines.topology import Role
from instep.errors import ConfigError
from instep.processes import DETERMINISTIC_ENV, OPENMP_ENV

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_KV_CACHE_BYTES = 256 << 20  # vLLM would take 4 GiB per engine
SEVERAL = ("middleware",)  # flags that may stand there more than once
COLOCATED_FRACTION = 0.4  # of a GPU's memory, where the trainer keeps its own beside the engine


def launch_words(args: Any, *, num_gpus: int, role: Role, update_weights: bool) -> dict[str, list[str]]:
    """What instep adds to the command line of an engine of `num_gpus`, by field; `--vllm-*` and overrides win.

    (But for `SEVERAL`, which are added to theirs.)

    Where vLLM is not installed (`instep plan`) it is that of the newest version whose flags are known.
    """
    version = installed_version("vllm") or TABLES["vllm"][0]
    words = {
        "dtype": ["--dtype", engine_dtype(args)],
        "seed": ["--seed", str(args.seed)],
        "logprobs_mode": ["--logprobs-mode", "processed_logprobs"],  # at the sampling temperature, as the trainer's
        "uvicorn_log_level": ["--uvicorn-log-level", "warning"],  # else a line per request
    }
    if update_weights:
        words["weight_transfer_config"] = ["--weight-transfer-config", json.dumps({"backend": PLUGIN_ENGINE})]
    if release(version) >= (0, 32):
        words["enable_scale_out"] = ["--enable-scale-out"]  # /inference/v1/generate, which was always there before
    elif role != "regular":
        words["middleware"] = ["--middleware", "instep_vllm.kv_params.Middleware"]  # says what it mends
    if args.device == "cuda" and args.colocate:  # vLLM would take 0.9, as if it were alone there
        words["gpu_memory_utilization"] = ["--gpu-memory-utilization", str(COLOCATED_FRACTION)]
    if args.device == "cpu":
        words["enforce_eager"] = ["--enforce-eager"]
        words["kv_cache_memory_bytes"] = ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
        # 0.32 dies of a prompt in two pieces whose request has a seed ("CPU Generator does not use offset").
        words["enable_chunked_prefill"] = ["--no-enable-chunked-prefill"]
        if num_gpus == 1:  # one process less, and half a gigabyte
            words["distributed_executor_backend"] = ["--distributed-executor-backend", "uni"]
    return words


def vllm_command(arguments: list[str]) -> list[str]:
    """What follows the interpreter, for these arguments of `vllm serve`."""
    return ["-m", "instep.engines.vllm_main", "serve", *arguments]


def check_cpu(model: Path) -> None:
    """Raise ConfigError for a model of which vLLM on a CPU would start, and die of the first request."""
    config = json.loads((model / "config.json").read_text())
    size = config.get("head_dim") or config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"vLLM's attention on a CPU has no heads of {size}, only of {', '.join(map(str, CPU_HEAD_SIZES))}",
            where=f"the model {model}",
            remedy="use another model, or --rollout-backend embedded",
        )


def vllm_env(args: Any, num_threads: int) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the control routes
        "VLLM_NO_USAGE_STATS": "1",
        "INSTEP_DIE_WITH_PARENT": "1",  # read by the plugin, in vLLM's own child processes
    }
    if plugins := os.environ.get("VLLM_PLUGINS"):  # only these are loaded
        env["VLLM_PLUGINS"] = f"{plugins},instep"
    if args.device == "cpu":
        env |= {
            "TORCH_COMPILE_DISABLE": "1",  # else the first request waits 17 s for helpers to be compiled
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the CPU platform keep the `uni` executor
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each engine would take the same cores
            "OMP_NUM_THREADS": str(num_threads),
            **OPENMP_ENV,
        }
    elif engine_dtype(args) == "float32":
        env["TRITON_F32_DEFAULT"] = "ieee"  # else the attention that vLLM has for float32 multiplies in TF32
    return env | (DETERMINISTIC_ENV if args.deterministic_mode else {})

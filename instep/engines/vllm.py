"""Starting stock `vllm serve` as a supervised process. Nothing of vLLM is imported or patched here.

What instep adds goes through vLLM's own doors: flags, environment, HTTP routes of its development mode, and the plugin
instep-vllm (`plugins/instep-vllm`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.engines import capabilities
from instep.engines.flags import engine_words
from instep.engines.launch import Engine, choose_port, engine_dtype
from instep.engines.topology import parallel
from instep.errors import ConfigError
from instep.processes import DETERMINISTIC_ENV, OPENMP_ENV, SupervisedProcess

WEIGHT_TRANSFER = "instep_shm"  # the plugin's name for its weight-transfer engine
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_KV_CACHE_BYTES = 256 << 20  # vLLM would take 4 GiB per engine
COLOCATED_FRACTION = 0.4  # of a GPU's memory, where the trainer keeps its own beside the engine


def start_vllm(
    args: Any,
    index: int,
    *,
    num_threads: int,
    log_dir: Path,
    port: int | None = None,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
) -> Engine:
    """Start `vllm serve` on `host`; it is not ready yet when this returns.

    Raises:
        ConfigError: the wanted port is taken, or vLLM is too old.
    """
    offers = capabilities.of_vllm(importlib.metadata.version("vllm"))
    if args.device == "cpu":
        _check_cpu(Path(args.hf_checkpoint))
    port = choose_port(port, host)
    command = [sys.executable, "-m", "instep.engines.vllm_main", *vllm_flags(args, offers.version)]
    command += ["--host", host, "--port", str(port)]
    name = f"engine {index}"
    process = SupervisedProcess(
        name,
        command,
        log_dir / f"engine-{index}.log",
        {**vllm_env(args, num_threads), **(env or {})},
        heartbeat=args.heartbeat_timeout,
    )
    return Engine(name, f"http://{host}:{port}", process, offers)


def _check_cpu(model: Path) -> None:
    """vLLM would start, and die of the first request."""
    config = json.loads((model / "config.json").read_text())
    size = config.get("head_dim") or config.get("hidden_size", 0) // max(1, config.get("num_attention_heads", 1))
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"vLLM's attention on a CPU has no heads of {size}, only of {', '.join(map(str, CPU_HEAD_SIZES))}",
            where=f"--hf-checkpoint {model}",
            remedy="use another model, or --rollout-backend embedded",
        )


def vllm_flags(args: Any, version: str) -> list[str]:
    """Arguments of vLLM's command line, but for host and port."""
    layout = parallel(engine_words(args), args.rollout_num_gpus_per_engine, "--rollout-num-gpus-per-engine")
    words = ["serve", str(args.hf_checkpoint), "--tensor-parallel-size", str(layout.tensor)]
    words += [word for given in args.vllm_overrides.values() for word in given]
    return words + launch_flags(args, version)


def launch_flags(args: Any, version: str) -> list[str]:
    """What instep adds to every engine, whatever it serves on how many GPUs; `--vllm-*` win over what is a default."""

    def default(field: str, *words: str) -> list[str]:
        return [] if field in args.vllm_overrides else list(words)

    flags = ["--dtype", engine_dtype(args), "--seed", str(args.seed)]
    flags += ["--logprobs-mode", "processed_logprobs"]  # at the sampling temperature, as the trainer computes them
    flags += ["--weight-transfer-config", json.dumps({"backend": WEIGHT_TRANSFER})]
    flags += default("uvicorn_log_level", "--uvicorn-log-level", "warning")  # else a line per request
    if capabilities.release(version) >= (0, 32):
        flags += ["--enable-scale-out"]  # /inference/v1/generate, which was always there before
    if args.vllm_max_model_len:
        flags += ["--max-model-len", str(args.vllm_max_model_len)]
    if args.vllm_max_num_seqs:
        flags += ["--max-num-seqs", str(args.vllm_max_num_seqs)]
    if args.device == "cuda" and args.colocate:  # vLLM would take 0.9, as if it were alone there
        flags += default("gpu_memory_utilization", "--gpu-memory-utilization", str(COLOCATED_FRACTION))
    if args.device == "cpu":
        flags += default("enforce_eager", "--enforce-eager")
        flags += default("kv_cache_memory_bytes", "--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES))
        # 0.32 dies of a prompt in two pieces whose request has a seed ("CPU Generator does not use offset").
        flags += default("enable_chunked_prefill", "--no-enable-chunked-prefill")
        if args.rollout_num_gpus_per_engine == 1:  # one process less, and half a gigabyte
            flags += default("distributed_executor_backend", "--distributed-executor-backend", "uni")
    return flags


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

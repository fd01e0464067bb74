"""The processes of an engine of vLLM: their arguments and environment variables."""

from __future__ import annotations

import os
from typing import Any

from instep.arguments.settings import ClusterSettings, Settings
from instep.engines.kind import engine_dtype, profile_folder
from instep.engines.spec import LONGEST_START, Addresses, EngineSpec
from instep.system.processes import DETERMINISTIC_ENV, OPENMP_ENV
from instep_engine import FAST_VARIABLE, PARENT_VARIABLE

PROFILED_ITERATIONS = 1024  # steps of an engine in a profile: more would take some hundred MB, and minutes to write


def serve_arguments(spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
    """Return the arguments of `vllm serve` for the process on the engine's `node_rank`-th node."""
    num_nodes = len(spec.nodes)
    words = [spec.path, *spec.flags, "--tensor-parallel-size", str(spec.parallel.tensor)]
    words += ["--served-model-name", *spec.names] if spec.names != [spec.path] else []
    if num_nodes > 1:
        words += ["--nnodes", str(num_nodes), "--node-rank", str(node_rank)]
        words += ["--master-addr", at.master_host, "--master-port", str(at.master_port)]
        if spec.parallel.data > 1:
            words += ["--data-parallel-rpc-port", str(at.rpc_port)]
    if node_rank:
        return [*words, "--headless"]
    if spec.parallel.data > 1:  # vLLM's default is a server per replica, and an abort would reach only one of them
        words += ["--api-server-count", "1"]
    return [*words, "--host", at.host, "--port", str(at.port)]


def profiler_config(args: ClusterSettings, spec: EngineSpec) -> dict[str, Any]:
    """Return the configuration of vLLM's profiler. It records nothing until it is asked to."""
    folder = os.path.abspath(os.path.join(args.run_dir, "profile", profile_folder(spec.name)))
    limits = {"max_iterations": PROFILED_ITERATIONS, "ignore_frontend": True}
    less = {"torch_profiler_with_stack": False, "torch_profiler_dump_cuda_time_total": False}
    return {"profiler": "torch", "torch_profiler_dir": folder, **limits, **less}


def node_environment(spec: EngineSpec, at: Addresses, node_host: str) -> dict[str, str]:
    """Return the environment variables that depend on the addresses of the engine and of the process on `node_host`."""
    env = {"VLLM_HOST_IP": node_host} if len(spec.nodes) > 1 else {}
    if spec.num_side_channel_ports:
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = node_host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(at.side_channel_port)
    return env


def vllm_env(args: Settings, num_threads: int) -> dict[str, str]:
    """Return the environment variables of every process of vLLM."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the control routes
        "VLLM_NO_USAGE_STATS": "1",
        PARENT_VARIABLE: "1",
        # A constant, because it is part of vLLM's compilation key.
        "VLLM_ENGINE_READY_TIMEOUT_S": os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S", str(LONGEST_START)),
    }
    if not args.no_fast_log_probs:
        env[FAST_VARIABLE] = "1"
    if plugins := os.environ.get("VLLM_PLUGINS"):  # vLLM loads only these
        env["VLLM_PLUGINS"] = f"{plugins},instep_engine"
    if args.device == "cpu":
        env |= {
            "TORCH_COMPILE_DISABLE": "1",  # otherwise the first request waits 17 s for helpers to be compiled
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the CPU platform keep the `uni` executor
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each engine would take the same cores
            "VLLM_CPU_INT4_W4A8": "0",  # otherwise, with AMX, layers of GPTQ and AWQ round their inputs to 8 bits
            "OMP_NUM_THREADS": str(num_threads),
            **OPENMP_ENV,
        }
    else:
        # vLLM 0.26 imports humming for quantized layers. By default humming builds its kernels beside the start of
        # every engine, in processes that import torch and outlive a killed engine. Here they are built on demand.
        env["HUMMING_DISABLE_PARALLEL_BUILD"] = os.environ.get("HUMMING_DISABLE_PARALLEL_BUILD", "1")
        if engine_dtype(args) == "float32":
            env["TRITON_F32_DEFAULT"] = "ieee"  # otherwise vLLM's attention for float32 multiplies in TF32
    return env | (DETERMINISTIC_ENV if args.deterministic_mode else {})

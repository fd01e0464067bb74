"""Plans of engines and routers from command lines and files of `--vllm-config`, for unit tests."""

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines, plan_routers
from instep.engines.spec import Addresses, Slot
from instep.errors import ConfigError

# vime's usage guide, word for word.
GUIDE = """\
vllm:
  - name: actor
    update_weights: true          # receives weight updates from training (default)
    server_groups:
      - worker_type: regular
        num_gpus: 8
        num_gpus_per_engine: 4
  - name: ref
    model_path: /path/to/ref_model
    update_weights: false          # frozen, no weight updates
    server_groups:
      - worker_type: regular
        num_gpus: 4
        num_gpus_per_engine: 2
"""
AUTH, FAST = "instep_engine.vllm.auth.Middleware", "instep_engine.vllm.fast.api.Middleware"
NAMES = ["--middleware", "instep_engine.vllm.token_names.Middleware"]
AT = Addresses("127.0.0.1", 8000, "10.0.0.1", 29501, 29550, 5600)
# What instep adds to every engine (of the vLLM whose flags are newest, where none is installed), and to those it feeds.
COMMON = [
    *("--dtype", "bfloat16", "--seed", "1234", "--logprobs-mode", "processed_logprobs"),
    *("--uvicorn-log-level", "warning", "--enable-scale-out"),
]
FED = [*COMMON[:-1], "--weight-transfer-config", '{"backend": "instep_shm"}', COMMON[-1]]
APART = [*FED, *NAMES, "--middleware", AUTH]  # of an engine that prefills or decodes only
ENDS = [*NAMES, "--middleware", FAST, "--middleware", AUTH, "--scheduler-cls", "instep_engine.vllm.fast.scheduler.make"]
COMMON, FED = COMMON + ENDS, FED + ENDS
ROUTED = [
    *("--max-concurrent-requests", "32768", "--queue-size", "32768", "--log-level", "warning"),
    *("--disable-retries", "--disable-circuit-breaker", "--worker-startup-check-interval", "1"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cors-allowed-origins", "http://127.0.0.1", "--request-timeout-secs", "3600"),
]
STICKY = ["--policy", "sticky_least_loaded", *ROUTED]
DISAGGREGATED = """\
vllm:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_num_batched_tokens: 16384}}
      - {worker_type: placeholder, num_gpus: 2}
      - worker_type: decode
        num_gpus: 8
        num_gpus_per_engine: 8
        overrides:
          data_parallel_size: 4
          enable_expert_parallel: true
          enable_prefix_caching: false
          compilation_config: {cudagraph_mode: FULL_DECODE_ONLY}
          cudagraph_capture_sizes: [1, 2]
          hf_overrides: {}
"""


def arguments(words: str = "", config: str = ""):
    if config:
        with open("topology.yaml", "w") as file:
            file.write(config)
        words += " --vllm-config topology.yaml"
    return parse(f"--hf-checkpoint models/policy {words}".split(), "plan")


def engines(words: str = "", config: str = ""):
    return plan_engines(arguments(words, config))


def routers(words: str = "", config: str = ""):
    args = arguments(words, config)
    return plan_routers(args, plan_engines(args))


def refusal(words: str = "", config: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        arguments(words, config)
    return str(caught.value)


def slots(node, gpus):
    return tuple(Slot(node, gpu) for gpu in gpus)

"""The flags of vLLM and of vllm-router that are reserved because instep sets them itself."""

from __future__ import annotations

from collections.abc import Iterator

from instep.engines.flags import Package

_SIZE = "--rollout-num-gpus-per-engine"
_ONE_MODEL = "an engine serves the trained model"
_NODES = "instep plans engines of several nodes, and how their parts find each other (`instep plan` shows it)"
_ADDRESS = "engines and routers listen where instep reaches them, on loopback on one host, in plain HTTP"
_SECRET = "the command line of a process can be read by all users of the host"
_PD = "instep gives the router its engines"

# Fields, why they are reserved, what to use instead.
_RESERVED: dict[Package, tuple[tuple[str, str, str], ...]] = {
    "vllm": (
        ("model", _ONE_MODEL, "--hf-checkpoint, or model_path in --vllm-config"),
        ("served_model_name", _ONE_MODEL + ", and requests name its folder", "--hf-checkpoint"),
        ("config", "instep composes the command line", "--vllm-config, for groups of engines"),
        ("tensor_parallel_size", "follows from an engine's GPUs: TP = GPUs / (PP x DP)", _SIZE),
        ("device_ids", "the plan gives each engine its GPUs", "--rollout-num-gpus"),
        ("nnodes node_rank master_addr master_port headless", _NODES, _SIZE),
        (
            "data_parallel_address data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank "
            "data_parallel_rank data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb "
            "data_parallel_multi_port_external_lb data_parallel_supervisor_port dp_supervisor_probe_interval_s "
            "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold",
            _NODES,
            "--vllm-data-parallel-size",
        ),
        ("port", "instep chooses the ports", "--engine-port"),
        ("api_server_count", "a control call would reach one of several servers", ""),
        (
            "host uds root_path grpc grpc_port ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers "
            "enable_ssl_refresh",
            _ADDRESS,
            "",
        ),
        ("api_key", _SECRET, "--api-key-file"),
        ("hf_token", _SECRET, "the environment variable HF_TOKEN"),
        ("seed", "each sample has a seed of its own", "--seed"),
        ("logprobs_mode", "the trainer needs the log-probs of the distribution that was sampled from", ""),
        ("enable_scale_out tokens_only", "instep asks for tokens by /inference/v1/generate, and turns it on", ""),
        ("weight_transfer_config", "the way of a weight sync has a flag", "--weight-sync shm or --weight-sync disk"),
        (
            "enable_sleep_mode",
            "engines sleep while the trainer works, which has a flag",
            "--offload-rollout",
        ),
        ("runner convert pooler_config", "engines generate", ""),
    ),
    "vllm-router": (
        ("host port", "instep starts the router on a free port, on loopback", "--vllm-router-ip for one of yours"),
        ("worker_urls", _PD, "--rollout-num-gpus"),
        ("vllm_pd_disaggregation prefill decode mini_lb", _PD, "--prefill-num-servers or --vllm-config"),
        ("kv_connector", "follows from the engines' connector", "--vllm-kv-transfer-config"),
        (
            "service_discovery service_discovery_port service_discovery_namespace selector prefill_selector "
            "decode_selector vllm_discovery_address",
            _PD,
            "",
        ),
        (
            "intra_node_data_parallel_size",
            "vLLM spreads requests over its replicas itself",
            "--vllm-data-parallel-size",
        ),
        ("enable_igw", "each model has a router of its own", "--vllm-config"),
        ("prometheus_host prometheus_port", "instep chooses the ports", ""),
        ("api_key", _SECRET, "--api-key-file"),
    ),
}


def reserved(package: Package) -> Iterator[tuple[str, str, str]]:
    """For each reserved flag its field, why it is reserved, and what to use instead ("" where nothing is needed)."""
    for fields, why, instead in _RESERVED[package]:
        for field in fields.split():
            yield field, why, instead

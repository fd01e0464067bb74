"""SGLang's server arguments, in slime `--sglang-*`. Those whose values vLLM takes, too, are read as its flag; what
chooses SGLang's kernels changes nothing; the others are refused, each with instep's flag of the same meaning."""

from instep.arguments.flag import Flag, FlagGroup

NOTE = "the engine is vLLM, not SGLang"
_GUIDE = (
    "router-ip router-port context-length mem-fraction-static tp-size dp-size enable-dp-attention enable-ep-moe "
    "enable-deepep-moe"
).split()
_SLIME = (
    "router-ip router-port router-request-timeout-secs server-concurrency config enable-deterministic-inference"
).split()

# Of the equivalents: those that take the same values.
_SAME = (
    "router-ip router-port router-request-timeout-secs server-concurrency max-running-requests context-length "
    "mem-fraction-static chunked-prefill-size disable-overlap-schedule page-size disable-radix-cache kv-cache-dtype "
    "cpu-offload-gb dtype quantization trust-remote-code disable-custom-all-reduce disable-cuda-graph "
    "cuda-graph-max-bs cuda-graph-bs reasoning-parser tool-call-parser chat-template enable-deterministic-inference"
).split()
# What nothing is changed by: tuning of an engine that does not run here.
_TUNING = (
    "attention-backend prefill-attention-backend decode-attention-backend mm-attention-backend moe-runner-backend "
    "moe-a2a-backend deepep-mode moe-dense-tp-size enable-dp-lm-head nsa-prefill-backend nsa-decode-backend "
    "speculative-draft-attention-backend mamba-scheduler-strategy disaggregation-ib-device watchdog-timeout "
    "skip-server-warmup enable-metrics log-level log-level-http"
).split()

# What to use instead, and the names (without --sglang-) of which it is the equivalent.
_EQUIVALENTS = {
    # slime's own flags about SGLang
    "--vllm-router-ip": "router-ip",
    "--vllm-router-port": "router-port",
    "--router-request-timeout-secs": "router-request-timeout-secs",
    "--vllm-config": "config",
    "--vllm-max-num-seqs": "server-concurrency max-running-requests",
    # memory and scheduling
    "--vllm-max-model-len": "context-length",
    "--vllm-gpu-memory-utilization": "mem-fraction-static",
    "--vllm-num-gpu-blocks-override": "max-total-tokens",
    "--vllm-max-num-batched-tokens": "chunked-prefill-size max-prefill-tokens",
    "--vllm-enable-chunked-prefill": "enable-mixed-chunk",
    "--vllm-scheduling-policy": "schedule-policy",
    "--vllm-no-async-scheduling": "disable-overlap-schedule",
    "--vllm-block-size": "page-size",
    "--vllm-no-enable-prefix-caching": "disable-radix-cache",
    "--vllm-kv-cache-dtype": "kv-cache-dtype",
    "--vllm-kv-offloading-size": "enable-hierarchical-cache hicache-ratio hicache-size",
    "--vllm-kv-offloading-backend": "hicache-storage-backend",
    "--vllm-cpu-offload-gb": "cpu-offload-gb",
    "--vllm-stream-interval": "stream-interval",
    # model
    "--hf-checkpoint": "model-path served-model-name",
    "--vllm-dtype": "dtype",
    "--vllm-quantization": "quantization",
    "--vllm-load-format": "load-format",
    "--vllm-model-loader-extra-config": "model-loader-extra-config",
    "--vllm-model-impl": "model-impl",
    "--vllm-trust-remote-code": "trust-remote-code",
    "--vllm-tokenizer": "tokenizer-path",
    "--vllm-tokenizer-mode": "tokenizer-mode",
    "--vllm-skip-tokenizer-init": "skip-tokenizer-init",
    "--vllm-revision": "revision",
    "--vllm-download-dir": "download-dir",
    "--vllm-hf-overrides": "json-model-override-args",
    "--seed": "random-seed",
    "--deterministic-mode": "enable-deterministic-inference",
    # GPUs
    "--rollout-num-gpus-per-engine": "tp-size tensor-parallel-size nnodes node-rank dist-init-addr nccl-port",
    "--rollout-num-gpus": "base-gpu-id gpu-id-step",
    "--vllm-pipeline-parallel-size": "pp-size pipeline-parallel-size",
    "--vllm-data-parallel-size": "dp-size data-parallel-size enable-dp-attention",
    "--vllm-enable-expert-parallel": "enable-ep-moe ep-size expert-parallel-size",
    "--vllm-all2all-backend": "enable-deepep-moe moe-a2a-backend deepep-mode",
    "--vllm-moe-backend": "moe-runner-backend",
    "--vllm-enable-eplb": "enable-eplb",
    "--vllm-eplb-config": "ep-num-redundant-experts eplb-algorithm eplb-rebalance-num-iterations",
    "--vllm-disable-custom-all-reduce": "disable-custom-all-reduce",
    "--vllm-distributed-timeout-seconds": "dist-timeout",
    "--engine-port": "port",
    "--offload-rollout": "enable-memory-saver",
    # kernels
    "--vllm-attention-backend": "attention-backend prefill-attention-backend decode-attention-backend",
    "--vllm-mm-encoder-attn-backend": "mm-attention-backend",
    "--vllm-enforce-eager": "disable-cuda-graph",
    "--vllm-max-cudagraph-capture-size": "cuda-graph-max-bs",
    "--vllm-cudagraph-capture-sizes": "cuda-graph-bs",
    "--vllm-compilation-config": "enable-torch-compile torch-compile-max-bs",
    # features
    "--vllm-speculative-config": "speculative-algorithm speculative-draft-model-path speculative-num-steps "
    "speculative-eagle-topk speculative-num-draft-tokens",
    "--vllm-enable-lora": "enable-lora",
    "--vllm-lora-modules": "lora-paths",
    "--vllm-max-loras": "max-loras-per-batch",
    "--vllm-max-lora-rank": "max-lora-rank",
    "--vllm-lora-target-modules": "lora-target-modules",
    "--vllm-enable-return-routed-experts": "enable-return-routed-experts",
    "--prefill-num-servers": "disaggregation-mode",
    "--vllm-kv-transfer-config": "disaggregation-transfer-backend disaggregation-ib-device "
    "disaggregation-bootstrap-port",
    "--vllm-structured-outputs-config": "grammar-backend",
    "--vllm-reasoning-parser": "reasoning-parser",
    "--vllm-tool-call-parser": "tool-call-parser",
    "--vllm-chat-template": "chat-template",
    "--vllm-uvicorn-log-level": "log-level log-level-http",
    "--vllm-enable-log-requests": "log-requests",
}
# Without an equivalent: why.
_NONE = {
    "host": "engines listen where instep reaches them",
    "api-key": "engines listen on loopback, in plain HTTP",
    "weight-version": "a weight sync sets it",
    "custom-pull-weights-pre-read-hook": "engines do not pull weights",
}


def _flags() -> list[Flag]:
    pairs = {name: instead for instead, names in _EQUIVALENTS.items() for name in names.split()}
    out = []
    for name in (*pairs, *_NONE, *(n for n in _TUNING if n not in pairs and n not in _NONE)):
        whose, instead = "S" * (name in _GUIDE) + "C" * (name in _SLIME), pairs.get(name, "")
        if name in _SAME:
            flag = Flag("--sglang-" + name, status="accepted", note=NOTE, read_as=instead, whose=whose)
        elif name in _TUNING:
            flag = Flag("--sglang-" + name, status="accepted", note=f"{NOTE}, which is tuned on its own", whose=whose)
        else:
            note = f"{NOTE}; {_NONE[name]}" if name in _NONE else NOTE
            flag = Flag("--sglang-" + name, status="refused", note=note, instead=instead, whose=whose)
        out.append(flag)
    return out


SGLANG = FlagGroup("SGLang's flags", tuple(_flags()))

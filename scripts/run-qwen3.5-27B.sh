#!/usr/bin/env bash
# GRPO of Qwen3.5-27B on one host of 8 GPUs, trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-gpus-per-node 8 --colocate --optimizer-cpu-offload
    --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 4 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --max-tokens-per-gpu 16384
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" "${MODEL:-qwen3.5-27B}" "$@"

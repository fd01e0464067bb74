#!/usr/bin/env bash
# GRPO of Qwen3-1.7B on 2 GPUs, trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-gpus-per-node 2 --colocate --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --vllm-gpu-memory-utilization 0.6
    --rollout-max-response-len 4096 --max-tokens-per-gpu 8192
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" qwen3-1.7B "$@"

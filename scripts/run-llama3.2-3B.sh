#!/usr/bin/env bash
# GRPO of Llama-3.2-3B on 4 GPUs, trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-gpus-per-node 4 --colocate --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --vllm-gpu-memory-utilization 0.6
    --rollout-max-response-len 4096 --max-tokens-per-gpu 8192
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" llama3.2-3B "$@"

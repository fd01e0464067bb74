#!/usr/bin/env bash
# GRPO of Qwen3-0.6B on one GPU, trainer and engine on the same one; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-gpus-per-node 1 --colocate
    --vllm-gpu-memory-utilization 0.5
    --rollout-max-response-len 2048 --max-tokens-per-gpu 8192
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" qwen3-0.6B "$@"

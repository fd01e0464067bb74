#!/usr/bin/env bash
# GRPO of Qwen2.5-7B on one host of 8 GPUs, trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-gpus-per-node 8 --colocate
    --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 2 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --max-tokens-per-gpu 9216
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" qwen2.5-7B "$@"

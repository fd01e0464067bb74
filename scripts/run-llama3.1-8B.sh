#!/usr/bin/env bash
# GRPO of Llama-3.1-8B: 4 GPUs train, 4 generate; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1
    --tensor-model-parallel-size 4 --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-max-response-len 4096 --max-tokens-per-gpu 8192
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" llama3.1-8B "$@"

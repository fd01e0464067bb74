#!/usr/bin/env bash
# GRPO of Llama-3.3-70B on 4 hosts of 8 GPUs (a Ray cluster), trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 8 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --max-tokens-per-gpu 9216
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" llama3.3-70B "$@"

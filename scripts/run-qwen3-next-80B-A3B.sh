#!/usr/bin/env bash
# GRPO of Qwen3-Next-80B-A3B on 4 hosts of 8 GPUs (a Ray cluster), trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate --optimizer-cpu-offload
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --moe-grouped-gemm --moe-router-dtype fp32
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 8 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --max-tokens-per-gpu 8192
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" qwen3-next-80B-A3B "$@"

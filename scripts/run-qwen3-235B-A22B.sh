#!/usr/bin/env bash
# GRPO of Qwen3-235B-A22B on 8 hosts of 8 GPUs (a Ray cluster), trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate --optimizer-cpu-offload
    --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2
    --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 22
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --moe-router-dtype fp32
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 16 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --max-tokens-per-gpu 16384
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" qwen3-235B-A22B "$@"

#!/usr/bin/env bash
# GRPO of DeepSeek-V3 (V3.1, R1) on 16 hosts of 8 GPUs (a Ray cluster), trainer and engines on the same ones; recipe.sh says how to run it.
LAYOUT=(
    --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate --optimizer-cpu-offload
    --tensor-model-parallel-size 8 --sequence-parallel --context-parallel-size 4
    --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 13
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 32 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --max-tokens-per-gpu 16384
)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" deepseek-v3 "$@"

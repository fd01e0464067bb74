#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on one host of 8 GPUs, trainer and engines on the same ones.
# usage: HF_CHECKPOINT=DIR PROMPT_DATA=FILE.jsonl scripts/run-qwen3-30B-A3B.sh [FLAG ...]
#   further flags of `instep train` replace those below; `INSTEP="instep plan" ...` only shows what would go where
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/models/qwen3-30B-A3B.sh"

FLAGS=(
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "${HF_CHECKPOINT:?a folder with config.json and safetensors}"
    --prompt-data "${PROMPT_DATA:?a jsonl or parquet file}" --input-key prompt --label-key label --apply-chat-template
    --rm-type math
    --advantage-estimator grpo
    --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --lr 1e-6 --lr-decay-style constant
    --save "runs/qwen3-30B-A3B/checkpoints" --save-interval 20 --run-dir "runs/qwen3-30B-A3B"
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --optimizer-cpu-offload
    --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --moe-router-dtype fp32
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-num-gpus-per-engine 8 --vllm-gpu-memory-utilization 0.7
    --rollout-max-response-len 8192 --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
read -ra COMMAND <<< "${INSTEP:-python $HERE/../train.py}"
exec "${COMMAND[@]}" "${FLAGS[@]}" "$@"

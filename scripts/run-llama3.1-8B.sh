#!/usr/bin/env bash
# GRPO of Llama-3.1-8B: 4 GPUs train, 4 generate.
# usage: HF_CHECKPOINT=DIR PROMPT_DATA=FILE.jsonl scripts/run-llama3.1-8B.sh [FLAG ...]
#   further flags of `instep train` replace those below; `INSTEP="instep plan" ...` only shows what would go where
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/models/llama3.1-8B.sh"

FLAGS=(
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "${HF_CHECKPOINT:?a folder with config.json and safetensors}"
    --prompt-data "${PROMPT_DATA:?a jsonl or parquet file}" --input-key prompt --label-key label --apply-chat-template
    --rm-type math
    --advantage-estimator grpo
    --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --lr 1e-6 --lr-decay-style constant
    --save "runs/llama3.1-8B/checkpoints" --save-interval 20 --run-dir "runs/llama3.1-8B"
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1
    --tensor-model-parallel-size 4 --sequence-parallel
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --rollout-max-response-len 4096 --use-dynamic-batch-size --max-tokens-per-gpu 8192
)
read -ra COMMAND <<< "${INSTEP:-python $HERE/../train.py}"
exec "${COMMAND[@]}" "${FLAGS[@]}" "$@"

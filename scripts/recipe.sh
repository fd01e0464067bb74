# The common part of run-*.sh, which `source` it with the name of a file of models/: GRPO with LAYOUT, what goes where.
# usage: HF_CHECKPOINT=DIR PROMPT_DATA=FILE.jsonl scripts/run-MODEL.sh [FLAG ...]
#   further flags of `instep train` replace those below; `INSTEP="instep plan" ...` only shows what would go where
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
MODEL="$1"
shift
source "$HERE/models/$MODEL.sh"

FLAGS=(
    "${MODEL_ARGS[@]}"
    --hf-checkpoint "${HF_CHECKPOINT:?a folder with config.json and safetensors}"
    --prompt-data "${PROMPT_DATA:?a jsonl or parquet file}" --input-key prompt --label-key label --apply-chat-template
    --rm-type math
    --advantage-estimator grpo
    --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --lr 1e-6 --lr-decay-style constant
    --save "runs/$MODEL/checkpoints" --save-interval 20 --run-dir "runs/$MODEL"
    --use-dynamic-batch-size
    "${LAYOUT[@]}"
)
COMMAND=(python "$HERE/../train.py")
if [[ -n ${INSTEP:-} ]]; then read -ra COMMAND <<<"$INSTEP"; fi
exec "${COMMAND[@]}" "${FLAGS[@]}" "$@"

# Qwen3.6-35B-A3B, its language model; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 40 --hidden-size 2048 --ffn-hidden-size 512 --swiglu
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --disable-bias-linear --qk-layernorm
    --attention-output-gate --use-rotary-position-embeddings --rotary-percent 0.25 --rotary-base 10000000
    --vocab-size 248320 --untie-embeddings-and-output-weights
    --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
)

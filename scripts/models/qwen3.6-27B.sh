# Qwen3.6-27B, its language model; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 17408 --swiglu
    --num-attention-heads 24 --group-query-attention --num-query-groups 4 --kv-channels 256
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --disable-bias-linear --qk-layernorm
    --attention-output-gate --use-rotary-position-embeddings --rotary-percent 0.25 --rotary-base 10000000
    --vocab-size 248320 --untie-embeddings-and-output-weights
)

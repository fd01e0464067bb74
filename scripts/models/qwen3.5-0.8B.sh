# Qwen3.5-0.8B, its language model; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 3584 --swiglu
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 --kv-channels 256
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p --disable-bias-linear --qk-layernorm
    --attention-output-gate --use-rotary-position-embeddings --rotary-percent 0.25 --rotary-base 10000000
    --vocab-size 248320
)

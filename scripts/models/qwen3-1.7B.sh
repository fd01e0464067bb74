# Qwen3-1.7B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 28 --hidden-size 2048 --ffn-hidden-size 6144 --swiglu
    --num-attention-heads 16 --group-query-attention --num-query-groups 8 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)

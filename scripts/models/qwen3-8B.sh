# Qwen3-8B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --swiglu
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936 --untie-embeddings-and-output-weights
)

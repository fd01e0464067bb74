# Qwen3-32B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 64 --hidden-size 5120 --ffn-hidden-size 25600 --swiglu
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936 --untie-embeddings-and-output-weights
)

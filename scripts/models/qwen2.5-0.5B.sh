# Qwen2.5-0.5B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --swiglu
    --num-attention-heads 14 --group-query-attention --num-query-groups 2 --kv-channels 64
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)

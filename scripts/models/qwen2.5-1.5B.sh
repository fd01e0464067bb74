# Qwen2.5-1.5B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 28 --hidden-size 1536 --ffn-hidden-size 8960 --swiglu
    --num-attention-heads 12 --group-query-attention --num-query-groups 2 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
)

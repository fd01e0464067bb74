# Qwen2.5-7B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --swiglu
    --num-attention-heads 28 --group-query-attention --num-query-groups 4 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --add-qkv-bias
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 152064 --untie-embeddings-and-output-weights
)

# Qwen2.5-72B (its base model has MODEL_ARGS_NORM_EPSILON=1e-5); `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 29568 --swiglu
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 128
    --normalization RMSNorm --norm-epsilon "${MODEL_ARGS_NORM_EPSILON:-1e-6}" --disable-bias-linear --add-qkv-bias
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 152064 --untie-embeddings-and-output-weights
)

# Llama-3.2-3B; `source` it: flags of its shape
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --swiglu
    --num-attention-heads 24 --group-query-attention --num-query-groups 8 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --use-rotary-position-embeddings --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --vocab-size 128256
)
